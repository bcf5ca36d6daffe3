"""Measure how the source is built: floors, sizes, words, and what must not be there.

    python tests/support/house.py                    # the figures of this checkout, as JSON
    python tests/support/house.py /path/to/another   # [of this one, of the other], by figure
    python tests/support/house.py --floors           # the table of floors, as documents show it
    python tests/support/house.py --offenders RULE   # what `test_house.py` counts by that rule

Figures are of `PRODUCT`, of a copy that `ruff format` has laid out in lines of 100 columns, so that
older trees are counted alike. Only the standard library and ruff are needed. A source is only read,
never imported.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import json
import pathlib
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from house_sources import (
    EVERYTHING,
    PROJECT,
    Function,
    FunctionNode,
    Source,
    Sources,
    all_functions,
    code_lines,
    documented,
    functions,
    imported_files,
    imports,
    of_product,
    read,
    read_formatted,
    references_of,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]

# A room is a file or a folder of this table. A file may import from its own room, where that is a
# folder, and from rooms on lower floors; a file without a room breaks the rule.
FLOORS = {
    "pallas_kernels": 0,
    "rlhf_jax/pipeline": 0,
    "rlhf_jax/runtime": 0,
    "rlhf_jax/mesh.py": 1,
    "rlhf_jax/types.py": 1,
    "rlhf_jax/cache": 2,
    "rlhf_jax/data": 2,
    "rlhf_jax/losses": 2,
    "rlhf_jax/sequences": 2,
    "rlhf_jax/config": 3,
    "rlhf_jax/models": 3,
    "rlhf_jax/monitoring": 3,
    "rlhf_jax/placement": 4,
    "rlhf_jax/report": 4,
    "rlhf_jax/generation": 5,
    "rlhf_jax/rewards": 6,
    "rlhf_jax/state.py": 6,
    "rlhf_jax/inference": 7,
    "rlhf_jax/memory": 8,
    "rlhf_jax/sources": 8,
    "rlhf_jax/training": 8,
    "rlhf_jax/algorithms": 9,
    "rlhf_jax/run.py": 9,
    "rlhf_jax/evaluation.py": 10,
    "rlhf_jax/iteration.py": 10,
    "rlhf_jax/setup": 10,
    "rlhf_jax/planner": 11,
    "rlhf_jax/session.py": 11,
    "rlhf_jax/trainer.py": 12,
    "configs": 13,
    "rlhf_jax/__init__.py": 13,
    "rlhf_jax/command": 13,
    "benchmarks": 14,
    "launch": 14,
}
STAGES = ("generation", "inference", "training", "reallocation", "placement", "rewards")
SERVICES = ("runtime", "monitoring", "data", "checkpoint", "report")
# What a run imports where it needs it, if at all; its own commands import it at once.
TOOLS = ("rlhf_jax/planner", "rlhf_jax/report")
COMMANDS = "rlhf_jax/command"

MOST_LINES = 400  # of a file
MOST_TEST_LINES = 700  # of a file of tests or benchmarks
MOST_BODY_LINES = 50  # of a function's body
LEAST_BODY_LINES = 6  # of the body of a private helper that is called once
MOST_WORDS = 20  # of a docstring's first sentence

# First words that are no verb, beside those whose ending tells it (`NO_IMPERATIVE`).
NO_VERBS = (
    "A After All Also An And Any As At Before Both By Each Either Every Everything For From How If "
    "In Inside Into Is It Its No None Nothing Of On One Only Or Same Some That The Their There "
    "These This Those Though To Under Until What Whatever When Where Whether Which Who Whose Why "
    "With Within Without"
)
# Plurals, third persons, participles: imperatives seldom end so.
NO_IMPERATIVE = re.compile(r"\w*([^s]s|[^e]ed|ing)")
IMPERATIVES = "Bias Bring Embed Focus Ring Shed String"

SERIALIZERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
# What `multiprocessing` has to move plain bytes with; its other tools pickle what they get.
BYTE_TOOLS = {"connection", "Connection", "Pipe", "Listener", "Client", "wait"}

Rule = Callable[[Sources], list[str]]  # sources -> what breaks the rule, one text each

# Rules: each lists what breaks it.


def room_of(path: str) -> str | None:
    """Return the room of a file: itself, or the nearest folder of the table."""
    places = [path, *(parent.as_posix() for parent in pathlib.PurePosixPath(path).parents)]
    return next((place for place in places if place in FLOORS), None)


def imports_that_rise(sources: Sources) -> list[str]:
    """List files without a room, and imports from a room that is not below."""
    found = []
    for path, source in sources.items():
        own = room_of(path)
        if own is None and source.text.strip():
            found.append(f"{path} is in no room; give it or its folder a floor")
        for target in sorted(imported_files(source, sources)):
            other = room_of(target)
            if own and other != own and (other is None or FLOORS[other] >= FLOORS[own]):
                found.append(f"{path} in {own} imports {target} in {other}, which is not below")
    return found


def import_cycles(sources: Sources) -> list[str]:
    """List a cycle of imports for each file that closes one."""
    edges = {path: imported_files(source, sources) for path, source in sources.items()}
    done: set[str] = set()
    found = []

    def visit(path: str, above: tuple[str, ...]) -> None:
        if path in above:
            found.append(" -> ".join((*above[above.index(path) :], path)))
        elif path not in done:
            for target in sorted(edges[path]):
                visit(target, (*above, path))
            done.add(path)

    for path in edges:
        visit(path, ())
    return found


def _import_lines(sources: Sources) -> Iterator[tuple[Source, ast.stmt, str]]:
    """Yield (file, import statement, imported file) of the product, at any depth."""
    product = of_product(sources)
    modules = {one.module: one for one in product.values()}
    for source in product.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                alone = dataclasses.replace(source, tree=ast.Module([node], []))
                for path in {modules[module].path for _, module, _ in imports(alone, modules)}:
                    yield source, node, path


def _folder(path: str) -> str:
    """Return the package and the first folder of a file; itself where it lies in the package."""
    parts = path.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else path


def two_way_rooms(sources: Sources) -> list[str]:
    """List the imports between folders of a package that import each other.

    A file that lies in the package itself is a folder of its own. `types.py` is for all.
    """
    lines: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for source, node, path in _import_lines(sources):
        pair = (_folder(source.path), _folder(path))
        if pair[0] != pair[1] and not path.endswith(("__init__.py", "/types.py")):
            lines[pair].append(f"{source.path}:{node.lineno} {ast.unparse(node)}")
    both = [pair for pair in sorted(lines) if pair[::-1] in lines]
    return [line for pair in both for line in lines[pair]]


def eager_imports_of_tools(sources: Sources) -> list[str]:
    """List the imports of `TOOLS`, outside of functions, by what is no command."""
    found = []
    for source, node, path in _import_lines(sources):
        if _folder(path) in TOOLS and _folder(source.path) not in (*TOOLS, COMMANDS):
            inside = {id(one) for f in functions(source) for one in ast.walk(f.node)}
            if id(node) not in inside:
                found.append(f"{source.path}:{node.lineno} {ast.unparse(node)}")
    return found


def services_that_know_stages(sources: Sources) -> list[str]:
    """List the imports of a stage by a service: by `SERVICES` and `STAGES`, folders in rlhf_jax."""

    def within(path: str, folders: Sequence[str]) -> bool:
        parts = path.split("/")
        return len(parts) > 2 and parts[0] == "rlhf_jax" and parts[1] in folders

    return [
        f"{path} imports {target}, of a stage"
        for path, source in sources.items()
        if within(path, SERVICES)
        for target in sorted(imported_files(source, sources))
        if within(target, STAGES)
    ]


def long_files(sources: Sources) -> list[str]:
    """List files of more than `MOST_LINES` lines; `MOST_TEST_LINES` of tests and benchmarks."""
    found = []
    for path, source in sources.items():
        lines = len(source.text.splitlines())
        wide = path.startswith(("tests/", "benchmarks/"))
        if lines > (MOST_TEST_LINES if wide else MOST_LINES):
            found.append(f"{path} has {lines} lines")
    return found


def long_bodies(sources: Sources) -> list[str]:
    """List functions whose bodies have more than `MOST_BODY_LINES` lines."""
    long = [one for one in all_functions(sources) if one.lines > MOST_BODY_LINES]
    return [f"{one.where} has {one.lines} lines" for one in long]


def small_helpers(sources: Sources) -> list[str]:
    """List the product's private functions that one call uses, of under `LEAST_BODY_LINES` lines.

    Callbacks (named, but not called) are none, nor functions that a decorator compiles, registers
    or caches.
    """
    references = references_of(sources)
    found = []
    for function in all_functions(of_product(sources)):
        uses = references.of(function)
        decorators = " ".join(map(ast.unparse, function.node.decorator_list))
        read = re.search(r"\b(cached_)?property\b", decorators) is not None
        if (
            not function.nested
            and 0 < function.lines < LEAST_BODY_LINES
            and len(uses) == 1
            and (uses[0].called or read)
            and not re.search(r"jit|custom_[vj]|shard_map|cache|register", decorators)
            and references.is_private(function)
        ):
            found.append(f"{function.where} has {function.lines} lines and one use")
    return found


def undocumented(sources: Sources) -> list[str]:
    """List the product's modules, public classes, functions and methods without a docstring."""

    def visit(source: Source, node: ast.Module | ast.ClassDef) -> Iterator[str]:
        for child in node.body:
            if isinstance(child, FunctionNode | ast.ClassDef) and not child.name.startswith("_"):
                if not ast.get_docstring(child):
                    yield f"{source.path}:{child.lineno} {child.name}"
                if isinstance(child, ast.ClassDef):
                    yield from visit(source, child)

    found = []
    for path, source in of_product(sources).items():
        if source.text.strip() and not ast.get_docstring(source.tree):
            found.append(f"{path} does not say what it is")
        found += visit(source, source.tree)
    return found


