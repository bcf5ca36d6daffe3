"""rlhf_jax as a worker of step.py. Usage: rlhf_jax_step.py SETTINGS.json

Everything but the sizes is as `rlhf_jax.config.default` has it.
"""

import json
import sys
from pathlib import Path

from protocol import Turns

from rlhf_jax import iteration, trainer
from rlhf_jax.config import default

options = json.loads(Path(sys.argv[1]).read_text())
turns = Turns(("jax", "jaxlib"))


step = iteration.step
KEPT = (
    "generation/seconds",
    "inference/seconds",
    "training/seconds",
    "generation/tokens_per_round",
    "training/padding",
    "training/padding_flops",
)


def timed(state, run, observe):
    """Take a step on request."""
    turns.begin()
    state, report = step(state, run, observe)
    turns.note(**{name: report.metrics[name] for name in KEPT if name in report.metrics})
    given = 2 * options["prompts_per_step"] * options["new_tokens"]
    turns.note(tokens=report.metrics.get("generation/tokens", given))
    return state, report


iteration.step = timed
config = default()
config.workdir = str(Path(sys.argv[1]).parent / "rlhf_jax")
config.steps = 1000
config.model.path = options["model"]
config.data.train = options["prompts"]
config.data.max_prompt_tokens = options["prompt_tokens"]
if options["algorithm"] == "dpo":
    config.algorithm.name = "dpo"
    config.data.update(
        raw=True,
        rows_per_step=options["prompts_per_step"],
        max_response_tokens=options["new_tokens"],
    )
else:
    config.reward.functions = (f"{options['reward']}:vowels",)
    config.reward.workers = 1
config.generation.prompts_per_step = options["prompts_per_step"]
config.generation.samples_per_prompt = options["samples"]
config.generation.max_new_tokens = options["new_tokens"]
config.evaluation.every = 0
config.checkpoint.every = 0
config.training.learning_rate = options["learning_rate"]
if options["whole"]:
    config.training.microbatch_rows = options["prompts_per_step"] * options["samples"]
if options["algorithm"] != "dpo":
    config.kl.coefficient = options["kl"]
if options["algorithm"] == "ppo":
    config.algorithm.name = "ppo"
    config.kl.update(place="reward", estimator="k1")
trainer.train(config)
