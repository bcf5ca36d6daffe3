"""Every way in which a call of a reward can end, by name, and what is right of it.

A reward of this file is called with the name of an ending as the response.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import decimal
import fractions
import math
import os
import re
import signal
import time
from collections.abc import Sequence

import ml_dtypes
import numpy as np


class Raises(float):
    """A number by its class, whose conversion raises."""

    error: BaseException

    def __new__(cls, error):
        made = super().__new__(cls)
        made.error = error
        return made

    def __float__(self):
        raise self.error


class Unprintable(Exception):
    def __str__(self):
        raise SystemExit("no text")


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("a lock")
        self.lock = lambda: None

    def __reduce__(self):
        raise TypeError("cannot pickle")


class EndlessList(Sequence):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return 1.0


class Hidden:
    """An object that raises wherever it is touched."""

    def __getattribute__(self, name):
        raise KeyboardInterrupt("untouchable")


def of_type(name):
    return f"gave a value of type {name} instead of one float"


INFINITE = "which is no finite float32"
# What a call returns, and the score that it is, or how the reason begins why it is none.
VALUES = {
    "a float": (lambda: 0.25, 0.25),
    "an int": (lambda: 3, 3.0),
    "true": (lambda: True, 1.0),
    "minus zero": (lambda: -0.0, 0.0),
    "a fraction": (lambda: fractions.Fraction(1, 4), 0.25),
    "a numpy float": (lambda: np.float16(0.5), 0.5),
    "a numpy int": (lambda: np.int64(-7), -7.0),
    "a numpy bool": (lambda: np.bool_(True), 1.0),
    "a bfloat16": (lambda: ml_dtypes.bfloat16(0.5), 0.5),
    "a 0-d array": (lambda: np.asarray(2.5, np.float32), 2.5),
    "the largest": (lambda: 3.4028234663852886e38, 3.4028234663852886e38),
    "none": (lambda: None, of_type("NoneType")),
    "nan": (lambda: math.nan, f"gave nan, {INFINITE}"),
    "infinite": (lambda: -math.inf, f"gave -inf, {INFINITE}"),
    "beyond float32": (lambda: 1e300, f"gave 1e+300, {INFINITE}"),
    "beyond float64": (lambda: 10**400, f"gave a number of type int, {INFINITE}"),
    "more digits than print": (lambda: -(10**5000), f"gave a number of type int, {INFINITE}"),
    "a large fraction": (lambda: fractions.Fraction(10**400), "gave a number of type Fraction"),
    "a decimal": (lambda: decimal.Decimal("0.5"), of_type("Decimal")),
    "complex": (lambda: 1j, of_type("complex")),
    "a text": (lambda: "0.5", of_type("str")),
    "bytes": (lambda: b"1", of_type("bytes")),
    "a 1-d array": (lambda: np.ones(1), of_type("ndarray")),
    "a list": (lambda: [1.0], of_type("list")),
    "a generator": (lambda: (one for one in [1.0]), of_type("generator")),
    "an object": (object, of_type("object")),
    "a dict without a score": (lambda: {"reward": 1.0}, of_type("dict")),
    "a float that raises": (lambda: Raises(OSError("no")), "raised OSError: no"),
    "a float that overflows": (lambda: Raises(OverflowError()), "gave a number of type Raises"),
    "a float that exits": (lambda: Raises(SystemExit(3)), "raised SystemExit: 3"),
    "an untouchable": (Hidden, "raised KeyboardInterrupt: untouchable"),
    "a pair": (lambda: (0.5, {"words": 2}), 0.5),
    "a pair of nan": (lambda: (math.nan, {"words": 2}), f"gave nan, {INFINITE}"),
    "nan beside it": (lambda: (0.5, {"words": math.nan}), 0.5),
    "huge beside it": (lambda: (0.5, {"words": 10**400}), 0.5),
    "a text beside it": (lambda: (0.5, {"words": "2"}), 0.5),
    "an untouchable beside it": (lambda: (0.5, {"words": Hidden()}), 0.5),
    "a surrogate beside it": (lambda: (0.5, {"\ud800": 1.0}), 0.5),
    "verl's dict": (lambda: {"score": 0.5, "acc": True, "pred": "B"}, 0.5),
    "verl's dict of nan": (lambda: {"score": math.nan}, f"gave nan, {INFINITE}"),
}
# What a call raises, and how the reason begins.
ERRORS = {
    "an error": (lambda: RuntimeError("two\nlines"), "raised RuntimeError: two lines"),
    "a time-out of its own": (TimeoutError, "raised TimeoutError: "),
    "asyncio's time-out": (asyncio.TimeoutError, "raised TimeoutError: "),
    "a future's time-out": (concurrent.futures.TimeoutError, "raised TimeoutError: "),
    "cancelled": (asyncio.CancelledError, "raised CancelledError: "),
    "a future's cancellation": (concurrent.futures.CancelledError, "raised CancelledError: "),
    "Ctrl-C": (KeyboardInterrupt, "raised KeyboardInterrupt: "),
    "an exit": (lambda: SystemExit(3), "raised SystemExit: 3"),
    "a generator's exit": (GeneratorExit, "raised GeneratorExit: "),
    "a bare exception": (lambda: BaseException("bare"), "raised BaseException: bare"),
    "a group": (
        lambda: BaseExceptionGroup("all", [KeyboardInterrupt()]),
        "raised BaseExceptionGroup: all (1 sub-exception)",
    ),
    "no more memory": (MemoryError, "raised MemoryError: "),
    "the end of input": (EOFError, "raised EOFError: "),
    "a closed pipe": (BrokenPipeError, "raised BrokenPipeError: "),
    "an unprintable error": (Unprintable, "raised Unprintable: (its text raised SystemExit)"),
    "an unpicklable error": (Unpicklable, "raised Unpicklable: a lock"),
    "a surrogate": (lambda: ValueError("\ud800"), "raised ValueError: \\ud800"),
    "a long text": (lambda: ValueError("x" * 10**6), "raised ValueError: xxx"),
}
ENDINGS = {name: right for name, (_, right) in (VALUES | ERRORS).items()}


def result(name):
    """End as a call of this name does, where that needs no waiting."""
    if name in ERRORS:
        raise ERRORS[name][0]()
    return VALUES[name][0]() if name in VALUES else 1.0


def ended(response):
    """End as the response says."""
    match response:
        case "never":
            time.sleep(8)
        case "never, under the lock":
            re.fullmatch("(a+)+b", "a" * 60)
        case "death":
            os._exit(3)
        case "a crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "interrupted":
            signal.raise_signal(signal.SIGINT)
    return result(response)


async def ended_async(response):
    """End as the response says, beside other calls."""
    await asyncio.sleep(0)
    match response:
        case "never":
            await asyncio.sleep(60)
        case "never, and not to be cancelled":
            for _ in range(80):
                try:
                    await asyncio.sleep(0.1)
                except asyncio.CancelledError:
                    continue
        case "cancels itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        case "exits in a task of its own":
            await asyncio.ensure_future(exits())
    return ended("never" if response == "never, in the loop" else response)


async def exits():
    """Exit where no call catches it."""
    raise SystemExit(5)


def ended_group(prompt, responses):
    """End as the row's prompt says, for all samples of it."""
    return GROUPS[prompt][0](len(responses))


