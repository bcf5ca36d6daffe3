r"""GRPO on Llama-3.2-1B-Instruct, on one 80 GB GPU.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python launch/train.py \
        --config configs/grpo_llama32_1b.py \
        --config.model.path=PATH --config.data.train=PROMPTS.jsonl \
        --config.reward.functions=FILE.py:FUNCTION

The hardware is one GPU of 80 GB (A100 or H100), with a limit of 76 GB. Predicted memory, which the
run prints by part before it loads weights: 33.9 GB in generation and 31.9 GB in training.

Expect the mean reward to rise while `kl/mean` stays small. Drafts are looked up in the sample
itself and in earlier rollouts of its prompt, so `generation/tokens_per_round` rises when prompts
repeat.
"""

from rlhf_jax.config import default


def get_config():
    """The run's config."""
    config = default()
    config.workdir = "runs/grpo_llama32_1b"
    config.steps = 200
    config.model.path = "meta-llama/Llama-3.2-1B-Instruct"
    config.data.max_prompt_tokens = 512
    config.generation.update(
        prompts_per_step=32,
        samples_per_prompt=8,
        max_new_tokens=1024,
        strategy="adaptive",
        history_tokens=2048,
        max_rows=256,
    )
    config.training.update(minibatches=4, microbatch_rows=8, learning_rate=1e-6, warmup_steps=10)
    config.mesh.device_memory_gb = 76.0
    return config
