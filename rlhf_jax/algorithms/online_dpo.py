"""Online iterative DPO: pairs of the policy's own answers, ranked by their rewards.

(Dong et al. 2024, RLHF Workflow, algorithm 2.)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms import dpo
from rlhf_jax.config.algorithms import Algorithm, option
from rlhf_jax.config.checks import require, require_not_negative, require_one_of
from rlhf_jax.config.schema import Config
from rlhf_jax.losses.kl import kl_k3
from rlhf_jax.losses.preference import WITHOUT_REFERENCE
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.sequences.columns import declaration
from rlhf_jax.sequences.ragged import joined, padded, ragged
from rlhf_jax.training.kinds import GroupLoss, GroupTerms, Share
from rlhf_jax.types import Memory

CHOICES = ("best_and_worst", "best_and_second", "random")
REFERENCES = ("sft", "previous")
HISTORIES = ("current", "all")
READS = ("reference_logprobs", "preference", "top_k_ids")


@dataclasses.dataclass(frozen=True)
class OnlineDPOOptions(dpo.DPOOptions):
    """Hold how answers are drawn and paired, beside what is made of a pair."""

    pair: str = option(
        "best_and_worst",
        "of the answers to a prompt: " + ", ".join(CHOICES),
        lambda config, key: require_one_of(config, key, CHOICES),
    )
    temperatures: tuple[float, ...] = option(
        (), "of a prompt's samples in equal parts, as (1.0, 0.7); () for generation.temperature"
    )
    across_temperatures: bool = option(
        False,
        "pair answers of different temperatures, too; such pairs teach to be cooler and shorter",
    )
    length_penalty: float = option(
        0.0, "subtracted from an answer's rank for each of its tokens", require_not_negative
    )
    history: str = option(
        "current",
        "pairs that a step trains on: 'current', its own, or 'all' since the run began, which"
        " checkpoints keep",
        lambda config, key: require_one_of(config, key, HISTORIES),
    )
    reference: str = option(
        "sft",
        "of gains: 'sft', the model that the run began with, or 'previous', the policy before the"
        " step",
        lambda config, key: require_one_of(config, key, REFERENCES),
    )


def preferred(terms: GroupTerms) -> Share:
    """Compute DPO's loss of each pair [S, R], and metrics.

    `kl/mean` is the KL to the reference over the tokens of the pairs, in nats a token by k3. These
    are the policy's own, but chosen by rank and drawn at their own temperatures: an estimate.
    """
    losses, metrics = dpo.preferred(terms)
    reference = terms.column("reference_logprobs")
    if reference is not None:
        kl, tokens = (
            terms.per_group(terms.per_sequence(x))
            for x in (kl_k3(terms.scores, reference), jnp.ones_like(reference))
        )
        metrics["kl/mean"] = terms.mean(kl / jnp.maximum(tokens, 1.0))
    return losses, metrics


def ranked_pairs(batch: Sequences, config: Config) -> tuple[Sequences, dict[str, float]]:
    """Return the samples of pairs, marked by `preference`; a pair is a group of its own.

    Equal answers make none, nor do answers of equal rank, nor does one without a reward.
    """
    options = config.algorithm
    # answers among which a pair is chosen: those of a prompt, or of a prompt and temperature
    size = config.generation.samples_per_prompt
    if not options.across_temperatures:
        size //= len(options.temperatures) or 1
    mask = np.asarray(batch.mask)
    ranks = np.asarray(batch.columns["rewards"]) - options.length_penalty * mask.sum(axis=1)
    random = np.random.default_rng((config.seed, int(batch.columns["sample_ids"][0])))
    pairs = np.array([*_pairs(ranks.reshape(-1, size), options.pair, random)], int).reshape(-1, 2)
    # A model's rewards of one text may differ by rounding, if it reads them in different batches.
    chosen, rejected = np.where(mask, np.asarray(batch.tokens), -1)[pairs.T]
    pairs = pairs[(chosen != rejected).any(axis=1)]
    paired = batch.select(pairs.reshape(-1), multiple=2 * config.training.minibatches)
    signs = np.tile(np.array([1.0, -1.0], np.float32), len(paired.group) // 2)
    group = np.arange(len(signs), dtype=np.int32) // 2
    columns = dict(paired.columns)
    if "temperatures" in columns:  # the loss reads log-probabilities at 1, so models score there
        del columns["temperatures"], columns["sampled_logprobs"]
    return dataclasses.replace(paired, group=group, columns=columns).with_columns(
        preference=np.where(paired.mask.any(axis=1), signs, np.float32(0.0))
    ), _measured(batch, pairs, config)


def chosen(config: Config) -> tuple[int, int]:
    """Return the most pairs of a prompt, and 2."""
    options = config.algorithm
    return 1 if options.across_temperatures else len(options.temperatures) or 1, 2


def gains_from(batch: Sequences, config: Config) -> tuple[Sequences, dict[str, float]]:
    """Return scored pairs with `reference_logprobs`, which may be those of the policy."""
    del config
    columns = dict(batch.columns)
    columns.pop("sampled_logprobs", None)  # at other temperatures than the loss reads
    if "logprobs" in columns:  # of the policy before the step
        columns["reference_logprobs"] = columns.pop("logprobs")
    return dataclasses.replace(batch, columns=columns), {}


def with_earlier_pairs(
    batch: Sequences, memory: Memory, config: Config
) -> tuple[Sequences, Memory]:
    """Return the pairs of all steps so far, with the log-probs that their gains are measured from.

    The memory is these pairs.
    """
    if config.algorithm.history == "current":
        return batch, {}
    own = batch.reading(*READS)
    pairs = own.take(np.flatnonzero(own.mask.any(axis=1)))
    if memory:
        pairs = joined(padded(memory, length=0), pairs)
    if not len(pairs.group):  # so far no step had one
        return batch, memory
    multiple = 2 * config.training.minibatches
    filled = pairs.select(np.arange(len(pairs.group)), multiple)
    group = np.arange(len(filled.group), dtype=np.int32) // 2
    whole = {name: one for name, one in batch.columns.items() if declaration(name).per == "batch"}
    return dataclasses.replace(filled, group=group).with_columns(**whole), ragged(pairs)


def _measured(batch: Sequences, pairs: np.ndarray, config: Config) -> dict[str, float]:
    """Count pairs [N, 2] of chosen and rejected samples, and compare their sides."""
    metrics = {"preference/pairs": float(len(pairs))}
    count = config.generation.samples_per_prompt
    of_prompt = temperatures(config) or (config.generation.temperature,) * count
    drawn_at = np.tile(of_prompt, len(batch.mask) // count)
    if "temperatures" in batch.columns:
        drawn_at = np.asarray(batch.columns["temperatures"])[:, 0]
    numbers = {
        "tokens": np.asarray(batch.mask).sum(axis=1),
        "temperature": drawn_at,
        "reward": np.asarray(batch.columns["rewards"]),
    }
    for name, values in numbers.items():
        if len(pairs):
            chosen, rejected = values[pairs].mean(axis=0)
            metrics |= {f"chosen/{name}": float(chosen), f"rejected/{name}": float(rejected)}
    return metrics


def _pairs(
    ranks: np.ndarray, choice: str, random: np.random.Generator
) -> Iterator[tuple[int, int]]:
    """Yield the places of the chosen and the rejected answer of each row of ranks [G, n]."""
    for first, row in zip(itertools.count(0, ranks.shape[1]), ranks, strict=False):
        known = np.flatnonzero(~np.isnan(row))
        order = known[np.argsort(-row[known], kind="stable")]
        if choice == "random":
            order = order[np.sort(random.permutation(len(order))[:2])]
        if len(order) > 1:
            worst = order[1] if choice == "best_and_second" else order[-1]
            if row[order[0]] > row[worst]:
                yield first + int(order[0]), first + int(worst)


def temperatures(config: Config) -> tuple[float, ...]:
    """Return the temperature of each sample of a prompt; none where all have the config's."""
    own = tuple(map(float, config.algorithm.temperatures))
    share = config.generation.samples_per_prompt // (len(own) or 1)
    return tuple(warm for warm in own for _ in range(share))


