"""Read a checkout's source: its functions, its lines of code, and who uses what.

A source is only read, never imported; the standard library and ruff are all that is needed.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

PRODUCT = ("rlhf_jax", "pallas_kernels")
PROJECT = (*PRODUCT, "configs", "launch", "benchmarks")
EVERYTHING = (*PROJECT, "tests")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Documented = FunctionNode | ast.ClassDef | ast.Module


@dataclasses.dataclass(frozen=True)
class Source:
    """Hold a file: its path below the root, its text, its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Return the dotted name that imports it."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        """Return the dotted name of the package that relative imports begin at."""
        return self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]


@dataclasses.dataclass(frozen=True)
class Function:
    """Hold a function: where it stands, and the class whose method it is."""

    source: Source
    node: FunctionNode
    owner: str
    nested: bool

    @property
    def where(self) -> str:
        """Return `path:line name`."""
        return f"{self.source.path}:{self.node.lineno} {self.node.name}"

    @functools.cached_property
    def statements(self) -> list[ast.stmt]:
        """Return its body without the docstring, and without what only stands for a body."""
        body = self.node.body[1:] if ast.get_docstring(self.node) else self.node.body
        return [one for one in body if not isinstance(one, ast.Pass) and not _is_ellipsis(one)]

    @functools.cached_property
    def lines(self) -> int:
        """Count lines from the first statement to the last, less comments and inner docstrings."""
        if not self.statements:
            return 0
        left_out = _docstring_lines(self.node) | _comment_lines(self.source)
        first = self.statements[0]
        start = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", ()))])
        end = self.statements[-1].end_lineno or start
        return len(set(range(start, end + 1)) - left_out)


@dataclasses.dataclass(frozen=True)
class Use:
    """Hold a place where a function is named: the module, and whether it is called there."""

    module: str
    called: bool


Sources = Mapping[str, Source]  # by path


def parse(texts: Mapping[str, str]) -> dict[str, Source]:
    """Parse texts by path."""
    return {path: Source(path, text, ast.parse(text)) for path, text in sorted(texts.items())}


def read(root: pathlib.Path, folders: Sequence[str] = PROJECT) -> dict[str, Source]:
    """Read the Python files in folders of a checkout."""
    paths = [path for name in folders for path in (root / name).rglob("*.py")]
    return parse({path.relative_to(root).as_posix(): path.read_text("utf-8") for path in paths})


def read_formatted(root: pathlib.Path) -> dict[str, Source]:
    """Read the project's files of a checkout as `ruff format` lays them out, from a copy."""
    with tempfile.TemporaryDirectory() as name:
        copy = pathlib.Path(name)
        for source in read(root).values():
            (copy / source.path).parent.mkdir(parents=True, exist_ok=True)
            (copy / source.path).write_text(source.text, "utf-8")
        options = ["line-length=100", "format.skip-magic-trailing-comma=true"]
        configs = [word for option in options for word in ("--config", option)]
        command = [sys.executable, "-m", "ruff", "format", "--isolated", "--no-cache", "--quiet"]
        subprocess.run([*command, "--target-version", "py311", *configs, name], check=True)
        return read(copy)


def of_product(sources: Sources) -> dict[str, Source]:
    """Keep the files of `PRODUCT`."""
    return {path: one for path, one in sources.items() if path.split("/")[0] in PRODUCT}


@functools.cache  # as most rules ask for them, and for their lines
def functions(source: Source) -> tuple[Function, ...]:
    """Return every function of a file: methods and nested ones, too."""

    def visit(node: ast.AST, owner: str, nested: bool) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FunctionNode):
                yield Function(source, child, owner, nested)
                yield from visit(child, "", True)
            elif isinstance(child, ast.ClassDef):
                yield from visit(child, child.name, nested)
            else:
                yield from visit(child, owner, nested)

    return tuple(visit(source.tree, "", False))


def all_functions(sources: Sources) -> list[Function]:
    """List every function of all files."""
    return [function for source in sources.values() for function in functions(source)]