def no_verb_first(sources: Sources) -> list[str]:
    """List the product's docstrings of functions and classes that begin with no imperative."""
    found = []
    for path, source in of_product(sources).items():
        for node, text in documented(source.tree):
            first = text.split()[0].rstrip(".,:;")
            verb = re.fullmatch(r"[A-Z][a-z]+(-[a-z]+)*", first) and first not in NO_VERBS.split()
            verb = verb and (first in IMPERATIVES.split() or not NO_IMPERATIVE.fullmatch(first))
            if not isinstance(node, ast.Module) and not verb:
                found.append(f"{path}:{node.lineno} {node.name}: {first}")
    return found


def long_first_sentences(sources: Sources) -> list[str]:
    """List the product's docstrings whose first sentence has more than `MOST_WORDS` words."""
    found = []
    for path, source in of_product(sources).items():
        for node, text in documented(source.tree):
            paragraph = " ".join(text.split("\n\n")[0].split())
            words = len(re.split(r"(?<=[.!?])\s", paragraph)[0].split())
            if words > MOST_WORDS:
                place = f"{path}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', 'module')}"
                found.append(f"{place}: {words} words")
    return found


def unsafe_calls(sources: Sources) -> list[str]:
    """List what could run code that came as data: unpickling, eval, exec.

    Where `multiprocessing` is imported, only its byte-wise tools are: no `send`, no `recv`, and
    `recv_bytes` with the most bytes that it may be given.
    """
    found = []
    for path, source in sources.items():
        imported: set[str] = set()
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        for name in sorted(imported):
            parts = name.split(".")
            spawns = parts[0] == "multiprocessing" and not {*parts[1:2]} & BYTE_TOOLS
            if parts[0] in SERIALIZERS or "ProcessPoolExecutor" in parts or spawns:
                found.append(f"{path} imports {name}")
        pipes = any(name.split(".")[0] == "multiprocessing" for name in imported)
        nodes = [node for node in ast.walk(source.tree) if isinstance(node, ast.expr)]
        found += [f"{path}:{node.lineno} {why}" for node in nodes if (why := _unsafe(node, pipes))]
    return found


