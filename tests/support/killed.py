"""The training command, killed by itself.

python tests/support/killed.py EVENT NUMBER SECONDS ARGUMENTS...

SIGKILL, or the signal named behind the event ("training:SIGHUP"), comes SECONDS after the event has
happened NUMBER times (from 0); -1 counts all events and prints them at the end. Events are the
phases of the run as it names them, each round of generation among them; "samples", between two
lines of the run's files; "unfinished", when a checkpoint begins to lie on the disk; "export",
before the trained policy is written; "sent", when the sinks have heard all steps before NUMBER;
"move", before a sample passes between this process and another, for which samples are placed at
random.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

from places import ROOT
from tiny_stage import Shuffled

from rlhf_jax import session
from rlhf_jax.generation.reallocation import row_transfer
from rlhf_jax.models.files import huggingface
from rlhf_jax.monitoring import metrics, sending
from rlhf_jax.setup import run


def main(event: str, number: int, seconds: float, arguments: list[str]) -> int:
    """The exit code of the command, if it lives to have one."""
    event, _, chosen = event.partition(":")
    kill = functools.partial(send_signal, signal.Signals[chosen or "SIGKILL"])
    seen = collections.Counter()

    def happens(name: str) -> None:
        if name == event and seen[name] == number:
            threading.Thread(target=kill, args=(seconds,)).start() if seconds else kill(0)
        seen[name] += 1

    launch = runpy.run_path(str(ROOT / "launch" / "train.py"), run_name="launch")
    session.Session._beat = told(session.Session._beat, lambda self, phase: happens(phase))
    metrics.Writer.write_rows = told(metrics.Writer.write_rows, lambda _, name, *__: happens(name))
    huggingface.save = told(huggingface.save, lambda *_: happens("export"))
    if event == "move":
        run.planner.plan_reallocation = Shuffled(seed=0)
        passing = row_transfer.send_to_process
        row_transfer.send_to_process = told(passing, lambda *_: happens("move"))
    if event == "sent":
        sending.Sender.send = killed_behind(sending.Sender.send, number, kill)
    if event == "unfinished":
        workdir = next(a.partition("=")[2] for a in arguments if a.startswith("--config.workdir="))
        threading.Thread(
            target=look, args=(Path(workdir) / "checkpoints", happens), daemon=True
        ).start()
    code = launch["main"](["train.py", *arguments])
    if number < 0:
        print(json.dumps(seen))
    return code


def told(function, tell):
    """The function, after `tell` has heard its arguments."""

    def telling(*inputs, **options):
        tell(*inputs)
        return function(*inputs, **options)

    return telling


def killed_behind(send, step: int, kill):
    """The function, and the end once it has sent what is before a step and the sinks have it."""

    def sending_last(self, before):
        send(self, before)
        while before >= step:
            living = [thread for thread in self._threads if thread.is_alive()]
            if all(thread._next >= before for thread in living):
                kill(0)
            time.sleep(0.01)

    return sending_last


def send_signal(chosen: signal.Signals, seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), chosen)


def look(folder: Path, happens) -> None:
    """Tells of each checkpoint that is being written."""
    known = set()
    while True:
        for path in set(folder.glob("*.orbax-checkpoint-tmp*")) - known:
            known.add(path)
            happens("unfinished")
        time.sleep(0.0002)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
