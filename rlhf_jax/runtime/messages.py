"""Messages between processes: plain values and registered dataclasses as msgpack, and back.

Nothing that arrives is ever executed. A message holds None, bools, numbers, text, bytes, lists,
tuples, dicts, numeric numpy arrays, dates, and registered dataclasses; anything else is refused in
one sentence, by the sender as by the receiver.

Values without a msgpack form are an array `(tag, *parts)`: a list is `("list", *items)`, a numpy
array `("array", dtype, shape, bytes)`, a dataclass `(its name, *its fields)`.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import decimal
import functools
import math
import numbers
import os
import types
import typing
import uuid
import zoneinfo
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgpack
import numpy as np

LARGEST_MESSAGE = 1 << 30  # most bytes of a message
MOST_ITEMS = 1 << 20  # most items of one list or dict; longer ones must be arrays
DEEPEST = 100  # most nested values
# The dtypes of supported arrays, least significant byte first: bool, integers, floats, complex.
WIRE_DTYPES = {np.dtype(code).newbyteorder("<").str for code in "?bhiqBHIQefdFD"}

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


class _Form(NamedTuple):
    """Describe the encoding of a type: the parts that follow its tag."""

    of: type
    parts: Callable[[Any], tuple]
    build: Callable[..., Any]


def register(cls: type[T]) -> type[T]:
    """Register a dataclass for messages, under its name; its owner calls this.

    Field types are checked when an instance arrives. Raises ValueError if the name is taken.
    """
    tag = cls.__name__
    if tag in _FORMS and _FORMS[tag].of is not cls:
        raise ValueError(f"Two kinds of messages are called {tag}.")
    names = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]

    hints: dict[str, Any] = {}

    def build(*parts: Any) -> T:
        if not hints:  # not before: a field may be of a class that is defined later
            hints.update(typing.get_type_hints(cls))
        if len(parts) != len(names):
            raise ValueError(f"{tag} has {len(names)} fields, not {len(parts)}")
        for name, value in zip(names, parts, strict=True):
            if not _fits(value, hints[name]):
                raise ValueError(f"{tag}.{name} is of type {type(value).__name__}")
        return cls(*parts)

    _FORMS[tag] = _Form(cls, lambda value: tuple(getattr(value, name) for name in names), build)
    return cls


def encode(value: object, largest: int = LARGEST_MESSAGE) -> bytes:
    """Return a value as bytes; raise ValueError for an unsupported type or too many bytes."""
    data = bytes(msgpack.packb(_lower(value, 0), unicode_errors="surrogatepass") or b"")
    if len(data) > largest:
        raise ValueError(f"A message of {len(data):,} bytes is over the limit of {largest:,}.")
    return data


def decode(
    data: bytes, channel: str, kind: type[Any] = object, largest: int = LARGEST_MESSAGE
) -> Any:
    """Return the value that `encode` encoded, an instance of `kind`.

    Raises ValueError, which names the channel, for any other bytes.
    """
    try:
        if len(data) > largest:
            raise ValueError(f"it is longer than {largest:,} bytes")
        lowered = msgpack.unpackb(
            data,
            use_list=False,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            max_array_len=MOST_ITEMS,
            max_map_len=MOST_ITEMS,
            max_ext_len=0,
        )
        value = _build(lowered, 0)
    except (ValueError, TypeError, ArithmeticError, KeyError, msgpack.UnpackException) as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise ValueError(f"What came over {channel} is no message of this run: {reason}.") from None
    if not _fits(value, kind):
        raise ValueError(
            f"What came over {channel} is of type {type(value).__name__}, not {kind.__name__}."
        )
    return value


def _lower(value: Any, depth: int) -> Any:
    """Return a value in msgpack's forms: arrays are tuples that begin with a tag."""
    if depth > DEEPEST:
        raise ValueError(f"A message is nested more than {DEEPEST} levels deep.")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return int(value)
    if isinstance(value, float) and not isinstance(value, np.generic):
        return float(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, list | tuple | Mapping) and len(value) > MOST_ITEMS:
        raise ValueError(f"A message has a list of {len(value):,} items; send an array.")
    if isinstance(value, Mapping):
        return {_lower(key, depth + 1): _lower(item, depth + 1) for key, item in value.items()}

    tag = _tag_of(type(value))
    return (tag, *(_lower(part, depth + 1) for part in _FORMS[tag].parts(value)))