def _unsafe(node: ast.expr, pipes: bool) -> str:
    """What is wrong with an expression, or nothing; pipes: its file imports `multiprocessing`."""
    if isinstance(node, ast.Name) and node.id in ("eval", "exec", "__import__"):
        return f"names {node.id}"
    if isinstance(node, ast.Attribute):
        of = ast.unparse(node.value)
        if of == "builtins" and node.attr in ("eval", "exec", "__import__"):
            return f"names {node.attr}"
        if pipes and node.attr in ("send", "recv"):
            return f"uses {node.attr}, which pickles"
        tools = node.attr in BYTE_TOOLS or of != "multiprocessing"
        return "" if tools and node.attr != "ProcessPoolExecutor" else f"uses {of}.{node.attr}"
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if pipes and name == "recv_bytes" and not (node.args or node.keywords):
            return "calls recv_bytes without a limit"
        for keyword in node.keywords:
            plain = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg == "allow_pickle" and not plain:
                return "allows pickle"
    return ""


def _top_assignments(sources: Sources) -> Iterator[tuple[str, str, ast.expr]]:
    """Yield (path, public name, value) of each assignment at the top of a file."""
    for path, source in sources.items():
        for node in source.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                pairs: list[tuple[ast.expr, ast.expr]] = [(one, node.value) for one in targets]
                for target, value in list(pairs):
                    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                        pairs += zip(target.elts, value.elts, strict=False)
                for target, value in pairs:
                    if isinstance(target, ast.Name) and not target.id.startswith("_"):
                        yield path, target.id, value


