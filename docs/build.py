"""Build the documents as a site, the reference that the code knows best among them.

python docs/build.py          # into site/
python docs/build.py serve    # and show it
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import rlhf_jax
from rlhf_jax.command.config import keys
from rlhf_jax.config.schema import Config
from rlhf_jax.monitoring.meanings import MEANINGS

ROOT = Path(__file__).resolve().parents[1]
FIRST = ("train", "default_config", "Result", "Callback")  # of the public names
REFERENCE = ROOT / "docs" / "reference"


def main(words: list[str]) -> int:
    """Write the pages, give zensical the rest, and return its exit code."""
    write_reference()
    command = [sys.executable, "-m", "zensical", *(words or ["build", "--strict", "--clean"])]
    return subprocess.run(command, cwd=ROOT).returncode


def write_reference() -> None:
    """Write the pages of config keys, metrics and public names."""
    pages = {"config": config_keys(), "metrics": metrics(), "api": public_names()}
    for name, content in pages.items():
        (REFERENCE / f"{name}.md").write_text(content)


def config_keys() -> str:
    """Return the page of all config keys: a table for each section."""
    lines = [
        "# Config keys",
        "",
        "Every key of a run, with its default. A config file sets them on what"
        " `rlhf_jax.default_config()` returns, the command line by `--config.any.key=value`;"
        " `rlhf-jax config 'generation.*'` prints the same.",
    ]
    section = None
    for key in keys():
        own, _, _ = key.name.rpartition(".")
        if own != section:
            section = own
            lines += [
                "",
                f"## {own or 'The run'}",
                "",
                "| key | default | meaning |",
                "|---|---|---|",
            ]
        default = key.default.to_dict() if isinstance(key.default, Config) else key.default
        lines.append(f"| `{key.name}` | `{default!r}` | {_cell(key.comment)} |")
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Return the page of all metrics."""
    lines = [
        "# Metrics",
        "",
        "The numbers of `metrics.jsonl` (a line a step) and, from `eval/` on, of"
        " `evaluations.jsonl`; trackers have the same. NAME stands for a term, a measure or a"
        " drafter of yours. A range is where most runs are healthy, not a rule.",
        "",
        "| key | meaning | unit | healthy |",
        "|---|---|---|---|",
    ]
    for one in MEANINGS:
        lines.append(f"| `{one.key}` | {_cell(one.text)} | {one.unit} | {_cell(one.healthy)} |")
    return "\n".join(lines) + "\n"


def public_names() -> str:
    """Return the page of what `rlhf_jax` exports, each with its docstring, first what most need."""
    lines = ["# Python", "", "What `import rlhf_jax` gives; its name there is that of the heading."]
    for name in dict.fromkeys([*FIRST, *rlhf_jax.__all__]):
        module, _, own = rlhf_jax._PLACES[name].partition(":")
        lines += [
            "",
            f"::: rlhf_jax.{module}.{own or name}",
            "    options:",
            f"      heading: {name}",
        ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return text that may stand in a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
