"""Measures of a policy over held-out prompts."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np

from rlhf_jax.generation.history import requests
from rlhf_jax.generation.requests import GenerationCounts, RoundReport
from rlhf_jax.generation.stage import StageRecord, by_group, end_stage, generate_samples
from rlhf_jax.monitoring.diversity import distinct_pairs
from rlhf_jax.rewards.samples import responses_of, table_of
from rlhf_jax.rollout import assignment_policy_of
from rlhf_jax.state import Observer, RolloutStats, Run, RunState, decoding_models, ignore


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """Hold the means of an evaluation, by the names of evaluations.jsonl, and its samples."""

    means: dict[str, float]
    samples: list[dict[str, Any]]


def evaluate(
    state: RunState, run: Run, observe: Observer = ignore
) -> tuple[RunState, EvaluationReport]:
    """Measure the policy on the held-out prompts.

    The noise is not training's (another seed). It is the same every time, so two evaluations are
    paired, and the text of the one before is the draft of this one; but where acceptance makes the
    text depend on the drafts (`AcceptanceRule`), the noise is new. Samples that a measure failed on
    are left out of its mean, and counted.
    """
    observe("evaluation", None)
    asked = run.evaluation
    assert asked is not None
    before = state.host.evaluation
    models = decoding_models(state.models, run)
    wanted = requests(
        asked.prompts.tokens,
        asked.samples_per_prompt,
        run.generation.max_new_tokens,
        first_id=0,
        history=before.history,
        rule=asked.decoding.rule,
    )
    selector = copy.deepcopy(before.selector)
    record = StageRecord()

    def arrived(report: RoundReport) -> None:
        record.add(report)
        observe("evaluation", report)

    samples = generate_samples(
        models,
        wanted,
        asked.decoding,
        run.generation,
        assignment_policy_of(run.generation, before.lengths, "evaluation"),
        selector=selector,
        observe=arrived,
    )
    counts = sum(by_group(record.counts, GenerationCounts(), run.generation), GenerationCounts())
    selector = end_stage(selector, models[1], samples, asked.decoding, run.generation)
    evaluated = samples, RolloutStats(counts, selector)

    rows = np.repeat(np.arange(len(asked.prompts)), asked.samples_per_prompt)
    responses = responses_of(samples, asked.prompts, rows, run.rewards.tokenizer)
    scores = {name: measure(responses).values for name, measure in asked.measures.items()}
    means = {
        f"eval/{name}": float(np.nanmean(values, dtype=float))
        for name, values in scores.items()
        if np.isfinite(values).any()
    }
    failed = {f"eval/{name}/failed": int(np.isnan(v).sum()) for name, v in scores.items()}
    means |= {name: count for name, count in failed.items() if count}
    ends = [asked.decoding.ended_itself(sample.tokens) for sample in samples]
    means["eval/finished"] = float(np.mean(ends))
    means["eval/distinct_pairs"] = distinct_pairs([one.response for one in responses])
    means["eval/generation/tokens_per_round"] = counts.metrics(0.0)["generation/tokens_per_round"]
    report = EvaluationReport(means, table_of(responses, next(iter(scores.values()))))
    host = dataclasses.replace(state.host, evaluated=evaluated)
    return state._replace(host=host), report