# What a call of several responses returns, and what is right of each of two.
GROUPS = {
    "a list": (lambda count: [0.5] * count, [0.5, 0.5]),
    "a tuple": (lambda count: (0.5,) * count, [0.5, 0.5]),
    "an array": (lambda count: np.full(count, 0.5), [0.5, 0.5]),
    "a list of scalars": (lambda count: [np.asarray(0.5)] * count, [0.5, 0.5]),
    "a range": (range, [0.0, 1.0]),
    "not applicable": (lambda count: [None, 0.5], [0.0, 0.5]),
    "one of them raises": (lambda count: [Raises(OSError("no")), 0.5], ["raised OSError: no", 0.5]),
    "one of them nan": (lambda count: [math.nan, 0.5], [f"gave nan, {INFINITE}", 0.5]),
    "one too few": (lambda count: [0.5], ["gave a list of 1 instead of a list of 2 floats"] * 2),
    "a float": (lambda count: 0.5, ["gave a float instead of a list of 2 floats"] * 2),
    "a 0-d array": (lambda count: np.asarray(0.5), ["gave a float instead"] * 2),
    "a 2-d array": (lambda count: np.ones((count, 1)), [of_type("list")] * 2),
    "bytes": (lambda count: b"ab", ["gave a bytes instead of a list of 2 floats"] * 2),
    "a text": (lambda count: "ab", ["gave a str instead of a list of 2 floats"] * 2),
    "a generator": (lambda count: (one for one in "ab"), ["gave a generator instead"] * 2),
    "a dict": (lambda count: {0: 0.5, 1: 0.5}, ["gave a dict instead"] * 2),
    "a set": (lambda count: {0.5, 0.25}, ["gave a set instead"] * 2),
    "nothing": (lambda count: None, ["gave a NoneType instead of a list of 2 floats"] * 2),
    "an untouchable": (lambda count: Hidden(), ["raised KeyboardInterrupt: untouchable"] * 2),
    "another length than it says": (lambda count: EndlessList(), ["gave a EndlessList of 1"] * 2),
}
