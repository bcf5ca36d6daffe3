"""Faults that are put into the code are found by the fast tests of the file that has them.

    pip install cosmic-ray
    pytest -m long tests/test_mutants.py --mutant-results benchmarks/results/mutants.json

Operators of cosmic-ray make one fault at a time, at places that a seed draws. A fault that the
file's own tests let live meets the whole fast core.
"""

from __future__ import annotations

import ast
import concurrent.futures
import datetime
import difflib
import itertools
import json
import os
import queue
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

plugins = pytest.importorskip("cosmic_ray.plugins", reason="cosmic-ray is not installed")
mutating = pytest.importorskip("cosmic_ray.mutating", reason="cosmic-ray is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[1]
SEED = 0
MUTANTS = 100
CORES = 2
SECONDS = 300  # A test that takes longer hangs, and has found the fault.
KILLED = 0.95

TESTS: dict[str, str] = {
    "training/losses.py": "test_losses.py test_policy_losses.py",
    "training/policy_losses.py": "test_policy_losses.py test_losses.py",
    "training/advantages.py": "test_advantages.py test_shaping.py",
    "training/experience.py": "test_advantages.py test_shaping.py test_bookkeeping.py",
    "training/kl.py": "test_shaping.py test_losses.py",
    "training/importance.py": "test_lag.py -k weights",
    "training/batching.py": "test_update.py test_advantages.py",
    "training/optimizer.py": "test_update.py",
    "inference/packing.py": "test_packing.py",
    "generation/history.py": "test_bookkeeping.py test_reused_noise.py",
    "generation/speculative/sampling.py": "test_sampling.py",
    "generation/speculative/rejection.py": "test_rejection.py",
    "generation/speculative/tree.py": "test_candidates.py test_drafters.py test_generation.py",
    "generation/strategy/acceptance.py": "test_acceptance.py",
    "generation/strategy/select.py": "test_select.py test_bandit.py test_explain.py",
    "reallocation/row_transfer.py": "test_row_transfer.py",
    "runtime/checkpoint/store.py": "test_checkpoint.py test_damage.py test_resume.py",
    "runtime/checkpoint/document.py": "test_checkpoint.py test_damage.py",
}
"""By file of the package: its own tests."""

OPERATORS = (
    "AddNot",
    "NumberReplacer",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceFalseWithTrue",
    "ReplaceTrueWithFalse",
    "ReplaceUnaryOperator",
    "ReplaceBinaryOperator_Add_Sub",
    "ReplaceBinaryOperator_Sub_Add",
    "ReplaceBinaryOperator_Mul_Div",
    "ReplaceBinaryOperator_Div_Mul",
    "ReplaceBinaryOperator_FloorDiv_Mul",
    "ReplaceBinaryOperator_BitAnd_BitOr",
    "ReplaceBinaryOperator_BitOr_BitAnd",
    "ReplaceComparisonOperator_Lt_LtE",
    "ReplaceComparisonOperator_LtE_Lt",
    "ReplaceComparisonOperator_Gt_GtE",
    "ReplaceComparisonOperator_GtE_Gt",
    "ReplaceComparisonOperator_Lt_Gt",
    "ReplaceComparisonOperator_Gt_Lt",
    "ReplaceComparisonOperator_Eq_NotEq",
    "ReplaceComparisonOperator_NotEq_Eq",
    "ReplaceContinueWithBreak",
    "ZeroIterationForLoop",
)
"""Those whose faults are plausible: a product in place of a bit's shift is found by any test."""


class Mutant(NamedTuple):
    """A file with one fault."""

    place: str  # in the package
    code: str

    def change(self) -> str:
        """The lines that differ, the old ones first."""
        lines = source(self.place).splitlines(), self.code.splitlines()
        changed = [line for line in difflib.unified_diff(*lines, n=0, lineterm="")][3:]
        return " ".join(" ".join(line.split()) for line in changed)


def source(place: str) -> str:
    return (ROOT / "rlhf_jax" / place).read_text("utf-8")


def meaning(code: str) -> str:
    """What runs of some code, neither annotations nor docstrings; nothing where it is no Python."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if hasattr(node, field):
                setattr(node, field, None)
        body = getattr(node, "body", None)
        if isinstance(body, list) and isinstance(body[0], ast.Expr):
            body[0] = ast.Pass()
    return ast.dump(tree)


def places_of(code: str, operator) -> int:
    """How many faults an operator can make of some code."""
    nodes = [mutating.get_ast(code)]
    count = 0
    while nodes:
        node = nodes.pop()
        count += sum(1 for _ in operator.mutation_positions(node))
        nodes += getattr(node, "children", [])
    return count


def mutants_of(place: str, draw: random.Random) -> Iterator[Mutant]:
    """The faults of one file that the operators make, in an order that is drawn."""
    code = source(place)
    chosen = [
        plugins.get_operator(name)()
        for name in plugins.operator_names()
        if name.removeprefix("core/").startswith(OPERATORS)
    ]
    faults = [(one, number) for one in chosen for number in range(places_of(code, one))]
    draw.shuffle(faults)
    for operator, number in faults:
        mutated = mutating.mutate_code(code, operator, number)
        if meaning(mutated) not in ("", meaning(code)):
            yield Mutant(place, mutated)


def drawn(count: int) -> list[Mutant]:
    """Faults that the seed draws, of each file about as many."""
    draw = random.Random(SEED)
    by_file = [mutants_of(place, draw) for place in TESTS]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_file))
    return list(itertools.islice(filter(None, turns), count))


def passes(tree: Path, words: list[str]) -> bool:
    """Whether tests pass in a copy of the checkout."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "JAX_COMPILATION_CACHE_DIR": str(tree.parent / "programs"),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def lives(mutant: Mutant, tree: Path, words: list[str]) -> bool:
    """Whether a fault in a copy of the checkout lets the tests pass."""
    path = tree / "rlhf_jax" / mutant.place
    path.write_text(mutant.code, "utf-8")
    try:
        return passes(tree, words)
    finally:
        path.write_text(source(mutant.place), "utf-8")


def own_tests(place: str) -> list[str]:
    return [f"tests/{word}" if word.endswith(".py") else word for word in TESTS[place].split()]


@pytest.fixture(scope="module")
def trees(tmp_path_factory) -> list[Path]:
    """Copies of what is tested, one a core."""
    folder = tmp_path_factory.mktemp("mutants")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "dist")
    found = [folder / f"tree-{number}" for number in range(CORES)]
    for tree in found:
        shutil.copytree(ROOT, tree, ignore=left_out)
    return found