def scores(config: Config) -> tuple[str, ...]:
    """Return the model that gains are measured from, where the loss reads one."""
    if config.algorithm.loss in WITHOUT_REFERENCE:
        return ()
    return ("policy",) if config.algorithm.reference == "previous" else ("reference",)


def check(config: Config) -> None:
    """Check that a prompt has two answers to choose from at each temperature."""
    dpo.check(config)
    own = config.algorithm.temperatures
    require(
        all(isinstance(warm, int | float) and 0 < warm < math.inf for warm in own),
        f"algorithm.temperatures is {tuple(own)}; temperatures must be numbers above 0.",
    )
    parts = len(own) or 1
    count = config.generation.samples_per_prompt
    require(
        count % parts == 0,
        f"generation.samples_per_prompt is {count}, and algorithm.temperatures has {parts} entries;"
        " make the first a multiple of the second.",
    )
    least = count if config.algorithm.across_temperatures else count // parts
    require(
        least > 1,
        f"generation.samples_per_prompt is {count}; a pair takes two answers"
        f"{' of each temperature' if parts > 1 else ''}: raise it.",
    )
    require(
        config.generation.temperature == 1.0,
        f"generation.temperature is {config.generation.temperature}; a loss of pairs reads"
        " log-probabilities at 1: set algorithm.temperatures instead.",
    )


ONLINE_DPO = Algorithm(
    title=lambda config: f"online {dpo.title(config)}",
    losses={"policy": GroupLoss(preferred, reads=READS)},
    scores=scores,
    choose=ranked_pairs,
    chosen=chosen,
    prepare=gains_from,
    recall=with_earlier_pairs,
    options=OnlineDPOOptions,
    check=check,
    temperatures=temperatures,
)
