r"""GRPO on Llama-3.1-8B-Instruct with a Llama-3.2-1B-Instruct drafter, on one node of 8 x 80 GB GPUs.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python launch/train.py --config configs/grpo_llama31_8b_gpu.py \
        --config.model.path=PATH --config.drafter.path=PATH --config.data.train=PROMPTS.jsonl \
        --config.reward.function=FILE.py:FUNCTION

Hardware: one node of 8 GPUs of 80 GB (A100 or H100), of which the run may use 76 GB each.
Memory of each device, as predicted and printed by part before weights are loaded:
41.7 GB in generation and 29.4 GB in training.
Expect: the mean reward of the function you give rises while `kl/mean` stays small. The text is what
plain decoding would give; `generation/tokens_per_round`, between 1 and 5, says what the drafter saves.
"""

from rlhf_jax import config as defaults


def get_config():
    """The run's config."""
    config = defaults.default()
    config.workdir = "runs/grpo_llama31_8b"
    config.steps = 200
    config.model.path = "meta-llama/Llama-3.1-8B-Instruct"
    config.drafter.path = "meta-llama/Llama-3.2-1B-Instruct"
    config.data.max_prompt_tokens = 1024
    config.generation.update(
        prompts_per_step=64,
        samples_per_prompt=8,
        max_new_tokens=2048,
        strategy="model-chain-4",
        rows=256,
    )
    config.training.update(
        minibatches=4,
        microbatch_rows=8,
        learning_rate=1e-6,
        warmup_steps=10,
        length_bucket=512,
    )
    config.mesh.update(data=1, fsdp=4, tensor=2, device_memory_gb=76.0)
    return config