def test_faults_are_found(trees, request):
    mutants = drawn(MUTANTS)
    assert len(mutants) == MUTANTS
    idle: queue.Queue[Path] = queue.Queue()
    for tree in trees:
        idle.put(tree)

    def survives(mutant: Mutant) -> bool:
        tree = idle.get()
        try:
            return lives(mutant, tree, own_tests(mutant.place))
        finally:
            idle.put(tree)

    used = list(dict.fromkeys(mutant.place for mutant in mutants))
    with concurrent.futures.ThreadPoolExecutor(CORES) as pool:
        whole = [Mutant(place, source(place)) for place in used]
        broken = [
            one.place
            for one, passed in zip(whole, pool.map(survives, whole), strict=True)
            if not passed
        ]
        assert not broken, f"without a fault, the tests of {broken} fail"
        found = zip(mutants, pool.map(survives, mutants), strict=True)
        alive = [mutant for mutant, survived in found if survived]
    shown = [
        {
            "file": mutant.place,
            "change": mutant.change(),
            "killed by the whole core": not lives(mutant, trees[0], ["-n", str(CORES)]),
        }
        for mutant in alive
    ]
    result = {
        "mutants": MUTANTS,
        "killed by the tests of their own file": MUTANTS - len(alive),
        "alive": shown,
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "command": "pytest -m long tests/test_mutants.py",
    }
    print(json.dumps(result, indent=1))
    if request.config.getoption("--mutant-results"):
        Path(request.config.getoption("--mutant-results")).write_text(json.dumps(result, indent=1))
    assert MUTANTS - len(alive) >= KILLED * MUTANTS, shown
