"""Online preference learning beside GRPO and PPO, from one SFT model and one reward model.

    pip install -e '.[workflow]' && rlhf-jax workflow configs/online.py

`sft` and `reward_model` are those of configs/workflow.py. The other stages go on from `sft` by the
rewards of `reward_model` with as many trained samples and updates each: `online_dpo` in three
iterations (Dong et al. 2024, RLHF Workflow), with pairs within a temperature, and in
`across_temperatures` over all; `grpo`; and `ppo`, whose critic begins as the policy's trunk.
"""

import os

from rlhf_jax.config import default
from rlhf_jax.runtime.extensions import load_named

STAGES = ("sft", "reward_model", "online_dpo", "across_temperatures", "grpo", "ppo")
WORKFLOW = "configs/workflow.py"


def get_config(workdir):
    root, stage = os.path.split(workdir)
    config = load_named(f"{WORKFLOW}:get_config", "The workflow")(
        f"{root}/{stage if stage in ('sft', 'reward_model') else 'grpo'}"
    )
    config.workdir = workdir
    {"ppo": ppo, "online_dpo": online_dpo, "across_temperatures": across_temperatures}.get(
        stage, lambda _: None
    )(config)
    return config


def online_dpo(config):
    config.algorithm = default("online_dpo").algorithm
    config.algorithm.temperatures = (1.0, 0.7)
    config.steps = 3
    config.generation.update(prompts_per_step=32, samples_per_prompt=8, temperature=1.0)
    config.training.update(minibatches=4, learning_rate=3e-5)
    config.evaluation.every = config.steps
    config.checkpoint.every = 1


def across_temperatures(config):
    online_dpo(config)
    config.algorithm.across_temperatures = True
    config.generation.prompts_per_step = 64  # one pair of a prompt in place of two


def ppo(config):
    config.algorithm = default("ppo").algorithm
    config.critic.learning_rate = 5e-5
    config.kl.update(place="reward", estimator="k1")
