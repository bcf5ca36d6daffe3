"""The house keeps its rules: who may import whom, how long things may be, what must not be there.

`tests/support/house.py` says what each rule is, and measures it.
"""

from __future__ import annotations

from collections.abc import Iterable

import house
import house_sources
import pytest

# What may break each rule. A number only ever falls: whoever mends an offender lowers it.
LIMITS = {
    "imports_that_rise": 0,
    "import_cycles": 0,
    "two_way_rooms": 0,
    "eager_imports_of_tools": 0,
    "services_that_know_stages": 0,
    "flat_files": 8,
    "long_files": 0,
    "long_bodies": 0,
    "small_helpers": 0,
    "packed_assignments": 0,
    "undocumented": 0,
    "no_verb_first": 0,
    "long_first_sentences": 0,
    "repeated_types": 0,
    "repeated_constants": 0,
    "unsafe_calls": 0,
    "layouts_in_parts": 0,
    "tests_that_import_tests": 0,
    "private_share": 0.365,  # aim: 0.30
    "line_mean": 43.0,  # the aim; columns of a line of code, less its indentation
    "short_of_body_median": 2.0,  # aim: 0; lines that the median body is below `BODY_MEDIAN`
}
BODY_MEDIAN = 8.0


@pytest.fixture(scope="module")
def project() -> house_sources.Sources:
    """The project's sources."""
    return house_sources.read(house.ROOT)


@pytest.fixture(scope="module")
def everything() -> house_sources.Sources:
    """The same, and the tests'."""
    return house_sources.read(house.ROOT, house_sources.EVERYTHING)


def check(sources: house_sources.Sources, rules: Iterable[str]) -> None:
    """Assert that no rule is broken more often than `LIMITS` says, with all that break it."""
    told = []
    for rule in rules:
        found = house.RULES[rule](sources)
        if len(found) > LIMITS[rule]:
            told.append(f"{rule}: {len(found)} where at most {LIMITS[rule]} may be")
            told += [f"  {one}" for one in found]
    if told:
        pytest.fail("\n".join(told), pytrace=False)


def test_imports_go_down_the_floors(project):
    assert "rlhf_jax/types.py" in house_sources.imported_files(
        project["rlhf_jax/models/transformer.py"], project
    )
    check(project, ["imports_that_rise", "import_cycles", "services_that_know_stages"])
    rooms = [house.ROOT / room for room in house.FLOORS]
    assert not [str(room) for room in rooms if not room.exists()], "rooms that are not there"


def test_no_two_rooms_import_each_other(project):
    check(project, ["two_way_rooms"])


def test_only_commands_import_planner_and_report_at_once(project):
    check(project, ["eager_imports_of_tools"])


def test_files_and_functions_are_one_idea_each(project, everything):
    check(everything, ["flat_files", "long_files", "long_bodies"])
    check(project, ["small_helpers", "packed_assignments", "layouts_in_parts"])
    found = house.figures(project)
    assert found["private_share"] <= LIMITS["private_share"]
    assert found["line_mean"] <= LIMITS["line_mean"]
    assert BODY_MEDIAN - found["body_median"] <= LIMITS["short_of_body_median"]


def test_what_is_public_says_what_it_is(project):
    check(project, ["undocumented", "no_verb_first", "long_first_sentences"])
    check(project, ["repeated_types", "repeated_constants"])


def test_tests_share_by_what_supports_them(everything):
    check(everything, ["tests_that_import_tests"])


def test_nothing_is_unpickled(project):
    check(project, ["unsafe_calls"])


def test_the_table_of_floors_names_every_room():
    table = house.floors_table()
    assert all(f"`{room}" in table for room in house.FLOORS)
    design = (house.ROOT / "docs" / "design.md").read_text()
    assert f"\n{table}\n" in design, "docs/design.md has other floors than house.py --floors"


LONG = "\n".join(["x = 1"] * (house.MOST_LINES + 1))
BODY = "def run():\n" + "    x = 1\n" * (house.MOST_BODY_LINES + 1)
PIPES = "from multiprocessing import Pipe\n"
HELPER = "def _help(x):\n    return x\ndef run(x):\n    return {}\n"

