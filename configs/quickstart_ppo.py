"""The quickstart's task with PPO: SmolLM2-135M-Instruct and a critic, on two CPU cores.

    python launch/train.py --config configs/quickstart_ppo.py

The critic starts from the policy's trunk; the KL penalty is subtracted from the reward per token.
After five minutes 38 of the 45 held-out answers are exactly right (2 before training). The learning
rate is lower than the quickstart's: there, with two optimizer steps per update, the reward fell
from 0.89 to 0.25.
"""

from pathlib import Path

from rlhf_jax.config.command_line import load


def get_config():
    """The quickstart's config with PPO instead of GRPO."""
    config = load(str(Path(__file__).with_name("quickstart.py")))
    config.workdir = "runs/quickstart_ppo"
    config.algorithm.update(name="ppo", gae_lambda=1.0)
    config.kl.update(place="reward", estimator="k1")
    config.critic.learning_rate = 1e-4
    config.training.update(minibatches=2, learning_rate=4e-5)
    return config
