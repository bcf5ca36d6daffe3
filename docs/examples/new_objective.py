"""Add an objective, online DPO: --config.objective=docs/examples/new_objective.py:OnlineDpo"""

import functools

import jax
import jax.numpy as jnp

from rlhf_jax import as_sequences, rlhf
from rlhf_jax.inference.logprobs import token_logprobs
from rlhf_jax.objectives.reward import RewardObjective
from rlhf_jax.state import decoding_models


@jax.jit
@functools.partial(jax.value_and_grad, has_aux=True)
def loss(policy, reference, rows, rewards):  # Rafailov et al. 2023, equation 7
    how = dict(tokens=rows.tokens, mask=rows.mask, temperature=1.0)
    gain = (token_logprobs(policy, **how) - token_logprobs(reference, **how)).sum(axis=1)
    chosen = jnp.stack([jnp.nanargmax(rewards, axis=1), jnp.nanargmin(rewards, axis=1)], axis=1)
    best, worst = jnp.take_along_axis(gain.reshape(rewards.shape), chosen, axis=1).T
    return -jax.nn.log_sigmoid(0.1 * (best - worst)).mean(), gain.mean()


class OnlineDpo(RewardObjective):
    title = staticmethod(lambda config: "online DPO")

    @staticmethod
    def step(state, run, observe):
        how = (run.prompts, run.generation, run.rewards, None, observe)
        rolled = rlhf.roll_out(decoding_models(state.models, run), state, *how)
        rows = as_sequences(rolled.samples, run.generation.decoding.max_length)
        rewards = rolled.rewards.reshape(-1, run.generation.samples_per_prompt)
        policy, reference = state.models["policy"].weights, run.frozen["reference"]
        (value, kl), slope = loss(policy, reference, rows, rewards)
        return rlhf.apply_gradient(state, run, rolled, slope, {"loss/policy": value, "kl/mean": kl})
