"""The public names of the package."""

from __future__ import annotations

import ast
import inspect
import pathlib
import subprocess
import sys

import pytest

import rlhf_jax

SOURCE = pathlib.Path(rlhf_jax.__file__)


@pytest.mark.parametrize("name", rlhf_jax.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name):
    found = getattr(rlhf_jax, name)
    assert found is getattr(rlhf_jax, name)
    if inspect.isroutine(found) or inspect.isclass(found):
        assert inspect.getdoc(found), f"{name} has no docstring"


def test_what_is_listed_is_what_type_checkers_see():
    """The names of `__all__`, the table of places and the imports for type checkers agree."""
    places = {}
    for node in ast.walk(ast.parse(SOURCE.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlhf_jax."):
            module = (node.module or "").removeprefix("rlhf_jax.")
            for alias in node.names:
                renamed = f"{module}:{alias.name}" if alias.asname else module
                places[alias.asname or alias.name] = renamed
    assert places == rlhf_jax._PLACES
    assert sorted(places) == sorted(rlhf_jax.__all__)
    assert set(rlhf_jax.__all__) <= set(dir(rlhf_jax))


def test_no_public_name_hides_a_module():
    modules = {path.stem for path in SOURCE.parent.iterdir() if path.suffix in ("", ".py")}
    assert not modules & set(rlhf_jax.__all__)


def test_a_name_that_is_not_there_is_missed_as_in_any_module():
    name = "nothing"
    with pytest.raises(AttributeError, match="module 'rlhf_jax' has no attribute 'nothing'"):
        getattr(rlhf_jax, name)
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from rlhf_jax import {name}")


def test_the_package_itself_imports_no_jax():
    program = "import sys, rlhf_jax; dir(rlhf_jax); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
    program = "import sys, rlhf_jax; rlhf_jax.Model; sys.exit('jax' not in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
