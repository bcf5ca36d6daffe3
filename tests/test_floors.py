"""The house keeps its floors: who may import whom, how long a file may be, what must be said."""

from __future__ import annotations

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# A room is a file or a folder of this table. A file may import from its own room, where that is a
# folder, and from rooms on lower floors; a file without a room fails the test.
FLOORS = {
    "rlhf_jax/types.py": 0,
    "rlhf_jax/runtime/distributed.py": 0,
    "rlhf_jax/runtime/signals.py": 0,
    "rlhf_jax/runtime/watchdog.py": 0,
    "pallas_kernels": 1,
    "rlhf_jax/config/schema.py": 1,
    "rlhf_jax/mesh.py": 1,
    "rlhf_jax/monitoring": 1,
    "rlhf_jax/runtime/checkpoint": 1,
    "rlhf_jax/data": 1,
    "rlhf_jax/runtime/slice_groups.py": 2,
    "rlhf_jax/model": 2,
    "rlhf_jax/reallocation": 2,
    "rlhf_jax/generation": 3,
    "rlhf_jax/inference": 3,
    "rlhf_jax/rewards": 3,
    "rlhf_jax/placement": 4,
    "rlhf_jax/training": 4,
    "rlhf_jax/config/derived.py": 4,
    "rlhf_jax/config": 5,
    "rlhf_jax/inference/overlap.py": 6,
    "rlhf_jax/state.py": 6,
    "rlhf_jax/rollout.py": 7,
    "rlhf_jax/collect.py": 8,
    "rlhf_jax/rlhf.py": 9,
    "rlhf_jax/build.py": 9,
    "configs": 10,
    "launch": 11,
    "benchmarks": 11,
}
PROJECT = ("rlhf_jax", "pallas_kernels", "configs", "launch", "benchmarks")
PACKAGES = ("rlhf_jax", "pallas_kernels")
MOST_LINES = 600
MOST_TEST_LINES = 700
MOST_FUNCTION_LINES = 60

SOURCES = sorted(path.relative_to(ROOT) for name in PROJECT for path in (ROOT / name).rglob("*.py"))
TESTS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))


def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def room(path: pathlib.Path) -> str | None:
    """The room of a file: itself, or the nearest folder of the table."""
    places = [path.as_posix(), *(parent.as_posix() for parent in path.parents)]
    return next((place for place in places if place in FLOORS), None)


def file_of(module: str) -> pathlib.Path | None:
    """The project's file behind a dotted name; None where the name is no module of the project."""
    path = pathlib.Path(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if (ROOT / candidate).is_file()), None)


def imports(path: pathlib.Path) -> set[pathlib.Path]:
    """The project's files that a file imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {file_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = (
                [*path.parent.parts][: len(path.parent.parts) + 1 - node.level]
                if node.level
                else []
            )
            module = ".".join([*base, *([node.module] if node.module else [])])
            inner = {file_of(f"{module}.{alias.name}") for alias in node.names}
            found |= inner if None not in inner else inner | {file_of(module)}
    return found - {None, path}


def empty(path: pathlib.Path) -> bool:
    return not (ROOT / path).read_text().strip()


def functions(tree: ast.Module):
    return (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_there_is_something_to_check():
    assert pathlib.Path("rlhf_jax/types.py") in SOURCES
    assert pathlib.Path("rlhf_jax/types.py") in imports(
        pathlib.Path("rlhf_jax/model/transformer.py")
    )


@pytest.mark.parametrize("path", [path for path in SOURCES if not empty(path)], ids=str)
def test_imports_go_down(path):
    own = room(path)
    assert own is not None, f"{path} is in no room; give it or its folder a floor"
    for target in imports(path):
        other = room(target)
        lower = other is not None and FLOORS[other] < FLOORS[own]
        assert lower or other == own, (
            f"{path} in {own} imports {target} in {other}, which is not below"
        )


def test_no_file_imports_itself_in_the_end():
    edges = {path: imports(path) for path in SOURCES}
    done: set[pathlib.Path] = set()

    def visit(path: pathlib.Path, above: tuple[pathlib.Path, ...]) -> None:
        assert path not in above, " -> ".join(map(str, (*above, path)))
        if path not in done:
            for target in edges.get(path, ()):
                visit(target, (*above, path))
            done.add(path)

    for path in SOURCES:
        visit(path, ())


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=str)
def test_files_and_functions_can_be_held_in_the_head(path):
    lines = len((ROOT / path).read_text().splitlines())
    assert lines <= (
        MOST_TEST_LINES if path in TESTS or path.parts[0] == "benchmarks" else MOST_LINES
    )
    for node in functions(parse(path)):
        doc = ast.get_docstring(node) or ""
        body = (node.end_lineno or node.lineno) - node.lineno - doc.count("\n")
        assert body <= MOST_FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {body} lines"


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.parts[0] in PACKAGES and not empty(path)], ids=str
)
def test_public_functions_have_docstrings(path):
    tree = parse(path)
    assert ast.get_docstring(tree), f"{path} does not say what it is"
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    bare = [f"{path}:{node.lineno} {node.name}" for node in public if not ast.get_docstring(node)]
    assert not bare, ", ".join(bare)
