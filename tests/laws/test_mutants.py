"""Faults that are put into the code are found by the fast tests of the file that has them.

    pytest -m long tests/laws/test_mutants.py --mutant-results benchmarks/results/mutants.json

A fault that the file's own tests let live, with no reason why none can find it, meets the whole
fast core.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path

import jax
import pytest

pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed")

import mutants
from mutants import Mutant

pytestmark = pytest.mark.slow

SEED = 0
MUTANTS = 100
CORES = 2
KILLED = 0.95
QUICK = (  # files whose own tests take a few seconds
    "algorithms/grpo.py",
    "losses/policy.py",
    "losses/kl.py",
    "losses/aggregate.py",
    "sequences/minibatches.py",
    "generation/history.py",
    "generation/speculative/tree.py",
    "generation/strategy/acceptance.py",
)


def test_a_few_faults_are_found(tmp_path):
    """One in each quick file, one test at a time; those that no test can find may live."""
    few = mutants.drawn(1, len(QUICK), QUICK)
    alive = mutants.living(few, mutants.copies(tmp_path, 1))
    assert [(one.place, one.change()) for one in alive if not one.reason()] == []


def shown(mutant: Mutant, tree: Path) -> dict[str, str | bool]:
    """What is told of a fault that lives."""
    told: dict[str, str | bool] = {"file": mutant.place, "change": mutant.change()}
    if reason := mutant.reason():
        return told | {"reason": reason}
    lives = mutants.lives(mutant, tree, ["-n", str(CORES)], mutants.SECONDS_OF_CORE)
    return told | {"killed by the whole core": not lives}


@pytest.mark.long
def test_faults_are_found(tmp_path, request, capsys):
    start = time.monotonic()

    def tell(line: str) -> None:
        with capsys.disabled():
            print(f"{time.monotonic() - start:.0f} s, {line}", flush=True)

    trees = mutants.copies(tmp_path, CORES)
    whole = [Mutant(place, mutants.source(place)) for place in mutants.TESTS]
    passed = mutants.living(whole, trees)
    assert passed == whole, "without a fault the tests fail of all files but those named here"
    drawn = mutants.drawn(SEED, MUTANTS)
    assert len(drawn) == MUTANTS
    alive = mutants.living(drawn, trees, tell)
    result = {
        "mutants": MUTANTS,
        "seed": SEED,
        "killed by the tests of their own file": MUTANTS - len(alive),
        "alive": [shown(mutant, trees[0]) for mutant in alive],
        "minutes": round((time.monotonic() - start) / 60),
        "cores": CORES,
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "command": "pytest -m long tests/laws/test_mutants.py",
    }
    tell(json.dumps(result, indent=1))
    if request.config.getoption("--mutant-results"):
        path = Path(request.config.getoption("--mutant-results"))
        path.write_text(json.dumps(result, indent=1) + "\n")
    assert MUTANTS - len(alive) >= KILLED * MUTANTS, result["alive"]
