"""rlhf_jax as a worker of step.py. Usage: rlhf_jax_step.py SETTINGS.json

Everything but the sizes is as `rlhf_jax.config.default` has it.
"""

import json
import sys
from pathlib import Path

from turns import Turns

from rlhf_jax import iteration, trainer
from rlhf_jax.config import default

asked = json.loads(Path(sys.argv[1]).read_text())
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
    """Take a step, each of which is asked for."""
    turns.begin()
    state, report = step(state, run, observe)
    turns.note(**{name: report.metrics[name] for name in KEPT if name in report.metrics})
    given = 2 * asked["prompts_per_step"] * asked["new_tokens"]
    turns.note(tokens=report.metrics.get("generation/tokens", given))
    return state, report


iteration.step = timed
config = default()
config.workdir = str(Path(sys.argv[1]).parent / "rlhf_jax")
config.steps = 1000
config.model.path = asked["model"]
config.data.train = asked["prompts"]
config.data.max_prompt_tokens = asked["prompt_tokens"]
if asked["algorithm"] == "dpo":
    config.algorithm.name = "dpo"
    config.data.update(
        raw=True, rows_per_step=asked["prompts_per_step"], max_response_tokens=asked["new_tokens"]
    )
else:
    config.reward.functions = (f"{asked['reward']}:vowels",)
    config.reward.workers = 1
config.generation.prompts_per_step = asked["prompts_per_step"]
config.generation.samples_per_prompt = asked["samples"]
config.generation.max_new_tokens = asked["new_tokens"]
config.evaluation.every = 0
config.checkpoint.every = 0
config.training.learning_rate = asked["learning_rate"]
if asked["whole"]:
    config.training.microbatch_rows = asked["prompts_per_step"] * asked["samples"]
if asked["algorithm"] != "dpo":
    config.kl.coefficient = asked["kl"]
if asked["algorithm"] == "ppo":
    config.algorithm.name = "ppo"
    config.kl.update(place="reward", estimator="k1")
trainer.train(config)
