"""How processes of a run find each other, and what they take from each other."""

from __future__ import annotations

import os
import socket

import pytest
from processes import ranks_of

from rlhf_jax.config import command_line
from rlhf_jax.runtime import distributed, joining, signing
from rlhf_jax.runtime.joining import Place


def test_several_devices_of_a_cpu_have_threads_enough(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "")
    joining.start(Place())
    assert "NPROC" not in os.environ
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    joining.start(Place())
    assert int(os.environ["NPROC"]) >= 2 * 8


@pytest.mark.parametrize(
    "act, said",
    [
        ("alike", "error: both alike."),
        pytest.param("alone", "rank 1: error: this rank alone.", marks=pytest.mark.slow),
    ],
)
def test_ranks_tell_each_other(act, said):
    """Each of two processes checks what it hears; where both end alike one says so, where one ends
    both do.
    """
    codes, errors = ranks_of("ranks.py", act, devices=4)
    spoken = [
        line
        for text in errors
        for line in text.splitlines()
        if line.startswith(("error", "rank", "Traceback"))
    ]
    assert spoken == [said], errors
    assert codes[1] == 2 and (codes[0] == 2 or act == "alone")


def test_words_of_others_are_ignored_with_a_sentence():
    codes, errors = ranks_of("ranks.py", "forged", devices=1)
    assert codes == [0, 0], errors
    for name, why in {
        "stop": "not signed with this run's key",
        "late": "not signed with this run's key",
        "by another": "not signed with this run's key",
        "elsewhere": "not signed with this run's key",
        "replaced": "an old message that was published again",
    }.items():
        said = f"What lies at the coordination service as {name!r} is ignored: it is {why}."
        assert errors[0].count(said) == 1, errors[0]


@pytest.mark.parametrize(
    "keys",
    [pytest.param(("one" * 11, "two" * 11), marks=pytest.mark.long), ("", "")],
    ids=["unlike", "none"],
)
def test_processes_without_one_key_end_with_a_sentence(keys):
    codes, errors = ranks_of("ranks.py", "forged", devices=1, keys=keys)
    assert 0 not in codes
    assert all(f"the same {signing.KEY}" in text.splitlines()[-1] for text in errors), errors


def test_the_command_line_says_where_a_process_stands():
    place = command_line.place
    assert place(["train.py", "--config", "x.py"]) == (Place(), ["train.py", "--config", "x.py"])
    words = [
        "train.py",
        "--coordinator=host:1",
        "--config",
        "x.py",
        "--processes",
        "4",
        "--process=3",
    ]
    assert place(words) == (Place("host:1", 4, 3), ["train.py", "--config", "x.py"])
    assert place(["t", "--processes=auto"]) == (Place(None, None, None), ["t"])
    for wrong in (
        ["--processes", "2"],
        [*words[1:-1], "--process=4"],
        [*words[1:-1], "--process"],
        ["--process=1"],
    ):
        with pytest.raises(ValueError, match="--coordinator HOST:PORT --processes N --process I"):
            place(["t", *wrong])


@pytest.mark.parametrize(
    ("coordinator", "addresses", "found"),
    [
        ("localhost:5", None, "localhost:5"),
        ("127.0.0.1:5", None, "127.0.0.1:5"),
        ("[::1]:5", None, "[::1]:5"),
        ("mine:5", ["127.0.0.2"], None),  # only here: others know another address
        ("gateway:5", ["203.0.113.7"], None),  # of no interface of this machine
        ("", [], None),
    ],
)
def test_a_coordinator_listens_where_its_name_says(coordinator, addresses, found, monkeypatch):
    def resolve(host, *_, **__):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    assert joining._bind_address(coordinator) == found


def test_one_process_is_alone():
    assert (
        distributed.count(),
        distributed.rank(),
        distributed.leads(),
        distributed.started(),
    ) == (1, 0, True, False)
    assert distributed.gather("x") == ["x"] and distributed.broadcast(1) == 1
    assert distributed.gather_results(lambda: 3) == [3] and distributed.run_on_leader(
        lambda: 3
    ) == 3 == distributed.run_on_all(lambda: 3)
    assert distributed.all_here("anywhere") and distributed.read_published("word", str) is None
    with pytest.raises(ZeroDivisionError):
        distributed.run_on_all(lambda: 1 // 0)