def _is_ellipsis(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and value.value is ...


def documented(tree: ast.AST) -> Iterator[tuple[Documented, str]]:
    """Yield what has a docstring, and the docstring."""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield node, text


def _docstring_lines(tree: ast.AST) -> set[int]:
    held = [node.body[0] for node, _ in documented(tree)]
    return {line for one in held for line in range(one.lineno, (one.end_lineno or 0) + 1)}


@functools.cache
def _comment_lines_of(text: str) -> frozenset[int]:
    lines = enumerate(text.splitlines(), 1)
    return frozenset(number for number, line in lines if line.lstrip().startswith("#"))


def _comment_lines(source: Source) -> frozenset[int]:
    return _comment_lines_of(source.text)


def code_lines(source: Source) -> list[str]:
    """List lines of code without indentation; lines of brackets and commas only are none."""
    left_out = _docstring_lines(source.tree) | _comment_lines(source)
    lines = [
        line.strip() for n, line in enumerate(source.text.splitlines(), 1) if n not in left_out
    ]
    return [line for line in lines if not re.fullmatch(r"[\[\](){},:]*", line)]


# Names: who imports what, and where a function is used.


def imports(source: Source, modules: Mapping[str, Source]) -> Iterator[tuple[str, str, str]]:
    """Yield (local name, module of the project, name in it) of each import, at any depth.

    The name is empty where a module itself is imported. modules: by dotted name.
    """
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    yield alias.asname or alias.name, alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            base = source.package.split(".")
            base = base[: len(base) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                local = alias.asname or alias.name
                if f"{module}.{alias.name}" in modules:
                    yield local, f"{module}.{alias.name}", ""
                elif module in modules:
                    yield local, module, alias.name


def imported_files(source: Source, sources: Sources) -> set[str]:
    """Return the paths of the files that a file imports, at the top or inside a function."""
    modules = {one.module: one for one in sources.values()}
    return {modules[module].path for _, module, _ in imports(source, modules)} - {source.path}


class References:
    """Hold where each function of some sources is used: by module and name, or by method."""

    def __init__(self, sources: Sequence[Source]):
        self.modules = {source.module: source for source in sources}
        self.bound: dict[str, dict[str, tuple[str, str]]] = {}
        self.top = {source.module: _top_level(source) for source in sources}
        self.methods = {
            source.module: {(f.owner, f.node.name) for f in functions(source) if f.owner}
            for source in sources
        }
        self.uses: dict[tuple[str, str], list[Use]] = collections.defaultdict(list)
        # by attribute: (use, class in which it is said of `self`, or empty)
        self.attributes: dict[str, list[tuple[Use, str]]] = collections.defaultdict(list)
        self.imported: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
        for source in sources:
            found = list(imports(source, self.modules))
            self.bound[source.module] = {local: (module, name) for local, module, name in found}
        for source in sources:
            for module, name in self.bound[source.module].values():
                if name:
                    self.imported[self.origin(module, name)].add(source.module)
            calls = {id(node.func) for node in ast.walk(source.tree) if isinstance(node, ast.Call)}
            self._visit(source.tree, source.module, calls, (), ())

    def origin(self, module: str, name: str) -> tuple[str, str]:
        """Follow a name through modules that only hand it on."""
        while name not in self.top.get(module, ()) and name in self.bound.get(module, ()):
            following = self.bound[module][name]
            if not following[1] or following == (module, name):
                break
            module, name = following
        return module, name

    def of(self, function: Function) -> list[Use]:
        """List the uses of a function or method outside itself; of a nested one, none is known."""
        module, name = function.source.module, function.node.name
        if not function.owner:
            return self.uses[module, name]
        owners = {owner for owner, method in self.methods[module] if method == name}
        return [
            use
            for use, owner in self.attributes[name]
            if (use.module == module or not name.startswith("_"))
            and (owner == function.owner or owner not in owners or use.module != module)
        ]

    def is_private(self, function: Function) -> bool:
        """Say whether only its own module knows it; of a method, whether its name says so."""
        module, name = function.source.module, function.node.name
        if function.owner:
            return name.startswith("_") and not name.startswith("__")
        users = {use.module for use in self.uses[module, name]} | self.imported[module, name]
        return name not in _exported(function.source) and not users - {module}

    def _module(self, node: ast.expr, module: str) -> str:
        """The module that an expression names; empty if it names none."""
        if isinstance(node, ast.Name):
            target, name = self.bound[module].get(node.id, (node.id, ""))
            return target if not name and (target in self.modules or node.id == target) else ""
        if isinstance(node, ast.Attribute) and (outer := self._module(node.value, module)):
            return f"{outer}.{node.attr}"
        return ""

    def _visit(
        self,
        node: ast.AST,
        module: str,
        calls: set[int],
        inside: tuple[str, ...],
        hidden: tuple[frozenset[str], ...],
    ) -> None:
        """Note the names below a node. inside: classes and functions around it; hidden: names that
        are local there.
        """
        if isinstance(node, FunctionNode | ast.Lambda):
            hidden = (*hidden, _local_names(node))
        if isinstance(node, FunctionNode | ast.ClassDef):
            for part in node.decorator_list:
                self._visit(part, module, calls, inside, hidden[:-1])
            inside = (*inside, node.name)
        use = Use(module, id(node) in calls)
        if isinstance(node, ast.Name) and not any(node.id in names for names in hidden):
            if node.id in self.top[module] and node.id not in inside:
                self.uses[module, node.id].append(use)
            elif node.id in self.bound[module] and self.bound[module][node.id][1]:
                self.uses[self.origin(*self.bound[module][node.id])].append(use)
        elif isinstance(node, ast.Attribute):
            target = self._module(node.value, module)
            said_of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if target in self.modules:
                self.uses[self.origin(target, node.attr)].append(use)
            elif node.attr not in inside[1:]:
                owner = inside[0] if said_of_self and inside else ""
                self.attributes[node.attr].append((use, owner))
        seen = node.decorator_list if isinstance(node, FunctionNode | ast.ClassDef) else ()
        for child in ast.iter_child_nodes(node):
            if child not in seen:
                self._visit(child, module, calls, inside, hidden)


@functools.cache  # as a rule and the figures ask for the same
def _references(sources: tuple[Source, ...]) -> References:
    return References(sources)


def references_of(sources: Sources) -> References:
    """Return where each function of some sources is used."""
    return _references(tuple(sources.values()))


def _top_level(source: Source) -> set[str]:
    """Functions and classes at the top of a file, under `if` and `try` too."""
    found = set()
    pending: list[ast.stmt] = list(source.tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, FunctionNode | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.If | ast.Try):
            pending += [*node.body, *node.orelse]
    return found


def _local_names(node: FunctionNode | ast.Lambda) -> frozenset[str]:
    """Parameters, and names that the body binds, but for functions inside."""
    names = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
    body = node.body if isinstance(node.body, list) else [node.body]
    for one in (inner for statement in body for inner in ast.walk(statement)):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            names.add(one.id)
    return frozenset(names)


def _exported(source: Source) -> set[str]:
    """The names of `__all__`."""
    for node in source.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return {str(one.value) for one in ast.walk(node) if isinstance(one, ast.Constant)}
    return set()
