r"""PPO on Llama-3.1-8B-Instruct with an 8B reward model, an 8B critic and a 1B drafter.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python launch/train.py \
        --config configs/ppo_llama31_8b.py:gpu \
        --config.model.path=PATH --config.drafter.path=PATH --config.data.train=PROMPTS.jsonl \
        --config.reward.models=REWARD_MODEL --config.critic.path=REWARD_MODEL

REWARD_MODEL is a Hugging Face folder of a Llama-3.1-8B sequence classifier with one label. The
hardware, with the predicted memory of each device, which the run prints by part before it loads
weights:

gpu, 8 of 80 GB (A100 or H100), 76 of them used: 42.6 GB in generation and 43.9 GB in training.
tpu, v5p-8, one host with 4 chips of 95 GB: 75.4 GB in generation and 82.6 GB in training.

Expect `reward/mean` to rise while `kl/mean` stays near its target; `critic/explained_variance`
rises above 0 within the first steps.
"""

from rlhf_jax.config import default

HARDWARE = {
    "gpu": {"microbatch_rows": 16, "mesh": {"fsdp": 4, "tensor": 2, "device_memory_gb": 76.0}},
    "tpu": {"microbatch_rows": 8, "mesh": {"fsdp": 2, "tensor": 2, "device_memory_gb": 95.0}},
}


def get_config(hardware: str = "gpu"):
    """The run's config for "gpu" or "tpu"."""
    config = default()
    config.workdir = "runs/ppo_llama31_8b"
    config.steps = 200
    config.model.path = "meta-llama/Llama-3.1-8B-Instruct"
    config.drafter.path = "meta-llama/Llama-3.2-1B-Instruct"
    config.data.max_prompt_tokens = 1024
    config.reward.missing_end = 1.0
    config.reward.clip = 5.0
    config.generation.update(
        prompts_per_step=128,
        samples_per_prompt=1,
        max_new_tokens=1024,
        strategy="adaptive",
        max_rows=128,
    )
    config.algorithm.name = "ppo"
    config.kl.update(place="reward", estimator="k1", coefficient=0.05, target=6.0)
    config.critic.update(learning_rate=5e-6, warmup_steps=10)
    config.training.update(
        epochs=2,
        minibatches=4,
        microbatch_rows=HARDWARE[hardware]["microbatch_rows"],
        warmup_steps=10,
        length_bucket=512,
    )
    config.mesh.update(HARDWARE[hardware]["mesh"])
    return config
