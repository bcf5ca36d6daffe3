"""Stopping: the first signal asks and says so, its echo is nothing, a later one does what it always
did.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
from places import ROOT

from rlhf_jax.runtime import signals

PROGRAM = """
import time
from rlhf_jax.runtime.signals import listen_for_signals
with listen_for_signals() as stop:
    print("ready", flush=True)
    while stop.signal is None:
        time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_process_is_told_once_and_stopped_by_the_later_signal(number):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout and process.stderr and process.stdout.readline() == "ready\n"
    os.killpg(process.pid, number)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(number)  # as a launcher that forwards what the group already had
    assert process.stderr.readline() == signals.ASKED + "\n"
    time.sleep(signals.ECHO + 0.1)
    assert process.poll() is None
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == -number
    assert signals.ASKED not in said and ("KeyboardInterrupt" in said) == (number == signal.SIGINT)


def test_in_process_the_former_handlers_serve_the_later_signal(monkeypatch):
    clock = [100.0]
    said = []
    heard = []
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with signals.listen_for_signals(said.append) as stop:
            stop.check()
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
            with pytest.raises(signals.Stopped, match="SIGTERM") as caught:
                stop.check()
            assert (said, heard, caught.value.exit_code) == ([signals.ASKED], [], 143)
            clock[0] += signals.ECHO + 0.1
            signal.raise_signal(signal.SIGTERM)
            assert heard == [signal.SIGTERM] and stop.signal == signal.SIGTERM
            with pytest.raises(KeyboardInterrupt):  # every former handler is back
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert said == [signals.ASKED]


def test_a_run_under_nohup_is_not_stopped_by_the_end_of_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.listen_for_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_leaving_brings_the_former_handlers_back():
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with pytest.raises(ZeroDivisionError), signals.listen_for_signals():
        assert [signal.getsignal(number) for number in signals.SIGNALS] != before
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before


def test_the_line_passes_a_buffer_that_is_held_and_a_stderr_that_is_closed(capfd, monkeypatch):
    print("before", file=sys.stderr, flush=True)
    signals.write_to_stderr("line")
    assert capfd.readouterr().err == "before\nline\n"
    monkeypatch.setattr(signals.os, "write", lambda *_: (_ for _ in ()).throw(BrokenPipeError))
    signals.write_to_stderr("line")
