"""GRPO and related algorithms: a policy learns from rewards, by advantages and a clipped ratio."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.config.algorithms import Algorithm, algorithm_of, option
from rlhf_jax.config.checks import (
    require,
    require_not_negative,
    require_one_of,
    require_positive,
    require_share,
)
from rlhf_jax.config.schema import Config
from rlhf_jax.losses.advantages import ESTIMATORS, Estimator, EstimatorConfig
from rlhf_jax.losses.kl import KL, bounded, kl_k1, kl_k3
from rlhf_jax.losses.policy import LOSSES, LossTerms
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.training.experience import AdvantageConfig, compute_advantages
from rlhf_jax.training.kinds import Metrics, Share, TokenLoss, TokenTerms
from rlhf_jax.types import Array


@dataclasses.dataclass(frozen=True)
class GRPOOptions:
    """Hold the options of the advantages and of the policy's loss."""

    estimator: str = option(
        "",
        "of advantages: grpo, dr_grpo, rloo, reinforce++, reinforce++-baseline, gae, or"
        " FILE.py:NAME; '' for the algorithm's own: grpo, or gae of ppo",
    )
    discount: float = option(1.0, "of later rewards, for gae and reinforce++", require_share)
    gae_lambda: float = option(0.95, "how far gae looks past the critic", require_share)
    deviation: str = option(
        "sample",
        "of a group's rewards, which grpo divides by: 'sample', over n - 1, or 'population', over"
        " n",
        lambda config, key: require_one_of(config, key, ("sample", "population")),
    )
    loss: str = option(
        "ppo",
        "of the policy, token by token: ppo, dual_clip, gspo, cispo, reinforce, or FILE.py:NAME",
        lambda config, key: LOSSES.require(config.algorithm.loss),
    )
    drop_ratio: float = option(
        0.0,
        "share of a step's prompts that are not trained on: those whose samples were drawn with the"
        " most certainty, as 0.3 (ESRL)",
        lambda config, key: require(
            0 <= config.algorithm.drop_ratio < 1,
            f"{key} is {config.algorithm.drop_ratio}; it must lie in 0 .. 1, below 1.",
        ),
    )


