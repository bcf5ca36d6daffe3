"""Kind sentences with sentiment as the only reward: an example of reward hacking.

    pip install -e ".[quickstart]" && python launch/train.py --config configs/quickstart_hacked.py

The reward rises from 0.62 to 0.97, and the policy gets worse: few answers name the thing in the
question (7 % instead of 72 %), most are cut off, and many begin alike. The report warns of this
before it shows any curve.
"""

from pathlib import Path

from rlhf_jax.config.command_line import load


def get_config():
    """The config of kind sentences, with one reward term and a smaller KL penalty."""
    config = load(str(Path(__file__).with_name("kind_sentences.py")))
    config.workdir = "runs/quickstart_hacked"
    config.steps = 18
    config.reward.functions = ("configs/rewards/sentiment.py:vader",)
    config.reward.weights = ()
    config.generation.update(prompts_per_step=6, max_new_tokens=20, max_rows=24, min_rows=12)
    config.evaluation.every = 18
    config.checkpoint.every = 18
    config.kl.coefficient = 0.017
    config.training.update(learning_rate=5e-5, schedule="constant", microbatch_rows=24)
    return config