@functools.cache
def _tag_of(cls: type) -> str:
    """Return the tag of a type.

    A dataclass has only its own name, a subclass of a plain type the tag of that type.
    """
    name = cls.__name__
    if name in _FORMS and _FORMS[name].of is cls:
        return name
    for tag, form in _FORMS.items():
        if tag.islower() and issubclass(cls, form.of):
            return tag
    raise ValueError(f"A value of type {name} cannot be sent between processes.")


def _build(lowered: Any, depth: int) -> Any:
    """Return the argument of `_lower`; raise ValueError for anything it cannot have produced."""
    if depth > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    if lowered is None or isinstance(lowered, bool | int | float | str | bytes):
        return lowered
    if isinstance(lowered, dict):
        items = lowered.items()
        return {_build(key, depth + 1): _build(item, depth + 1) for key, item in items}
    tag = lowered[0] if isinstance(lowered, tuple) and lowered else None
    if not isinstance(tag, str) or tag not in _FORMS:
        raise ValueError(f"it has a part of the unknown kind {str(tag)[:40]!r}")
    return _FORMS[tag].build(*(_build(part, depth + 1) for part in lowered[1:]))


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of an annotated type, items of lists, tuples and dicts included."""
    origin = typing.get_origin(hint)
    of = typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in of)
    if origin is tuple and isinstance(value, tuple):
        kinds = [of[0]] * len(value) if of[1:] == (...,) else of
        return len(kinds) == len(value) and all(map(_fits, value, kinds))
    if origin in (list, collections.abc.Sequence) and isinstance(value, list):
        return all(_fits(item, of[0]) for item in value)
    if origin in (dict, collections.abc.Mapping) and isinstance(value, dict):
        return all(_fits(key, of[0]) and _fits(item, of[1]) for key, item in value.items())
    if hint is bool:
        return isinstance(value, bool | np.bool_)
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    return isinstance(value, type(None) if hint is None else origin or hint)


# Errors


@dataclasses.dataclass(frozen=True)
class RemoteError:
    """Carry an error to another process: a class of the allowed ones, and its message."""

    kind: str
    arguments: tuple[Any, ...]
    notes: list[str]


_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(AssertionError, AttributeError, IndexError, KeyError, LookupError, MemoryError),
        *(ArithmeticError, ZeroDivisionError, OverflowError, RuntimeError, NotImplementedError),
        *(ImportError, ModuleNotFoundError, TypeError, ValueError, EOFError),
        *(OSError, BlockingIOError, ChildProcessError, ConnectionError, BrokenPipeError),
        *(ConnectionAbortedError, ConnectionRefusedError, ConnectionResetError, FileExistsError),
        *(FileNotFoundError, InterruptedError, IsADirectoryError, NotADirectoryError),
        *(PermissionError, ProcessLookupError, TimeoutError),
    )
}


def register_error(cls: type[E]) -> type[E]:
    """Register an error class for messages: it must be constructible from its own `args`."""
    _ERRORS[cls.__name__] = cls
    return cls


def describe_error(error: Exception) -> RemoteError:
    """Return the message for another process about an error.

    A class that is not allowed is replaced by the nearest base that is, else by RuntimeError, with
    the same text.
    """
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    nearest = next((kind for kind in type(error).__mro__ if kind in _ERRORS.values()), None)
    if nearest is None:
        return RemoteError("RuntimeError", (f"{type(error).__name__}: {error}",), notes)
    arguments = error.args
    if isinstance(error, OSError) and error.filename is not None:
        arguments = (error.errno, error.strerror, os.fsdecode(error.filename))
    try:
        encode(arguments)
        nearest_takes_them = nearest is type(error)
    except ValueError:
        nearest_takes_them = False
    if not nearest_takes_them:
        arguments = (str(error),)
    return RemoteError(nearest.__name__, arguments, notes)


def rebuild_error(remote: RemoteError) -> Exception:
    """Return the error from another process's message."""
    if remote.kind not in _ERRORS:
        raise ValueError(f"Another process sent an error of the unknown kind {remote.kind!r}.")
    error = _ERRORS[remote.kind](*remote.arguments)
    for note in remote.notes:
        error.add_note(note)
    return error


