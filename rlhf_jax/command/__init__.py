"""The console command `rlhf-jax`: one module for each subcommand, imported on use."""

from __future__ import annotations

import difflib
import importlib
import sys

# By name: its description, and whether it takes seconds to start.
COMMANDS = {
    "train": ("do the run that a config describes, or go on with it", True),
    "workflow": ("do several runs, each on what those before it left", False),
    "plan": ("print what a run needs on devices that need not be here", True),
    "report": ("write the report of a run as one HTML file", False),
    "compare": ("compare runs: configs, texts, curves", False),
    "chat": ("talk with a trained policy", True),
    "export": ("write the policy of a checkpoint as a Hugging Face folder", True),
    "strategy": ("print which drafting strategy a run would choose, and why", True),
    "config": ("print the keys of a config, with defaults and comments", False),
    "version": ("print the versions that a bug report needs", True),
}


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand that the first word names; return its exit code.

    A mistake of the user (ValueError or OSError) becomes one sentence on stderr.
    """
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    name, *rest = words
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        print(f"error: there is no command {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    slow = COMMANDS[name][1] and "--help" not in rest
    if slow and sys.stderr.isatty():
        print(f"rlhf-jax {name}: loading JAX ...", file=sys.stderr, flush=True)
    module = importlib.import_module(f"rlhf_jax.command.{name}")
    try:
        return module.main([f"rlhf-jax {name}", *rest])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def usage() -> str:
    """Return the help of the command."""
    lines = [f"  {name:10}{words}" for name, (words, _) in COMMANDS.items()]
    return "\n".join(
        ["usage: rlhf-jax COMMAND ...", "", *lines, "", "COMMAND --help shows its options."]
    )
