"""The protocol between compare.py and a worker: one JSON line in, one JSON line out.

Standard library only. A worker sends `{"versions", "threads"}` once it is loaded, then, for each
`{"prompts": [[id, ...], ...], "new_tokens": n, "seed": s}`, `{"seconds", "tokens"}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

Generate = Callable[[list[list[int]], int, int], list[list[int]]]


def cores() -> int:
    """CPU cores this process may use: the thread count of every engine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def serve(packages: tuple[str, ...], threads: int, generate: Generate) -> None:
    """Answer commands until stdin ends. `generate(prompts, new_tokens, seed)` gives the new ids, on
    the host.

    The time is from prompt ids on the host to new ids on the host: prefill is inside, text is not.
    """
    # library output must not be taken for an answer
    answers = sys.stdout
    sys.stdout = sys.stderr
    versions = {name: version(name) for name in packages} | {"python": sys.version.split()[0]}
    _answer(answers, versions=versions, threads=threads)
    for line in sys.stdin:
        command = json.loads(line)
        started = time.perf_counter()
        samples = generate(command["prompts"], command["new_tokens"], command["seed"])
        seconds = time.perf_counter() - started
        _check(samples, command)
        _answer(answers, seconds=seconds, tokens=sum(len(sample) for sample in samples))


def _answer(answers, **content) -> None:
    print(json.dumps(content), file=answers, flush=True)


def _check(samples: list[list[int]], command: dict) -> None:
    rows = len(command["prompts"])
    new_tokens = command["new_tokens"]
    lengths = [len(sample) for sample in samples]
    if lengths != [new_tokens] * rows:
        raise ValueError(
            f"{rows} samples of {new_tokens} tokens were requested, and {lengths} came."
        )
