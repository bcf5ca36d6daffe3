"""Be a process of a run that says on stderr, after each step, which programs it has compiled.

python tests/support/counted_ranks.py PORT RANK RANKS [the words of launch/train.py]
"""

from __future__ import annotations

import json
import sys

import jax

from rlhf_jax import iteration
from rlhf_jax.command.train import main
from rlhf_jax.monitoring.phases import COMPILATION

port, rank, ranks, *words = sys.argv[1:]
compiled: list[str] = []
step = iteration.step


def listen(event: str, duration_secs: float, **told: str | int) -> None:
    """Hear of a program."""
    if event == COMPILATION:
        compiled.append(str(told.get("fun_name")))


def counted(*inputs, **options):
    """Take a step, and say which programs it has compiled."""
    out = step(*inputs, **options)
    print(f"compiled {json.dumps(compiled)}", file=sys.stderr, flush=True)
    compiled.clear()
    return out


jax.monitoring.register_event_duration_secs_listener(listen)
iteration.step = counted
place = ["--coordinator", f"localhost:{port}", "--processes", ranks, "--process", rank]
sys.exit(main([sys.argv[0], *place, *words]))
