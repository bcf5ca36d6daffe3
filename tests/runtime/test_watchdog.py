"""A watchdog speaks of silence, at doubling intervals, and of its end."""

import queue
import threading
import time

import pytest

from rlhf_jax.runtime.watchdog import Beat, Seen, Watchdog, format_duration, look


def story(beats, until, seconds=300.0):
    """What is said, by time, when looking every second: `beats` are (time, phase)."""
    beat = Beat("starting", 0.0)
    seen = Seen(beat, seconds)
    told = []
    for now in range(until):
        beat = next((Beat(phase, float(at)) for at, phase in beats if at == now), beat)
        seen, said = look(seen, beat, float(now), seconds)
        told += [(now, sentence) for sentence in said]
    return told


def test_a_silence_is_told_at_doubling_intervals_and_its_end():
    assert story([(10, "generation"), (3000, "training")], until=3200) == [
        (310, "generation stands still: nothing has happened for 5 min 00 s."),
        (610, "generation stands still: nothing has happened for 10 min 00 s."),
        (1210, "generation stands still: nothing has happened for 20 min 00 s."),
        (2410, "generation stands still: nothing has happened for 40 min 00 s."),
        (3000, "generation moves again: it stood still for 49 min 50 s."),
    ]


def test_a_compilation_is_no_standstill(tmp_path):
    seen, said = look(Seen(Beat("training", 0.0), 300.0), Beat("training", 0.0), 400.0, 300.0, "up")
    assert said == ["training waits for up to compile, for 6 min 40 s so far."] and seen.due == 600
    said = queue.Queue()
    stacks = tmp_path / "standstill.txt"
    program = ["update"]
    with Watchdog(0.05, said.put, program=lambda: program[0], stacks=stacks) as watchdog:
        watchdog.beat("training")
        assert "waits for update to compile" in said.get(timeout=5) and not stacks.exists()
        program[0] = ""
        sentences = iter(lambda: said.get(timeout=5), None)
        told = next(text for text in sentences if "threads" in text)
    assert told == f"Where its threads are is in {stacks}."
    assert "test_a_compilation_is_no_standstill" in stacks.read_text()


def test_a_phase_that_beats_in_time_is_not_spoken_of():
    assert story([(at, "compiling") for at in range(0, 2000, 299)], until=2000) == []


def test_a_look_that_comes_late_speaks_once():
    seen, said = look(Seen(Beat("training", 0.0), 1.0), Beat("training", 0.0), 9.0, 1.0)
    assert said == ["training stands still: nothing has happened for 9.0 s."] and seen.due == 16


def test_a_new_silence_starts_anew():
    told = [at for at, _ in story([(700, "inference")], until=1100)]
    assert told == [300, 600, 700, 1000]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "0.2 s"),
        (59.9, "59.9 s"),
        (59.96, "1 min 00 s"),
        (300, "5 min 00 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations_are_read_aloud(seconds, text):
    assert format_duration(seconds) == text


def test_the_thread_says_it_while_the_phase_stands_still_and_at_once_when_it_moves():
    said = queue.Queue()
    with Watchdog(0.05, said.put) as watchdog:
        watchdog.beat("compiling")
        assert said.get(timeout=5).startswith("compiling stands still: nothing has happened for 0.")
        assert said.get(timeout=5).startswith("compiling stands still")
        watchdog.beat("generation")
        sentences = iter(lambda: said.get(timeout=5), None)
        assert next(text for text in sentences if "stands" not in text).startswith(
            "compiling moves again: it stood"
        )


def test_it_counts_by_the_clock_that_it_is_given():
    now = [0.0]
    said = queue.Queue()
    with Watchdog(0.01, said.put, clock=lambda: now[0]) as watchdog:
        watchdog.beat("generation")
        time.sleep(0.1)
        assert said.empty()
        now[0] = 600.0
        assert (
            said.get(timeout=5) == "generation stands still: nothing has happened for 10 min 00 s."
        )


def test_it_ends_promptly_though_it_would_sleep_long():
    watchdog = Watchdog(3600, print)
    start = time.monotonic()
    with watchdog:
        assert any(thread.name == "watchdog" for thread in threading.enumerate())
    assert time.monotonic() - start < 1
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_nothing_watches_when_it_is_off():
    with Watchdog(0, print) as watchdog:
        watchdog.beat("generation")
        assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_less_than_nothing_is_refused():
    with pytest.raises(ValueError, match="cannot wait -1 seconds"):
        Watchdog(-1, print)


def test_an_error_inside_is_not_swallowed():
    with pytest.raises(RuntimeError, match="boom"), Watchdog(60, print):
        raise RuntimeError("boom")
