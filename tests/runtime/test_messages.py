"""What processes tell each other: it arrives as it was, and nothing else that arrives is run."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import math
import socket
import struct
import subprocess
import sys
import zoneinfo
from pathlib import Path
from typing import Any

import jax
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from rlhf_jax.data.rows import read
from rlhf_jax.generation import slice_groups
from rlhf_jax.generation.assignment import Assignments
from rlhf_jax.generation.multihost import RowHandOver, SliceReport, StillQueued
from rlhf_jax.generation.requests import GenerationCounts
from rlhf_jax.generation.slice_groups import Decision, StageAborted
from rlhf_jax.generation.stage import FinishedSample
from rlhf_jax.inference.scoring import Scored
from rlhf_jax.monitoring.trace import Span
from rlhf_jax.rewards import children
from rlhf_jax.rewards.children import RewardCall, RewardResults
from rlhf_jax.rewards.combination import Response, Score, Scores
from rlhf_jax.rewards.workers import Workers
from rlhf_jax.runtime import distributed, jax_internals, joining, messages
from rlhf_jax.runtime.checkpoint.damage import Damaged
from rlhf_jax.runtime.messages import decode, encode
from rlhf_jax.runtime.signals import Stopped
from rlhf_jax.runtime.signing import Signer
from rlhf_jax.types import Strategy

LEADER = Signer(b"the key of this run", 0)

HERE = "a test"


def arrived(value: Any, kind: type = object) -> Any:
    return decode(encode(value), HERE, kind)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same types, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype != bool)
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, decimal.Decimal):  # of which some kinds of NaN refuse to be compared
        return str(one) == str(other)
    return one == other or (one != one and other != other)


numbers = st.none() | st.booleans() | st.integers() | st.floats()
texts = st.text(st.characters()) | st.binary()
moments = st.datetimes() | st.dates() | st.times() | st.timedeltas() | st.decimals() | st.uuids()
dtypes = arrays.scalar_dtypes().filter(lambda dtype: dtype.kind in "biufc" and dtype.itemsize <= 8)
leaves = numbers | texts | moments | arrays.arrays(dtypes, arrays.array_shapes(min_dims=0))
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
values = st.recursive(
    leaves,
    lambda of: (
        st.lists(of, max_size=4)
        | st.lists(of, max_size=4).map(tuple)
        | st.dictionaries(keys, of, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(values)
def test_what_is_told_is_what_is_heard(value):
    heard = arrived(value)
    assert same(native(heard), native(value)), (value, heard)


def native(value: Any) -> Any:
    """The value with arrays in this machine's order of bytes."""
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("="))
    if isinstance(value, list | tuple):
        return type(value)(map(native, value))
    return {key: native(one) for key, one in value.items()} if isinstance(value, dict) else value


FLOATS = np.linspace(0, 1, 3, dtype=np.float32)


@pytest.mark.parametrize(
    "told",
    [
        FinishedSample(3, np.arange(3, dtype=np.int32), FLOATS, None, 2, 1),
        SliceReport(4, [(1, 0, 20), (2, 1, 0)]),
        RowHandOver([1, 2], [-0.5, -1.0], 0, 2, 1, {"replay": 2}, [np.arange(4)], 64),
        StillQueued(),
        Assignments([(1, 0)], [(2, 0, 1)], [1], over=False),
        Decision((Strategy((-1, 0), "replay", 3), FLOATS, None)),
        Decision(None),
        Scores(FLOATS, {1: "hangs"}),
        Scored({"logprobs": FLOATS, "values": FLOATS}, {"judge": 0.5}),
        Span(0, "generate", 0.5, 1.5, 4, "plain", 12),
        GenerationCounts(rounds=3, tokens=12),
        RewardResults(3, [Score(math.inf, {"length": 2.0}), "hangs"]),
        RewardCall(1, 0.5, [Response("p", [], {"answer": "5", "tags": ["a", None]}, "r", [7], 2)]),
        np.float32(0.1),
        np.bool_(True),
        2**200,
        -(2**63),
        "\ud800 alone, as JSON may have it",
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6, zoneinfo.ZoneInfo("Europe/Berlin")),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        np.zeros((0, 3)),
        np.arange(12).reshape(3, 4).T,
        {1: {(2, "x"): [()]}},
    ],
    ids=lambda told: type(told).__name__,
)
def test_each_kind_of_message_arrives(told):
    heard = arrived(told, type(told))
    assert same(heard, told)
    assert not isinstance(heard, np.ndarray) or heard.flags.writeable