def policy_gradient(terms: TokenTerms) -> Share:
    """Compute the policy's loss + KL penalty - entropy bonus of each token [S, W], and metrics.

    `options.loss` selects the policy's loss. The penalty is kl_weight * kl_estimator(policy,
    reference), the bonus entropy_coefficient * entropy. Without old log-probs in the batch, the
    current ones are used. `kl/mean` is to the reference, `kl/old` is KL(old || now), both in nats
    by k3; `reference/nats` is the reference's mean negative log-prob of a token.
    """
    batch = terms.batch
    settings = terms.settings
    mask = batch.mask
    now = terms.scores
    scored = terms.column("logprobs")
    old = jax.lax.stop_gradient(now) if scored is None else scored
    reference = terms.column("reference_logprobs")
    reference = old if reference is None else reference
    terms_of_loss = LossTerms(
        now,
        old,
        batch.columns["advantages"],
        mask,
        batch.segment_ids,
        batch.groups.shape[1],
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    options = GRPOOptions() if settings.options is None else settings.options
    losses = jnp.where(mask, LOSSES[options.loss](terms_of_loss), 0.0)
    ratios = terms_of_loss.ratios
    outside = (ratios < 1.0 - settings.clip_low) | (ratios > 1.0 + settings.clip_high)
    means = {
        "loss/policy": losses,
        "kl/mean": kl_k3(now, reference),
        "kl/old": kl_k3(old, now),
        "ratio/mean": ratios,
        "ratio/clipped": outside.astype(jnp.float32),
        "entropy/estimate": -now,
    }
    if terms.entropy is not None:
        means["entropy/mean"] = terms.entropy
    if terms.column("reference_logprobs") is not None:
        means["reference/nats"] = -reference
    metrics = {name: terms.mean(x) for name, x in means.items()}
    metrics["ratio/max"] = jnp.where(mask, ratios, 0.0).max()
    if scored is None:
        metrics |= _measured_by_inference(terms, reference)

    if "kl_weight" in batch.columns:
        losses += batch.columns["kl_weight"] * settings.kl_estimator(now, reference)
    if terms.entropy is not None:
        losses -= settings.entropy_coefficient * jnp.where(mask, terms.entropy, 0.0)
    return losses, metrics


def _measured_by_inference(terms: TokenTerms, reference: Array) -> Metrics:
    """Measure KL and mismatch in the update if inference did not score the policy.

    `kl/response` is the KL of a sample to the reference by k1, and `mismatch/...` as of
    `inference.logprobs.mismatch`: both in nats.
    """
    batch = terms.batch
    apart = jnp.where(batch.mask, terms.scores - batch.columns["sampled_logprobs"], 0.0)
    of_response = jnp.sum(kl_k1(terms.scores, reference)) / batch.columns["total_sequences"]
    return {
        "kl/response": of_response,
        "mismatch/kl": terms.mean(jnp.expm1(bounded(apart)) - apart),
        "mismatch/mean": terms.mean(jnp.abs(apart)),
        "mismatch/max": jnp.max(jnp.abs(apart)),
    }


def advantages(batch: Sequences, config: Config) -> tuple[Sequences, dict[str, float]]:
    """Return scored samples with advantages; tokens that are not trained on are masked out.

    With scored log-probs, the metric is the KL of a response to the reference, in nats. A KL
    penalty in the reward leaves none for the loss.
    """
    metrics = {}
    columns = batch.columns
    settings = advantage_config(config)
    mask, estimated, returns, kl = jax.device_get(
        compute_advantages(
            columns["rewards"],
            columns["ended"],
            batch.mask,
            columns.get("logprobs"),
            columns.get("reference_logprobs"),
            columns.get("values"),
            kl_coefficient=columns["kl_weight"],
            config=settings,
        )
    )
    added: dict[str, Any] = {"advantages": estimated}
    if returns is not None:
        added["returns"] = returns
    if settings.kl_in_reward:
        added["kl_weight"] = np.zeros((), np.float32)
    metrics |= {} if kl is None else {"kl/response": float(kl)}
    return dataclasses.replace(batch, mask=mask).with_columns(**added), metrics


def without_confident(batch: Sequences, config: Config) -> tuple[Sequences, dict[str, float]]:
    """Mask out the samples of the prompts that the policy is most certain of, and measure that.

    With `drop_ratio` 0 all prompts are trained on, and nothing is measured.

    ESRL (Wang et al. 2024) drops prompts by the mean of the largest probability of each step. Here
    it is the probability of the token that was drawn, which generation has in any case: our design.
    """
    if not config.algorithm.drop_ratio:
        return batch, {}
    drawn = np.asarray(batch.columns["sampled_logprobs"])
    mask = np.asarray(batch.mask)
    certainty = np.where(mask, np.exp(drawn), 0.0).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
    count = config.generation.samples_per_prompt
    shape = (len(mask) // count, count)
    # Dynamic sampling draws fewer samples of some prompts.
    drawn_of = np.maximum(mask.any(axis=1).reshape(shape).sum(axis=1), 1)
    by_prompt = certainty.reshape(shape).sum(axis=1) / drawn_of
    dropped = math.floor(config.algorithm.drop_ratio * len(by_prompt) + 1e-9)
    kept = np.ones(len(by_prompt), bool)
    kept[np.argsort(-by_prompt, kind="stable")[:dropped]] = False
    mask = mask & np.repeat(kept, count)[:, None]
    return dataclasses.replace(batch, mask=mask), {
        "confidence/mean": float(by_prompt.mean()),
        "confidence/kept": float(by_prompt[kept].mean()) if kept.any() else 0.0,
    }


def scores(config: Config) -> tuple[str, ...]:
    """Return the roles that score: the reference if KL is measured, and the policy if needed.

    The policy's scores come from the update's own forward pass if it takes one step on on-policy
    samples and no advantage reads the KL to the reference.
    """
    training = config.training
    priced = config.kl.coefficient > 0
    one_step = training.epochs * training.minibatches == 1 and not training.lag
    reads = not one_step or (priced and config.kl.place == "reward")
    return ("policy",) * reads + ("reference",) * priced


def estimator_of(config: Config) -> Estimator:
    """Return the estimator of advantages from the config, or the algorithm's default."""
    default = "gae" if "critic" in algorithm_of(config).losses else "grpo"
    return ESTIMATORS[config.algorithm.estimator or default]


def advantage_config(config: Config) -> AdvantageConfig:
    """Return the configuration of the advantages."""
    options = config.algorithm
    return AdvantageConfig(
        estimator=options.estimator or estimator_of(config).name,
        estimation=EstimatorConfig(
            config.generation.samples_per_prompt,
            options.deviation,
            options.discount,
            options.gae_lambda,
        ),
        kl_estimator=config.kl.estimator,
        kl_in_reward=config.kl.place == "reward",
        whiten=config.reward.whiten,
        drop_overlong=config.training.drop_overlong,
    )


def aggregate(config: Config) -> str:
    """Name how losses are summed: as the loss defines it, else as the estimator does."""
    by_loss = getattr(LOSSES[config.algorithm.loss], "aggregate", "")
    return by_loss or estimator_of(config).aggregate or "token_mean"


def check(config: Config) -> None:
    """Check that the estimator has the samples and the critic it needs, and the KL options."""
    ESTIMATORS.require(config.algorithm.estimator or "grpo")
    estimator = estimator_of(config)
    has_critic = "critic" in algorithm_of(config).losses
    group = config.generation.samples_per_prompt
    require(
        group > 1 or not estimator.compares_group,
        f"generation.samples_per_prompt is {group}; {estimator.name} compares two or more of a"
        " prompt.",
    )
    require(
        has_critic or not estimator.needs_critic,
        f"algorithm.estimator {estimator.name!r} reads a critic's values, and algorithm"
        f" {config.algorithm.name!r} trains none; choose algorithm 'ppo'.",
    )
    require(
        estimator.needs_critic or not has_critic,
        f"algorithm {config.algorithm.name!r} trains a critic, and algorithm.estimator"
        f" {estimator.name!r} does not read it; choose algorithm 'grpo'.",
    )
    _check_kl(config)


def _check_kl(config: Config) -> None:
    """Check the estimator and the place of the KL penalty, and the speed of its adaptation."""
    require_one_of(config, "kl.place", ("loss", "reward"))
    require_one_of(config, "kl.estimator", tuple(KL))
    require_not_negative(config, "kl.coefficient", "kl.target")
    require_positive(config, "kl.horizon")
    require(
        config.kl.estimator != "k1" or config.kl.place == "reward",
        "kl.estimator is 'k1' and kl.place 'loss', where its gradient has mean zero; use k2 or"
        " k3, or place 'reward'.",
    )
    samples = config.generation.prompts_per_step * config.generation.samples_per_prompt
    require(
        config.kl.horizon >= samples,
        f"kl.horizon is {config.kl.horizon}, less than the {samples} samples of a step: the"
        " coefficient could jump or turn negative; raise it.",
    )
    require(
        config.kl.coefficient > 0 or not config.kl.target,
        f"kl.target is {config.kl.target}, but kl.coefficient is 0 and would stay there; give a"
        " start above 0.",
    )


def title(config: Config) -> str:
    """Return the title of the algorithm, by its estimator: "GRPO"."""
    estimator = estimator_of(config)
    return estimator.title or estimator.name


POLICY_LOSS = TokenLoss(
    policy_gradient,
    reads=(
        "logprobs",
        "reference_logprobs",
        "sampled_logprobs",
        "advantages",
        "kl_weight",
        "temperatures",
        "top_k_ids",
    ),
)
GRPO = Algorithm(
    title=title,
    losses={"policy": POLICY_LOSS},
    scores=scores,
    choose=without_confident,
    prepare=advantages,
    options=GRPOOptions,
    check=check,
    aggregate=aggregate,
)
