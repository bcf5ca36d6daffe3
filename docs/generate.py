"""Write the pages of the reference that the code knows best: config keys, metrics, public names.

python docs/generate.py && zensical build
"""

from __future__ import annotations

from pathlib import Path

import rlhf_jax
from rlhf_jax.command.config import keys
from rlhf_jax.config.schema import Config
from rlhf_jax.monitoring.meanings import MEANINGS

REFERENCE = Path(__file__).parent / "reference"


def main() -> None:
    """Write the pages."""
    pages = {"config": config_keys(), "metrics": metrics(), "api": public_names()}
    for name, content in pages.items():
        (REFERENCE / f"{name}.md").write_text(content)


def config_keys() -> str:
    """Return the page of all config keys: a table for each section."""
    lines = [
        "# Config keys",
        "",
        "Every key of a run, as `rlhf_jax/config/schema.py` has it. A config file sets them on what"
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
    """Return the page of what `rlhf_jax` exports, each with its docstring."""
    lines = ["# Python", "", "What `import rlhf_jax` gives."]
    for name in rlhf_jax.__all__:
        module, _, own = rlhf_jax._PLACES[name].partition(":")
        lines += ["", f"## {name}", "", f"::: rlhf_jax.{module}.{own or name}"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return text that may stand in a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main()
