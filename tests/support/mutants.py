"""Faults that are put into a copy of the code, and the tests that are to find them.

Operators of cosmic-ray make one fault at a time, at places that a seed draws.
"""

from __future__ import annotations

import ast
import concurrent.futures
import difflib
import itertools
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from cosmic_ray import mutating, plugins
from places import ROOT

SECONDS = 300  # A file's own tests that take longer hang, and have found the fault.
SECONDS_OF_CORE = 3600  # Likewise the whole fast core.

TESTS: dict[str, str] = {
    "algorithms/grpo.py": "losses/test_losses.py losses/test_policy_losses.py"
    " config/test_config.py algorithms/test_online.py",
    "losses/aggregate.py": "losses/test_losses.py losses/test_policy_losses.py",
    "losses/value.py": "losses/test_losses.py",
    "training/kinds.py": "losses/test_group_losses.py losses/test_losses.py"
    " laws/test_packed_is_unpacked.py",
    "losses/policy.py": "losses/test_policy_losses.py losses/test_losses.py",
    "losses/advantages.py": "losses/test_advantages.py losses/test_shaping.py",
    "training/experience.py": "losses/test_advantages.py losses/test_shaping.py",
    "losses/kl.py": "losses/test_shaping.py losses/test_policy_losses.py",
    "training/prepare.py": "sources/test_lag.py -k weigh",
    "sequences/minibatches.py": "sequences/test_batching.py algorithms/test_algorithms.py",
    "training/optimizer.py": "training/test_optimizer.py training/test_update.py",
    "sequences/packing.py": "sequences/test_packing.py laws/test_packed_is_unpacked.py",
    "generation/history.py": "generation/test_history.py",
    "generation/speculative/sampling.py": "generation/speculative/test_sampling.py",
    "generation/speculative/rejection.py": "generation/speculative/test_rejection.py",
    "generation/speculative/tree.py": "generation/speculative/test_tree.py",
    "generation/strategy/acceptance.py": "generation/strategy/test_acceptance.py",
    "generation/strategy/select.py": "generation/strategy/test_select.py command/test_explain.py",
    "generation/reallocation/row_transfer.py": "generation/reallocation/test_row_transfer.py",
    "runtime/checkpoint/store.py": "runtime/test_checkpoint.py laws/test_saved_is_loaded.py"
    " laws/test_damage_is_named.py",
    "runtime/checkpoint/document.py": "runtime/test_checkpoint.py laws/test_saved_is_loaded.py"
    " laws/test_damage_is_named.py",
}
"""By file of the package: its own tests, the quickest to find a fault first."""

REASONS: dict[tuple[str, str], str] = {
    (
        "generation/speculative/rejection.py",
        "total = jnp.sum(left, +1, keepdims=True)",
    ): "Axis 1 of two is the last.",
    (
        "generation/speculative/rejection.py",
        "total = jnp.sum(left, 1, keepdims=True)",
    ): "Axis 1 of two is the last.",
    (
        "generation/speculative/rejection.py",
        "mass = jax.nn.logsumexp(proposal, 1, keepdims=True)",
    ): "Axis 1 of two is the last.",
    (
        "generation/speculative/rejection.py",
        "node=jnp.zeros_like(tokens[:, 1]),",
    ): "Of any column the zeros are the same.",
    (
        "generation/speculative/tree.py",
        "fits = (tokens == drawn) & (tree.depth > -1)",
    ): "The root fits in any case, by the next line.",
    (
        "generation/speculative/tree.py",
        "return jnp.argmax(jnp.where(accepted, tree.depth, ~1), axis=1).astype(jnp.int32)",
    ): "The root, of depth 0, is accepted: any number below will do.",
    (
        "algorithms/grpo.py",
        "losses = jnp.where(mask, LOSSES[options.loss](terms_of_loss), 1.0)",
    ): "What is masked out has no weight: any finite number does.",
    (
        "sequences/packing.py",
        "step = 1 << max(0, (units - 0).bit_length() - bits)",
    ): "A power of two is a multiple of either step.",
    (
        "training/optimizer.py",
        "if several and isinstance(flags[ 1], jax.Array): # for which the host waits",
    ): "All flags are arrays, or all are shapes.",
    (
        "training/optimizer.py",
        "places = [jax.tree.leaves(one.weights)[ -1].sharding for one in gradients]",
    ): "All leaves of a model lie on one mesh.",
}
"""By file and the line that a fault makes: why no test can find it. It counts as one that lives."""

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

    def reason(self) -> str:
        """Why no test can find it; empty where one should."""
        known = (
            reason
            for (place, line), reason in REASONS.items()
            if place == self.place and self.change().endswith(f"+ {line}")
        )
        return next(known, "")


