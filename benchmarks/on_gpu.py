r"""Measure everything that a GPU can tell, in parts of eight minutes, as one JSON file.

    python -m benchmarks.on_gpu                       # all parts, into on_gpu/results.json
    python -m benchmarks.on_gpu --parts laws,speeds   # some of them
    python -m benchmarks.on_gpu --tiny                # the same code on a CPU, in minutes

    laws         each kernel for the GPU against its law: tests marked `gpu`, and real shapes
    speeds       each kernel against the reference and the hardware's floor; measured.json
    texts        speculative text against plain text, log-probs of generation against training's
    decoding     tokens a second and share of the bandwidth: plain, fixed, adaptive; 8B, 0.5B, 1B
    step         a step of GRPO by phases; forward and backward passes beside transformers'
    exactness    what replayable draws, rejection and deterministic operations cost
    predictions  predicted against measured seconds of calls; chip.json

The file is whole after each case. The same command goes on where it ended: what is done is kept,
what failed is tried again, last. Each part has processes of its own, one more after each case that
fails, so that an error of CUDA's ends nothing else. A part begins no case in the last fifth of its
time, and names those that are left; what runs beyond its time is ended.

`auto` chooses kernels by pallas_kernels/measured.json. Part speeds writes that table as
measured.json beside the results, a kernel's row only where its laws held; --install also writes it
into this checkout.

No network is needed, and no file of a model: weights are random. Beside jax, flax, optax,
orbax-checkpoint, chex, numpy, scipy, safetensors, tokenizers, jinja2, msgpack, absl-py, etils, rich
and pytest the one package needed is ml-collections, 77 KB:

    pip download --no-deps --dest wheels ml-collections         # where there is a network
    pip install --no-index --no-deps --find-links wheels --target extra ml-collections
    PYTHONPATH=extra python -m benchmarks.on_gpu
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

from benchmarks.gpu import decoding, exactness, laws, predictions, speeds, step, texts
from benchmarks.gpu.ledger import Case, Ledger, measure, sentence_of
from benchmarks.gpu.setting import REAL, ROOT, TINY, Sizes, environment
from pallas_kernels import measured
from rlhf_jax.runtime.compilation import configure_jax
from rlhf_jax.runtime.files import write_atomically

PARTS: dict[str, Callable[[Sizes, Ledger], Iterator[Case]]] = {
    "laws": laws.cases,
    "speeds": speeds.cases,
    "texts": texts.cases,
    "decoding": decoding.cases,
    "step": step.cases,
    "exactness": exactness.cases,
    "predictions": predictions.cases,
}
LAST_BEGIN = 0.8  # of a part's time, after which no case is begun
# Exit codes of a part's process: its last case failed and others wait; its time was over.
GOES_ON = 75
OVER_TIME = 124
START = "start"  # stands for a case if a part fails before its first
# Programs are compiled once, for all processes of a part.
PROGRAMS = str(Path(tempfile.gettempdir()) / "rlhf_jax_on_gpu")
# How a process measures a part: (part, seconds until no case is begun, seconds until it is ended)
# -> exit code.
Worker = Callable[[str, float, float], int]


def main(line: Sequence[str] | None = None) -> int:
    """Measure the requested parts; return 1 if a case failed."""
    options = arguments(line)
    if options.worker:
        return work(options.parts[0], options.out, tiny=options.tiny, seconds=options.worker)
    try:
        Ledger.open(options.out, tiny=options.tiny).begin()
    except ValueError as error:
        sys.exit(str(error))

    def in_process(part: str, begins: float, ends: float) -> int:
        return start_process(options, part, begins, ends)

    for part in options.parts:
        measure_part(part, options, in_process)
    ledger = Ledger.open(options.out, tiny=options.tiny)
    print(summary(ledger, options.parts))
    if "speeds" in options.parts:
        print("\n".join(write_tables(ledger, install=options.install)))
    return int(any(ledger.part(part)["failed"] for part in options.parts))


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, with commas")
    parser.add_argument("--out", type=Path, default=Path("on_gpu/results.json"))
    parser.add_argument("--minutes", type=float, default=8.0, help="of a part at most")
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU computes at once")
    parser.add_argument("--install", action="store_true", help="the measured table, in this clone")
    parser.add_argument("--worker", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(line)
    options.parts = options.parts.split(",")
    if not set(options.parts) <= set(PARTS):
        parser.error(f"--parts takes some of {', '.join(PARTS)}.")
    return options


def measure_part(part: str, options: argparse.Namespace, worker: Worker) -> None:
    """Measure a part in as many processes as it takes, until its time is over.

    A case has failed, too, whose process died or was ended.
    """
    began = time.monotonic()
    ends = 60 * options.minutes
    while (spent := time.monotonic() - began) < LAST_BEGIN * ends:
        code = worker(part, LAST_BEGIN * ends - spent, ends - spent)
        if code == 0:
            break
        ledger = Ledger.open(options.out, tiny=options.tiny)
        running = ledger.part(part)["running"]
        if code != GOES_ON:
            ledger.fail(part, running or START, ended_by(code))
        if code != GOES_ON and running is None:  # no other case would begin, either
            break


def work(part: str, out: Path, *, tiny: bool, seconds: float) -> int:
    """Measure a part in this process, beginning no case after a time limit.

    Returns the exit code: `GOES_ON` if another process must continue.
    """
    ledger = Ledger.open(out, tiny=tiny)
    configure_jax(deterministic=False, cache=PROGRAMS)
    try:
        ledger.use_device()
        # jax falls back to the CPU if it cannot use a GPU
        if not tiny and jax.default_backend() == "cpu":
            raise ValueError("jax finds no GPU here; give --tiny for a CPU.")
        cases = list(PARTS[part](TINY if tiny else REAL, ledger))
    except Exception as error:  # the other parts are measured all the same
        ledger.fail(part, START, sentence_of(error))
        return 0
    ledger.part(part)["failed"].pop(START, None)
    return GOES_ON if measure(part, cases, ledger, seconds) else 0


def start_process(settings: argparse.Namespace, part: str, begins: float, ends: float) -> int:
    """Measure a part in a process of its own, which is killed after `ends` seconds."""
    options = {"--parts": part, "--out": settings.out.resolve(), "--worker": begins}
    line = [sys.executable, "-m", "benchmarks.on_gpu", *(["--tiny"] if settings.tiny else [])]
    line += [str(word) for option in options.items() for word in option]
    # Workers and tests have their own processes at the same time: none may take all memory.
    variables = environment(XLA_PYTHON_CLIENT_PREALLOCATE="false")
    process = subprocess.Popen(line, cwd=ROOT, env=variables, start_new_session=True)
    try:
        return process.wait(ends)
    except subprocess.TimeoutExpired:
        return OVER_TIME
    finally:
        end_group(process)


def end_group(process: subprocess.Popen) -> None:
    """End a process and its child processes, which are its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ended_by(code: int) -> str:
    """Describe how a process ended that gave no figures."""
    if code == OVER_TIME:
        return "It had not ended when the time of its part was over."
    if code < 0:
        return f"Its process was ended by {signal.Signals(-code).name}."
    return f"Its process ended with exit code {code}; its last words are on the terminal."


def write_tables(ledger: Ledger, *, install: bool) -> list[str]:
    """Write the table for "auto" next to the results, and optionally into this checkout."""
    path = ledger.path.with_name("measured.json")
    lines = speeds.write_table(ledger, path)
    if install:
        write_atomically(measured.PATH, path.read_bytes())
        lines.append(f"{measured.PATH} is now as {path}")
    return lines


def summary(ledger: Ledger, parts: Sequence[str]) -> str:
    """Return finished, failed and remaining cases, part by part."""
    lines = []
    for part in parts:
        record = ledger.part(part)
        counts = [f"{len(record[name])} {name}" for name in ("done", "failed", "left")]
        lines.append(f"{part}: {', '.join(counts)}")
        lines += [f"  failed: {case}: {one['error']}" for case, one in record["failed"].items()]
        lines += [f"  left: {case}" for case in record["left"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