# rule: sources that break it, and sources that do not; by path, or the text of `TYPES`
TYPES = "rlhf_jax/types.py"
MESH = "rlhf_jax/mesh.py"
CASES = {
    "imports_that_rise": (
        [{TYPES: "from rlhf_jax import mesh", MESH: ""}, {"rlhf_jax/nowhere.py": "x = 1"}],
        [{"rlhf_jax/iteration.py": "from rlhf_jax import types", TYPES: ""}],
    ),
    "import_cycles": (
        [{TYPES: "def f():\n    from . import mesh", MESH: "from rlhf_jax.types import x"}],
        [{TYPES: "", MESH: "from rlhf_jax.types import x"}],
    ),
    "two_way_rooms": (
        [
            {
                "rlhf_jax/data/a.py": "from rlhf_jax.models import b",
                "rlhf_jax/models/b.py": "",
                "rlhf_jax/models/c.py": "def f():\n    import rlhf_jax.data.d",
                "rlhf_jax/data/d.py": "",
            }
        ],
        [
            {"rlhf_jax/data/a.py": "from . import b", "rlhf_jax/data/b.py": "from . import a"},
            {MESH: "from rlhf_jax import types", TYPES: "from rlhf_jax import mesh"},
        ],
    ),
    "eager_imports_of_tools": (
        [{"rlhf_jax/run.py": "from rlhf_jax.report import a", "rlhf_jax/report/a.py": ""}],
        [
            {
                "rlhf_jax/run.py": "def f():\n    from rlhf_jax.report import a",
                "rlhf_jax/report/a.py": "",
                "rlhf_jax/command/b.py": "from rlhf_jax.report import a",
            }
        ],
    ),
    "services_that_know_stages": (
        [{"rlhf_jax/data/a.py": "import rlhf_jax.training.b", "rlhf_jax/training/b.py": ""}],
        [{"rlhf_jax/data/b.py": "", "rlhf_jax/training/a.py": "import rlhf_jax.data.b"}],
    ),
    "flat_files": (["x = 1"], [{"rlhf_jax/__init__.py": "", "rlhf_jax/data/a.py": ""}]),
    "long_files": ([LONG], [{"tests/a.py": LONG}, "x = 1"]),
    "long_bodies": ([BODY], [BODY.replace("x = 1", "# why", 1)]),
    "small_helpers": (
        [
            HELPER.format("_help(x)"),
            "def run():\n    return Some()._held\nclass Some:\n    @property\n"
            "    def _held(self):\n        return 1",
        ],
        [
            HELPER.format("_help(x) + _help(x)"),
            HELPER.format("map(_help, x)"),
            "@jax.jit\n" + HELPER.format("_help(x)"),
            "@functools.cache\n" + HELPER.format("_help(x)"),
            "__all__ = ['_help']\n" + HELPER.format("_help(x)"),
            HELPER.format("_help(x)").replace("return x\n", "return (\n1,\n2,\n3,\n4,\n)\n"),
            {TYPES: HELPER.format("1"), MESH: "from rlhf_jax import types\ntypes._help(1)"},
        ],
    ),
    "packed_assignments": (["a, b = 1, 2"], ["a, b = b, a", "a, b = f()", "a = 1, 2"]),
    "undocumented": (
        [
            "x = 1",
            "'''Hold.'''\ndef f(): pass",
            "'''Hold.'''\nclass A:\n  'Hold.'\n  def f(s): pass",
        ],
        ["'''Hold.'''\ndef f():\n  'Do.'\ndef _g(): pass", ""],
    ),
    "no_verb_first": (
        [
            f"def f():\n    '''{words}'''"
            for words in ("The rows.", "Rows.", "[B] rows.", "draw a row.", "Goes.", "Shared.")
        ],
        ["'''Rows.'''\ndef f():\n    '''Pass rows.'''\nclass A:\n    '''Embed.'''\n"],
    ),
    "long_first_sentences": (
        [f"'''Return{' it' * house.MOST_WORDS}.'''"],
        [f"'''Return{' it' * (house.MOST_WORDS - 1)}. More of it.\n\nAnd yet more.'''"],
    ),
    "repeated_types": (
        [{TYPES: "class Run: ...", MESH: "Run = tuple[int]"}],
        [{TYPES: "class Run: ...", MESH: "from rlhf_jax.types import Run\nRUN = 1"}],
    ),
    "repeated_constants": (
        [{TYPES: "WINDOW = 1", MESH: "WINDOW = 2"}],
        [{TYPES: "WINDOW = 1", MESH: "WINDOW = 1\n_WINDOW = 3"}],
    ),
    "unsafe_calls": (
        [
            "import pickle",
            "def f():\n    from marshal import loads",
            "eval('1')",
            "run = exec",
            "np.load(file, allow_pickle=True)",
            "import multiprocessing",
            "from multiprocessing import Queue",
            "import multiprocessing.connection\nmultiprocessing.Pool()",
            "from concurrent.futures import ProcessPoolExecutor",
            PIPES + "pipe.send(1)",
            PIPES + "pipe.recv()",
            PIPES + "pipe.recv_bytes()",
        ],
        [
            PIPES + "pipe.send_bytes(b'')\npipe.recv_bytes(1 << 20)",
            "exchange.send(x)\nmodel.eval()\nnp.load(file, allow_pickle=False)",
        ],
    ),
    "layouts_in_parts": (
        ["def f(mesh): ...", "class A:\n    kernels: int"],
        ["def f(layout):\n    mesh = layout.mesh", {MESH: "def f(mesh): ..."}],
    ),
    "tests_that_import_tests": (
        [
            {"tests/a/test_a.py": "import test_b", "tests/b/test_b.py": ""},
            {"tests/a/test_a.py": "from test_b import c", "tests/b/test_b.py": ""},
            {"tests/support/a.py": "def f():\n    from . import test_b", "tests/test_b.py": ""},
        ],
        [{"tests/a/test_a.py": "from b import test_c", "tests/support/b.py": ""}],
    ),
}


def test_every_rule_tells_what_breaks_it_from_what_does_not():
    assert set(CASES) == set(house.RULES)
    for rule, (broken, kept) in CASES.items():
        for texts, breaks in [(one, True) for one in broken] + [(one, False) for one in kept]:
            sources = house_sources.parse({TYPES: texts} if isinstance(texts, str) else texts)
            assert bool(house.RULES[rule](sources)) == breaks, (rule, texts)