def source(place: str) -> str:
    return (ROOT / "rlhf_jax" / place).read_text("utf-8")


def meaning(code: str) -> str:
    """What runs of some code; nothing where it is no Python.

    That is neither annotations nor docstrings, nor what only keeps a caller from a mistake: that a
    dataclass is frozen, that arguments are given by name.
    """
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
        if isinstance(node, ast.arguments):
            node.args = node.posonlyargs + node.args + node.kwonlyargs
            node.defaults += [one for one in node.kw_defaults if one]
            node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
        if isinstance(node, ast.Call):
            node.keywords = [one for one in node.keywords if one.arg != "frozen"]
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
        mutated = mutating.mutate_code(code, operator, number) or ""
        if meaning(mutated) not in ("", meaning(code)):
            yield Mutant(place, mutated)


def drawn(seed: int, count: int, places: Iterable[str] = TESTS) -> list[Mutant]:
    """Faults that a seed draws, of each file about as many."""
    draw = random.Random(seed)
    by_file = [mutants_of(place, draw) for place in places]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_file))
    return list(itertools.islice(filter(None, turns), count))


def passes(tree: Path, words: list[str], seconds: int) -> bool:
    """Whether tests pass in a copy of the checkout; whatever hangs is ended."""
    programs = {"JAX_COMPILATION_CACHE_DIR": str(tree.parent / "programs")}
    environment = programs | os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    running = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return running.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def lives(mutant: Mutant, tree: Path, words: list[str], seconds: int) -> bool:
    """Whether a fault in a copy of the checkout lets the tests pass."""
    path = tree / "rlhf_jax" / mutant.place
    path.write_text(mutant.code, "utf-8")
    try:
        return passes(tree, words, seconds)
    finally:
        path.write_text(source(mutant.place), "utf-8")


def own_tests(place: str) -> list[str]:
    return [f"tests/{word}" if word.endswith(".py") else word for word in TESTS[place].split()]


def copies(folder: Path, count: int) -> list[Path]:
    """Copies of the checkout, for so many tests at a time."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "dist")
    trees = [folder / f"tree-{number}" for number in range(count)]
    for tree in trees:
        shutil.copytree(ROOT, tree, ignore=left_out)
    return trees


def living(
    mutants: list[Mutant], trees: list[Path], tell: Callable[[str], None] = lambda line: None
) -> list[Mutant]:
    """Those that the tests of their own files let live; `tell` hears of each as it is known."""
    idle: queue.Queue[Path] = queue.Queue()
    for tree in trees:
        idle.put(tree)

    def survives(mutant: Mutant) -> bool:
        tree = idle.get()
        try:
            return lives(mutant, tree, own_tests(mutant.place), SECONDS)
        finally:
            idle.put(tree)

    alive = []
    with concurrent.futures.ThreadPoolExecutor(len(trees)) as pool:
        for number, survived in enumerate(pool.map(survives, mutants), start=1):
            mutant = mutants[number - 1]
            if survived:
                alive.append(mutant)
            fate = "lives" if survived else "killed"
            tell(f"{number} of {len(mutants)}, {fate}: {mutant.place} {mutant.change()}")
    return alive
