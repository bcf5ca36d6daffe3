r"""GRPO on GSM8K with a verifiable reward, Qwen2.5-0.5B-Instruct on one 80 GB GPU.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python launch/train.py --config configs/grpo_gsm8k.py \
        --config.model.path=PATH --config.data.train=train.jsonl --config.data.eval=test.jsonl

The data are GSM8K's original files (Cobbe et al. 2021), train.jsonl and test.jsonl with "question"
and "answer". The reward is 1 if the last number of the response equals that of the answer, else 0,
so its mean is the accuracy. Predicted memory, which the run prints by part before it loads weights:
12.1 GB in generation and 14.2 GB in training, of a limit of 76 GB. Prompts that all samples solve,
or none, give no signal and are replaced, and the upper clip is wider (both as in DAPO).
"""

from rlhf_jax.config import default


def get_config():
    """The run's config."""
    config = default()
    config.workdir = "runs/grpo_gsm8k"
    config.steps = 500
    config.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
    config.data.prompt_key = "question"
    config.data.system = "Reason step by step, and end with '#### ' and the answer as a number."
    config.data.max_prompt_tokens = 320
    config.reward.functions = ("configs/rewards/arithmetic.py:gsm8k",)
    config.generation.update(
        prompts_per_step=32,
        samples_per_prompt=8,
        resample=2,
        max_new_tokens=512,
        strategy="adaptive",
        history_tokens=2048,
        max_rows=256,
    )
    config.evaluation.update(every=50, temperature=0.0)
    config.kl.coefficient = 0.001
    config.training.update(
        minibatches=4,
        microbatch_rows=32,
        learning_rate=1e-6,
        warmup_steps=10,
        clip_high=0.28,
        drop_overlong=True,
    )
    config.mesh.device_memory_gb = 76.0
    return config