@dataclasses.dataclass
class Stranger:
    x: int = 0


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        Stranger(),
        Stranger,
        print,
        np.array(["text"]),
        np.array([None]),
        np.array(["2026-01-01"], "datetime64[D]"),
        [jax.ShapeDtypeStruct((2,), np.float32)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_travel_is_refused_by_who_sends_it(value):
    with pytest.raises(ValueError, match="cannot be sent between processes"):
        encode(value)


def packed(*parts: Any) -> bytes:
    return msgpack.packb(parts) or b""


def nested(depth: int) -> Any:
    return ["list", nested(depth - 1)] if depth else 0


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "incomplete"),
        (b"\xc1", "."),
        (encode([1, "two", FLOATS])[:-1], "incomplete"),
        (encode(5) + b"\0", "extra data"),
        (packed("Nothing", 1), "unknown kind 'Nothing'"),
        (packed(5, 1), "unknown kind '5'"),
        (packed(), "unknown kind"),
        (packed("SliceReport", 1), "has 2 fields, not 1"),
        (packed("SliceReport", "1", ["list"]), r"SliceReport\.carried is of type str"),
        (packed("SliceReport", True, ["list"]), r"SliceReport\.carried is of type bool"),
        (packed("SliceReport", 1, ["list", ["tuple", 1, 2]]), r"standing is of type list"),
        (packed("Scores", 1.0, {}, {}), r"Scores\.values is of type float"),
        (packed("array", "|O", ["tuple", 1], b"\0" * 8), r"dtype '\|O'"),
        (packed("array", "<M8[s]", ["tuple", 1], b"\0" * 8), "dtype"),
        (packed("array", "<f4", ["tuple", 3], b"\0" * 8), "bytes are not those"),
        (packed("array", "<f4", ["tuple", -2, -1], b"\0" * 8), "without a shape"),
        (packed("array", "<f4", ["tuple", 1 << 62, 1 << 62], b""), "bytes are not those"),
        (packed("array", "<f4", 2, b"\0" * 8), "without a shape"),
        (packed("array", "<f4"), "missing"),
        (packed("datetime", 1), "."),
        (packed("integer", "five"), "invalid literal"),
        (packed("decimal", "five"), "."),
        (msgpack.packb(msgpack.ExtType(5, b"x")), "."),
        (msgpack.packb(msgpack.Timestamp(5)), "."),
        (msgpack.packb(nested(messages.DEEPEST + 1)), "nested more than"),
        (b"\xdd\xff\xff\xff\xff", "."),
    ],
    ids=range(26),
)
def test_what_is_no_message_is_refused_in_one_sentence(data, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        decode(data, HERE)
    said = str(caught.value)
    assert said.startswith("What came over a test is no message of this run: ")
    assert "\n" not in said and caught.value.__suppress_context__


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_a_value_or_one_error(data):
    try:
        decode(data, HERE)
    except ValueError as error:
        assert HERE in str(error)


def test_limits_of_size_hold_both_ways():
    with pytest.raises(ValueError, match="over the limit of 10"):
        encode("x" * 10, largest=10)
    with pytest.raises(ValueError, match="it is longer than 10 bytes"):
        decode(encode("x" * 10), HERE, largest=10)
    with pytest.raises(ValueError, match="send an array"):
        encode([0] * (messages.MOST_ITEMS + 1))
    with pytest.raises(ValueError, match="nested more than"):
        encode(nested(messages.DEEPEST + 1))
    with pytest.raises(ValueError, match="over a test is of type str, not int"):
        decode(encode("5"), HERE, int)


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="called Span"):
        messages.register(dataclasses.make_dataclass("Span", ["x"]))


def noted(error: Exception, note: str) -> Exception:
    error.add_note(note)
    return error