def repeated_types(sources: Sources) -> list[str]:
    """List the product's public classes and type aliases that several modules define."""
    product = of_product(sources)
    places: dict[str, set[str]] = collections.defaultdict(set)
    for path, source in product.items():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(path)
    for path, name, _ in _top_assignments(product):
        if re.fullmatch(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", name):
            places[name].add(path)
    several = {name: sorted(paths) for name, paths in sorted(places.items()) if len(paths) > 1}
    return [f"{name}: {', '.join(paths)}" for name, paths in several.items()]


def repeated_constants(sources: Sources) -> list[str]:
    """List the product's public constants that several modules define with several values."""
    values: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for path, name, value in _top_assignments(of_product(sources)):
        if re.fullmatch(r"[A-Z][A-Z0-9_]*", name) and len(name) > 1:
            values[name][path] = ast.dump(value)
    several = {name: by for name, by in sorted(values.items()) if len(set(by.values())) > 1}
    return [f"{name}: {', '.join(sorted(by))}" for name, by in several.items()]


def packed_assignments(sources: Sources) -> list[str]:
    """List the product's assignments of a tuple to names that are no swap."""
    found = []
    for path, source in of_product(sources).items():
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
                continue
            target = node.targets[0]
            if isinstance(target, ast.Tuple):
                names = sorted(map(ast.unparse, target.elts))
                if names != sorted(map(ast.unparse, node.value.elts)):
                    found.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    return found


def flat_files(sources: Sources) -> list[str]:
    """List the files that lie in rlhf_jax itself."""
    names = [path for path in sources if re.fullmatch(r"rlhf_jax/[^/]+\.py", path)]
    return [path for path in names if not path.endswith("__init__.py")]


def tests_that_import_tests(sources: Sources) -> list[str]:
    """List the imports of a test file by what lies in tests; files share by `tests/support`."""
    of_tests = {path: one for path, one in sources.items() if path.startswith("tests/")}
    stems = {pathlib.PurePosixPath(path).stem for path in of_tests}
    found = []
    for path, source in of_tests.items():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [getattr(node, "module", None) or "", *(one.name for one in node.names)]
                names = {name.rpartition(".")[2] for name in modules}
                if any(name.startswith("test_") for name in names & stems):
                    found.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    return found


def layouts_in_parts(sources: Sources) -> list[str]:
    """List rlhf_jax's functions and fields that hold a mesh or kernels apart from a `Layout`.

    A placement is a layout that is written down.
    """
    found = []
    for path, source in sources.items():
        own = ("rlhf_jax/mesh.py", "rlhf_jax/placement/plan.py")
        if not path.startswith("rlhf_jax/") or path in own:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.arg | ast.AnnAssign):
                name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
                if name in ("mesh", "kernels"):
                    found.append(f"{path}:{node.lineno} {name}")
    return found


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        imports_that_rise,
        import_cycles,
        two_way_rooms,
        eager_imports_of_tools,
        services_that_know_stages,
        flat_files,
        long_files,
        long_bodies,
        small_helpers,
        packed_assignments,
        undocumented,
        no_verb_first,
        long_first_sentences,
        repeated_types,
        repeated_constants,
        unsafe_calls,
        layouts_in_parts,
        tests_that_import_tests,
    )
}

