"""rlhf_jax as a worker of step.py. Usage: rlhf_jax_step.py SETTINGS.json

Everything but the sizes is as `rlhf_jax.config.default` has it; samples are decoded plainly.
"""

import json
import sys
from pathlib import Path

from turns import Turns

from rlhf_jax import rlhf, trainer
from rlhf_jax.config import default, objectives
from rlhf_jax.objectives.reward import RewardObjective

asked = json.loads(Path(sys.argv[1]).read_text())
turns = Turns(("jax", "jaxlib"))


class Timed(RewardObjective):
    """The objective 'reward', each step of which is asked for."""

    def step(self, state, run, observe):
        turns.begin()
        state, report = rlhf.step(state, run, observe)
        kept = ("generation/seconds", "inference/seconds", "training/seconds", "generation/tokens")
        turns.note(**{name: report.metrics[name] for name in kept})
        return state, report


objectives.register("timed", Timed())
config = default()
config.objective = "timed"
config.workdir = str(Path(sys.argv[1]).parent / "rlhf_jax")
config.steps = 1000
config.model.path = asked["model"]
config.data.train = asked["prompts"]
config.data.max_prompt_tokens = asked["prompt_tokens"]
config.reward.functions = (f"{asked['reward']}:vowels",)
config.reward.workers = 1
config.generation.prompts_per_step = asked["prompts_per_step"]
config.generation.samples_per_prompt = asked["samples"]
config.generation.max_new_tokens = asked["new_tokens"]
config.generation.max_rows = asked["prompts_per_step"] * asked["samples"]
config.generation.strategy = "plain"
config.evaluation.every = 0
config.checkpoint.every = 0
config.training.learning_rate = asked["learning_rate"]
config.training.microbatch_rows = asked["prompts_per_step"] * asked["samples"]
config.training.length_bucket = asked["length_bucket"]
config.kl.coefficient = asked["kl"]
if asked["algorithm"] == "ppo":
    config.advantage.estimator = "gae"
    config.kl.update(place="reward", estimator="k1")
trainer.train(config)