class OddlyMade(FileNotFoundError):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class UserError(Exception):
    pass


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (ValueError("a.b is 3."), ValueError, "a.b is 3."),
        (noted(Stopped(15), "saved"), Stopped, "stopped by SIGTERM"),
        (StageAborted(), StageAborted, ""),
        (Damaged("torn"), Damaged, "torn"),
        (jax.errors.JaxRuntimeError("INTERNAL: x"), jax.errors.JaxRuntimeError, "INTERNAL: x"),
        (OSError(2, "No such file", "x"), FileNotFoundError, "[Errno 2] No such file: 'x'"),
        (OddlyMade("one", "two"), FileNotFoundError, "one and two"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ValueError, None),
        (KeyError("k"), KeyError, "'k'"),
        (UserError("mine"), RuntimeError, "UserError: mine"),
        (ValueError(object), ValueError, "<class 'object'>"),
    ],
    ids=lambda case: type(case).__name__,
)
def test_errors_of_other_processes_say_what_they_said(raised, kind, said):
    heard = messages.rebuild_error(arrived(messages.describe_error(raised), messages.RemoteError))
    assert type(heard) is kind and str(heard) == (str(raised) if said is None else said)
    assert getattr(heard, "__notes__", []) == getattr(raised, "__notes__", [])
    for name in ("errno", "filename", "exit_code"):
        assert getattr(heard, name, None) == getattr(raised, name, None)


def test_no_other_errors_are_made():
    with pytest.raises(ValueError, match="unknown kind 'SystemExit'"):
        messages.rebuild_error(messages.RemoteError("SystemExit", (0,), []))