# Rules that tests keep, too.
OF_TESTS_TOO = ("flat_files", "long_files", "long_bodies", "tests_that_import_tests")

# Figures.


def offences(sources: Sources) -> dict[str, int]:
    """Count what breaks each rule that is no figure already, and what is called once."""
    product = of_product(sources)
    inside = references_of(product)
    named = [function for function in all_functions(product) if not function.nested]
    once = sum(len(inside.of(function)) == 1 for function in named)
    return {"called_once": once} | {
        name: len(rule(product if name.startswith("long_") else sources))
        for name, rule in RULES.items()
        if name not in ("packed_assignments", "imports_that_rise")
    }


def figures(sources: Sources) -> dict[str, Any]:
    """Measure the product's files. sources: the whole project's, for who uses what of it."""
    product = of_product(sources)
    references = references_of(sources)
    every = [function for function in all_functions(product) if function.statements]
    named = [function for function in all_functions(product) if not function.nested]
    bodies = sorted(function.lines for function in every)
    lines = [line for source in product.values() for line in code_lines(source)]
    private = sum(map(references.is_private, named))
    return {
        "files": len(product),
        "code_lines": len(lines),
        "functions": len(every),
        "body_median": statistics.median(bodies),
        "body_p90": bodies[int(0.9 * len(bodies))],
        "statements_median": statistics.median(map(_count_statements, every)),
        "private_share": round(private / len(named), 3),
        "line_mean": round(statistics.mean(map(len, lines)), 1),
        "packed_per_100_lines": round(100 * len(packed_assignments(sources)) / len(lines), 2),
    }


def _count_statements(function: Function) -> int:
    """Statements of a body, those of functions and classes inside left out."""
    count = 0
    pending: list[ast.AST] = list(function.statements)
    while pending:
        node = pending.pop()
        count += isinstance(node, ast.stmt)
        if not isinstance(node, FunctionNode | ast.ClassDef):
            pending += ast.iter_child_nodes(node)
    return count


def floors_table() -> str:
    """Return the table of floors as Markdown."""
    rooms: dict[int, list[str]] = collections.defaultdict(list)
    for room, floor in FLOORS.items():
        rooms[floor].append(f"`{room}`" if room.endswith(".py") else f"`{room}/`")
    rows = [f"| {floor} | {', '.join(sorted(rooms[floor]))} |" for floor in sorted(rooms)]
    return "\n".join(["| floor | holds |", "| --- | --- |", *rows])


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", nargs="?", type=pathlib.Path, help="another checkout")
    parser.add_argument("--floors", action="store_true", help="print the table of floors")
    parser.add_argument("--offenders", choices=RULES, help="print what breaks a rule")
    asked = parser.parse_args()
    if asked.floors:
        print(floors_table())
        return
    if asked.offenders:
        folders = EVERYTHING if asked.offenders in OF_TESTS_TOO else PROJECT
        print("\n".join(RULES[asked.offenders](read(asked.other or ROOT, folders))))
        return

    def measured(root: pathlib.Path) -> dict[str, Any]:
        sources = read_formatted(root)
        return figures(sources) | offences(sources)

    found = measured(ROOT)
    if asked.other is not None:
        other = measured(asked.other)
        found = {name: [value, other[name]] for name, value in found.items()}
    told = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    print("{\n" + ",\n".join(told) + "\n}")


if __name__ == "__main__":
    main()
