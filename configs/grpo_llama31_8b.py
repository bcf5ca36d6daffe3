r"""GRPO on Llama-3.1-8B-Instruct with a Llama-3.2-1B-Instruct drafter, on 8 GPUs or a v5p-8 slice.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python launch/train.py \
        --config configs/grpo_llama31_8b.py:gpu \
        --config.model.path=PATH --config.drafter.path=PATH --config.data.train=PROMPTS.jsonl \
        --config.reward.functions=FILE.py:FUNCTION

The hardware, with the predicted memory of each device, which the run prints by part before it loads
weights:

gpu, 8 of 80 GB (A100 or H100), 76 of them used: 41.4 GB in generation and 28.7 GB in training.
tpu, v5p-8, one host with 4 chips of 95 GB: 54.8 GB in generation and 52.4 GB in training.

Expect the mean reward to rise while `kl/mean` stays small. The text equals that of plain decoding;
`generation/tokens_per_round`, between 1 and 5, shows the gain of the drafter.
"""

from rlhf_jax.config import default

HARDWARE = {
    "gpu": {"rows": 256, "mesh": {"fsdp": 4, "tensor": 2, "device_memory_gb": 76.0}},
    "tpu": {"rows": 128, "mesh": {"fsdp": 2, "tensor": 2, "device_memory_gb": 95.0}},
}


def get_config(hardware: str = "gpu"):
    """The run's config for "gpu" or "tpu"."""
    config = default()
    config.workdir = "runs/grpo_llama31_8b"
    config.steps = 200
    config.model.path = "meta-llama/Llama-3.1-8B-Instruct"
    config.drafter.path = "meta-llama/Llama-3.2-1B-Instruct"
    config.data.max_prompt_tokens = 1024
    config.generation.update(
        prompts_per_step=64,
        samples_per_prompt=8,
        max_new_tokens=2048,
        strategy="adaptive",
        max_rows=HARDWARE[hardware]["rows"],
    )
    config.training.update(minibatches=4, warmup_steps=10)
    config.mesh.update(HARDWARE[hardware]["mesh"])
    return config
