"""Train in your own loop, with the stages as functions: python launch/own_loop.py MODEL [STEPS]

The reward is for short answers. The loop has no config, metrics or evaluation, unlike `train.py`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import rlhf_jax as rl

QUESTIONS = ("What is a lighthouse?", "Name a colour.")
GROUP = 4
NEW = 24


def main(model: str, steps: int) -> None:
    source = rl.open_source(model)
    encode = source.tokenizer.encode_chat
    prompts = [np.array(encode([{"role": "user", "content": q}]), np.int32) for q in QUESTIONS]
    slots = max(map(len, prompts)) + NEW
    strategies = (rl.parse_strategy("lookup-chain-2"),)
    decoding = rl.GenerationConfig(
        rl.Sampling(1.0), strategies, source.stop_tokens, max_rows=8, max_length=slots, seed=0
    )
    training = rl.TrainingSettings(microbatch_rows=GROUP)
    policy = rl.Learner("policy", rl.POLICY_LOSS, rl.make_optimizer(1e-5), training)
    reference = source.load(jnp.float32)
    models = {"policy": rl.trained(source.load(jnp.float32), policy.optimizer)}
    for step in range(steps):
        ids = np.arange(len(prompts) * GROUP).reshape(-1, GROUP) + step * len(prompts) * GROUP
        wanted = [rl.Request(p, tuple(map(int, i)), NEW) for p, i in zip(prompts, ids, strict=True)]
        weights = jax.jit(rl.unstack)(models["policy"].weights)
        samples = rl.generate(weights, None, wanted, decoding)
        batch = rl.as_sequences(sorted(samples, key=lambda sample: sample.sample_id), slots)
        rewards = -batch.mask.sum(1).astype(np.float32)
        batch = batch.with_columns(
            reference_logprobs=rl.score_sequences(reference, batch, rows=GROUP),
            advantages=jnp.where(batch.mask, rl.grpo(jnp.asarray(rewards), GROUP)[:, None], 0.0),
            kl_weight=jnp.float32(0.04),
        )
        models, metrics = rl.learn(models, batch, {"policy": policy}, step=step)
        print(f"step {step}: {-rewards.mean():.1f} tokens an answer, kl {metrics['kl/mean']:.4f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
