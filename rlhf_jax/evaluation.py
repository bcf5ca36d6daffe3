"""Evaluate a policy on held-out prompts."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlhf_jax.generation.decoding import decoding_models
from rlhf_jax.generation.history import requests
from rlhf_jax.generation.requests import GenerationCounts, RoundReport
from rlhf_jax.generation.stage import StageRecord, by_group, end_stage, generate_samples
from rlhf_jax.inference.scoring import score
from rlhf_jax.monitoring.diversity import distinct_pairs
from rlhf_jax.rewards.combination import Scores, means_of
from rlhf_jax.rewards.samples import responses_of, table_of
from rlhf_jax.run import Run
from rlhf_jax.sources.roll_out import assignment_policy_of
from rlhf_jax.state import Observer, RolloutStats, RunState, ignore, remembered
from rlhf_jax.training.learn import measure
from rlhf_jax.training.prepare import prepare


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """Hold the means of an evaluation, by the names of evaluations.jsonl, and its samples."""

    means: dict[str, float]
    samples: list[dict[str, Any]]


def evaluate(
    state: RunState, run: Run, observe: Observer = ignore
) -> tuple[RunState, EvaluationReport]:
    """Evaluate the policy on held-out prompts, or the losses on given held-out samples."""
    observe("evaluation", None)
    if run.held_out is None:
        return _evaluate_policy(state, run, observe)
    models = run.scoring.models_of(state.models, run.frozen)
    scored, _ = score(run.held_out, models, run.scoring)
    batch, _, _ = prepare(scored, state.host.kl_coefficient, run.config, {})
    losses = measure(state.models, batch, run.learners)
    means = {f"eval/{name}": value for name, value in losses.items()}
    return state, EvaluationReport(means, samples=[])


def _evaluate_policy(
    state: RunState, run: Run, observe: Observer
) -> tuple[RunState, EvaluationReport]:
    """Evaluate the policy on the held-out prompts.

    The noise is not training's (another seed), and the same every time, so that two evaluations are
    paired, and the previous text is the draft of this one. If the text depends on the drafts
    (`AcceptanceRule`), the noise is new. Samples on which a measure failed are excluded from its
    mean and counted.
    """
    evaluation = run.evaluation
    settings = run.generation
    assert evaluation is not None and settings is not None, (
        "The policy generates for held-out prompts."
    )
    before = remembered(state.host).evaluation
    models = decoding_models(state.models, run.frozen, settings.layout)
    wanted = requests(
        evaluation.prompts.tokens,
        evaluation.samples_per_prompt,
        settings.max_new_tokens,
        first_id=0,
        history=before.history,
        rule=evaluation.decoding.rule,
    )
    selector = copy.deepcopy(before.selector)
    record = StageRecord()

    def arrived(report: RoundReport) -> None:
        record.add(report)
        observe("evaluation", report)

    samples = generate_samples(
        models,
        wanted,
        evaluation.decoding,
        settings,
        assignment_policy_of(settings, before.lengths, "evaluation"),
        selector=selector,
        observe=arrived,
    )
    counts = sum(by_group(record.counts, GenerationCounts(), settings), GenerationCounts())
    selector = end_stage(selector, models[1], samples, evaluation.decoding, settings)
    evaluated = samples, RolloutStats(counts, selector)

    rows = np.repeat(np.arange(len(evaluation.prompts)), evaluation.samples_per_prompt)
    responses = responses_of(samples, evaluation.prompts, rows, evaluation.tokenizer)
    scores = evaluation.scores(responses, state.host.memory.get("reward", {}))
    means = _means(scores)
    ends = [evaluation.decoding.ended_itself(sample.tokens) for sample in samples]
    means["eval/finished"] = float(np.mean(ends))
    means["eval/distinct_pairs"] = distinct_pairs([one.response for one in responses])
    means["eval/generation/tokens_per_round"] = counts.metrics(0.0)["generation/tokens_per_round"]
    measures = {name: found.values for name, found in scores.items()}
    report = EvaluationReport(means, table_of(responses, measures.pop("reward", None), measures))
    # Saved with the step after it: a run that is stopped between the two evaluates again, as the
    # uninterrupted run did.
    generation = dataclasses.replace(remembered(state.host), evaluated=evaluated)
    host = dataclasses.replace(state.host, generation=generation)
    return state._replace(host=host), report


def _means(scores: Mapping[str, Scores]) -> dict[str, float]:
    """Return means of each measure and its further numbers, and the count of failed samples.

    A measure without failures has no such count.
    """
    means = {}
    for name, values in scores.items():
        failed = int(np.isnan(values.values).sum())
        if failed < len(values.values):
            means[f"eval/{name}"] = float(np.nanmean(values.values, dtype=float))
        means |= {f"eval/{name}/{key}": one for key, one in means_of(values.numbers).items()}
        if failed:
            means[f"eval/{name}/failed"] = failed
    return means