def test_rows_of_prompt_files_reach_rewards_as_they_were_read(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    day = datetime.datetime(2026, 1, 2, 3, 4, 5)
    berlin = day.replace(tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    columns = {
        "prompt": ["hello"],
        "when": [day],
        "there": pa.array([berlin], pa.timestamp("us", "Europe/Berlin")),
        "date": [day.date()],
        "time": [day.time()],
        "length": [datetime.timedelta(days=1, microseconds=5)],
        "price": [decimal.Decimal("1.50")],
        "raw": [b"\xff\0"],
        "nested": [{"a": [1.5, None], "b": {"c": True}}],
        "pairs": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
        "half": pa.array([np.float16(0.5)], pa.float16()),
        "nothing": [None],
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    (row,) = read(tmp_path / "rows.parquet")
    sent = RewardCall(0, 1.0, [Response("hello", [], row, "")])
    assert same(arrived(sent, RewardCall).responses[0].row, row)


def test_a_column_that_cannot_reach_rewards_is_named_when_the_file_is_read(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"prompt": "hello", "odd": Stranger()}]
    monkeypatch.setattr(
        pq, "read_table", lambda path: type("", (), {"to_pylist": lambda _: rows})()
    )
    assert pa
    (tmp_path / "rows.parquet").touch()
    with pytest.raises(
        ValueError, match=r"Row 1 of .*: the column 'odd' cannot be given"
    ) as caught:
        read(tmp_path / "rows.parquet")
    assert "type Stranger" in str(caught.value) and "\n" not in str(caught.value)


# A pickle that runs a command where it is unpickled, laid into each channel.


@pytest.fixture
def trap(tmp_path) -> tuple[bytes, Path]:
    """A pickle, and the file that appears where it is unpickled."""
    sprung = tmp_path / "sprung"
    data = b"cposix\nsystem\n(S'touch %s'\ntR." % bytes(sprung)
    (tmp_path / "live").write_bytes(data)
    subprocess.run([sys.executable, "-m", "pickle", str(tmp_path / "live")], check=True)
    assert sprung.exists()  # it would go off
    sprung.unlink()
    return data, sprung


@pytest.fixture
def coordination(monkeypatch):
    """The coordination service, as if this were one of two processes: a client of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, 1)
    client = _jax.get_distributed_runtime_client(address, 0)
    client.connect()
    state = jax_internals.distributed.global_state
    monkeypatch.setattr(state, "client", client)
    monkeypatch.setattr(state, "num_processes", 2)
    monkeypatch.setattr(state, "process_id", 1)
    own = Signer(LEADER.key, 1)
    monkeypatch.setattr(distributed, "signer", lambda: own)
    yield client
    client.shutdown()
    service.shutdown()


def test_a_pickle_under_an_awaited_word_is_refused(trap, coordination, monkeypatch, capsys):
    data, sprung = trap
    group = slice_groups.SliceGroup((0, 1), "stage")
    client = coordination
    for word in ("stage/of 0/0", "stage/plan 0", "stage/failed", "last words of 0"):
        client.key_value_set_bytes(word, LEADER.sign(word, data))
    refused = [
        lambda: group.decide_together(lambda: None),
        lambda: slice_groups.wait_for("stage", "stage/plan 0", Assignments),
        lambda: slice_groups.check("stage"),
        lambda: distributed.read_published("stage/plan 0", Assignments),
        lambda: distributed.publish_if_absent("stage/plan 0", "mine"),
    ]
    for hear in refused:
        with pytest.raises(ValueError, match="came over the coordination service as") as caught:
            hear()
        assert "\n" not in str(caught.value)
    print(caught.value)
    monkeypatch.setattr(distributed, "all_here", lambda *_: True)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    assert joining.leave(2, "own words", joining.Place()) == 2
    assert capsys.readouterr().err == "rank 1: own words\n"
    word = LEADER.sign("stage/rank 0", encode("a word of another kind"))
    client.key_value_set_bytes("stage/rank 0", word)
    with pytest.raises(ValueError, match="is of type str, not SliceReport"):
        distributed.read_published("stage/rank 0", SliceReport)
    assert not sprung.exists()


@pytest.mark.parametrize(
    "work", [lambda: distributed.gather(1), lambda: distributed.run_on_all(int)]
)
def test_a_pickle_in_the_exchange_of_ranks_is_refused(trap, coordination, monkeypatch, work):
    data, sprung = trap
    head = np.zeros(distributed.FIRST + 4, np.uint8)
    monkeypatch.setattr(distributed, "_exchanges", collections.Counter())
    signed = LEADER.sign(f"{distributed.EXCHANGE} in MainThread/0", data)
    message = np.frombuffer(struct.pack("=I", len(signed)) + signed, np.uint8)
    head[: len(message)] = message
    monkeypatch.setattr(
        distributed.multihost_utils, "process_allgather", lambda own: np.stack([head, own])
    )
    with pytest.raises(ValueError, match="came over the exchange of ranks") as caught:
        work()
    print(caught.value)
    head[:4] = 255
    with pytest.raises(ValueError, match="claims to be of 4,294,967,295 bytes"):
        work()
    assert not sprung.exists() and "\n" not in str(caught.value)


HOSTILE = """
import os, stat, struct

def write(data):
    for number in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, data)
        except OSError:
            pass

def hostile(prompt, response, row):
    if response == "message":
        write(struct.pack("!i", len(row["data"])) + row["data"])
    elif response == "raw":
        write(row["data"])
    else:
        return float(response)
    import time
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("response", "data", "reason"),
    [
        ("message", None, "sent no reply (What came over the pipe of a reward process is no"),
        ("raw", None, "sent no reply of at most 1,048,576 bytes"),
        ("raw", struct.pack("!i", 100) + b"ten bytes.", "began a reply and did not end it"),
        ("message", b"x" * 1_100_000, "sent no reply of at most 1,048,576 bytes"),
        ("message", encode(StillQueued()), "sent no reply (A reward process sent a value of type"),
        ("message", encode(children.WorkerReady("one", False)), "sent a reply out of turn"),
    ],
    ids=["a pickle", "raw bytes", "half a reply", "too long", "another message", "out of turn"],
)
def test_a_reward_process_that_sends_anything_else_has_failed(
    response, data, reason, trap, tmp_path, monkeypatch
):
    pickled, sprung = trap
    monkeypatch.setattr(children, "PAUSE", 1)
    (tmp_path / "hostile.py").write_text(HOSTILE)
    row = {"data": pickled if data is None else data}
    answers = [Response("", [], row, each) for each in ("1", response, "2")]
    with Workers(f"{tmp_path}/hostile.py:hostile", 1, 30.0) as pool:
        scores = pool(answers)
    print(scores.failures)
    assert list(scores.failures) == [1] and scores.failures[1].startswith(reason)
    assert "\n" not in scores.failures[1] and scores.values[[0, 2]].tolist() == [1.0, 2.0]
    assert not sprung.exists()


def test_last_words_are_said_where_the_leader_is_gone(coordination, monkeypatch, capsys):
    def publish(*_) -> None:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection refused")

    monkeypatch.setattr(distributed, "publish", publish)
    monkeypatch.setattr(distributed, "all_here", lambda *_: True)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    assert joining.leave(2, "own words", joining.Place()) == 2
    assert capsys.readouterr().err == "rank 1: own words\n"