# The forms of plain values


def _array_parts(array: np.ndarray) -> tuple:
    ordered = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    if ordered.dtype.str not in WIRE_DTYPES:
        raise ValueError(f"An array of dtype {array.dtype} cannot be sent between processes.")
    return ordered.dtype.str, array.shape, ordered.tobytes()


def _build_array(dtype: str, shape: tuple[int, ...], data: bytes) -> np.ndarray:
    if dtype not in WIRE_DTYPES:
        raise ValueError(f"it has an array of dtype {str(dtype)[:40]!r}")
    if not (_fits(shape, tuple[int, ...]) and all(size >= 0 for size in shape)):
        raise ValueError("it has an array without a shape")
    if not isinstance(data, bytes) or len(data) != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"it has an array whose bytes are not those of {dtype}{list(shape)}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _moment_parts(moment: datetime.datetime) -> tuple:
    """Return a date and time, to the microsecond, and its zone: a name, or seconds of offset."""
    zone = getattr(moment.tzinfo, "key", None) or getattr(moment.tzinfo, "zone", None)
    offset = moment.utcoffset()
    if not zone and offset is not None:
        zone = offset.total_seconds()
    plain = [getattr(moment, name) for name in ("year", "month", "day", "hour", "minute", "second")]
    return (*plain, moment.microsecond, moment.fold, zone)


def _build_moment(*parts: Any) -> datetime.datetime:
    *plain, fold, zone = parts
    place = None
    if isinstance(zone, str):
        place = zoneinfo.ZoneInfo(zone)
    elif zone is not None:
        place = datetime.timezone(datetime.timedelta(seconds=zone))
    return datetime.datetime(*plain, fold=fold, tzinfo=place)


# By tag, in lower case; the names of registered dataclasses begin with a capital. A type comes
# before its base types.
_FORMS: dict[str, _Form] = {
    "list": _Form(list, tuple, lambda *items: list(items)),
    "tuple": _Form(tuple, tuple, lambda *items: items),
    "array": _Form(np.ndarray, _array_parts, _build_array),
    "scalar": _Form(
        np.generic,
        lambda scalar: _array_parts(np.asarray(scalar)),
        lambda *parts: _build_array(*parts)[()],
    ),
    "integer": _Form(int, lambda value: (hex(value),), lambda text: int(text, 16)),
    "datetime": _Form(datetime.datetime, _moment_parts, _build_moment),
    "date": _Form(datetime.date, lambda day: (day.isoformat(),), datetime.date.fromisoformat),
    "time": _Form(datetime.time, lambda at: (at.isoformat(),), datetime.time.fromisoformat),
    "timedelta": _Form(
        datetime.timedelta,
        lambda length: (length.days, length.seconds, length.microseconds),
        datetime.timedelta,
    ),
    "decimal": _Form(decimal.Decimal, lambda value: (str(value),), decimal.Decimal),
    "uuid": _Form(
        uuid.UUID, lambda value: (value.bytes,), lambda data: uuid.UUID(bytes=bytes(data))
    ),
}
register(RemoteError)
