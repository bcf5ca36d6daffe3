"""Estimate the costs of rounds before any is measured, from the shapes of the models alone."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_jax.generation.strategy import cost
from rlhf_jax.generation.strategy.cost import Costs
from rlhf_jax.generation.strategy.roofline import ModelWork
from rlhf_jax.models.flops import pair_flops, product_flops
from rlhf_jax.types import ModelConfig, ModelConfigs


def costs(
    models: ModelConfigs,
    platform: str,
    itemsize: int,
    does: Mapping[str, float],
    rows: int,
    slots: int,
) -> Costs:
    """Return the prior costs of rounds.

    itemsize: bytes of a number of the weights and the cache. does: the compiler's cost analysis of
    a plain round of the policy over `rows` and `slots`, or nothing. It reads and multiplies more
    than the necessary weights and cache; the calls of a draft model are assumed to do more by the
    same factors.
    """
    policy = work(models.policy, itemsize)
    read = policy.weight_bytes + rows * slots * policy.context_bytes
    multiplied = rows * (policy.token_flops + slots * policy.context_flops)
    more_bytes = max(does.get("bytes accessed", 0.0) / read, 1.0)
    more_flops = max(does.get("flops", 0.0) / multiplied, 1.0)

    def scaled(needed: ModelWork) -> ModelWork:
        return ModelWork(
            weight_bytes=needed.weight_bytes * more_bytes,
            context_bytes=needed.context_bytes * more_bytes,
            token_flops=needed.token_flops * more_flops,
            context_flops=needed.context_flops * more_flops,
        )

    drafter = models.drafter and scaled(work(models.drafter, itemsize))
    return cost.prior(platform, scaled(policy), drafter)


def work(model: ModelConfig, itemsize: int) -> ModelWork:
    """Return the necessary work of a call of a model, at `itemsize` bytes per number.

    Every weight but the embedding is read by a call, and multiplied with each token.
    """
    of_layers, _ = product_flops(model)
    weights = of_layers // 2 + model.width * model.vocab_size
    return ModelWork(
        weight_bytes=weights * itemsize,
        context_bytes=2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize,
        token_flops=2 * weights,
        context_flops=pair_flops(model),
    )
