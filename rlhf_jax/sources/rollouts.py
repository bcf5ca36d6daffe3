"""Roll-outs: samples of a step's prompts with rewards; prompts with equal rewards are replaced."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from rlhf_jax.data.batches import PromptStream
from rlhf_jax.generation.capability import after_visit, capabilities
from rlhf_jax.generation.decoding import decoding_models, decoding_weights
from rlhf_jax.generation.requests import Request, Sample, as_sequences
from rlhf_jax.generation.speculative.round import ModelPair
from rlhf_jax.generation.stage import GenerationSettings
from rlhf_jax.inference.overlap import Scoring, ScoringQueue
from rlhf_jax.inference.scoring import ScoringSettings
from rlhf_jax.losses.advantages import groups_with_signal
from rlhf_jax.monitoring.trace import Span, since
from rlhf_jax.rewards.samples import Rewards, table_of
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.sources.drawn import Drawn
from rlhf_jax.sources.roll_out import RewardedSamples, RollOut
from rlhf_jax.state import HostState, Observer, RunState, remembered
from rlhf_jax.types import Model, Models


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Draw samples from the current policy, and compute their rewards.

    With `resample`, prompts whose samples all have one reward are set aside and replaced, in up to
    that many more roll-outs; those set aside fill any remaining gap (dynamic sampling: DAPO, Yu et
    al. 2025, 3.2). Sample ids count on from step to step, whatever changes between, so that a run
    uses no noise twice unless it is configured to repeat some.
    """

    stream: PromptStream
    settings: GenerationSettings
    rewards: Rewards
    scoring: ScoringSettings  # for slices with no samples left to decode, too
    frozen: Mapping[str, Model]  # by role, the frozen models
    reward_lanes: tuple[int, ...] = ()  # of the timeline, where reward models work

    def draw(self, state: RunState, observe: Observer) -> AbstractContextManager[Drawn]:
        """Roll out as many prompts as a step has, again for those without a signal.

        When the context begins, all samples are drawn and generation's weights are freed.
        """
        host = state.host
        before = remembered(host)
        settings = self.settings
        models = self.models(state)
        queue = self._queue(models[0], state.models)
        work = RollOut(host, self.stream.prompts, settings, self.rewards, observe, queue)
        group = settings.samples_per_prompt
        position = host.position
        draws: list[RewardedSamples] = []
        visited: list[np.ndarray] = []
        for attempt in range(settings.resample + 1):
            rows, position = self.stream.batches.take(position)
            first_id = before.next_id + sum(len(draw.samples) for draw in draws)
            name = f"step {state.step} attempt {attempt}"
            samples = work.generate(models, rows, first_id, name)
            draws.append(work.reward(samples, rows))
            visited.append(rows)
            whole = _join(draws, settings.prompts_per_step * group)
            differ = groups_with_signal(whole.by_prompt(group).reshape(-1), group)
            if differ.sum() >= settings.prompts_per_step:
                break
        # prompts whose rewards differ, in order; the first others fill up if they are too few
        chosen = np.sort(
            np.argsort(np.logical_not(differ), kind="stable")[: settings.prompts_per_step]
        )
        kept = whole.of_prompts(chosen, group)
        stats, spans, metrics = work.close(whole.samples, models[1])
        next_id = before.next_id + len(whole.samples)
        after = host.after_draw(position, before.after(kept.samples, stats, next_id))
        after = after.remember("reward", work.memory)
        if settings.dynamic:
            known = host.memory.get("capability", {})
            rows = np.concatenate(visited)
            metrics["capability/mean"] = float(capabilities(known, rows).mean())
            after = after.remember("capability", after_visit(known, rows, whole.by_prompt(group)))
        drawn = self.drawn(
            kept,
            after,
            metrics | self.measured(whole, attempts=len(draws)),
            began=work.record.began,
            spans=spans,
        )
        return contextlib.nullcontext(dataclasses.replace(drawn, scored=work.scored))

    def longest(self, host: HostState) -> Sequences:
        """Return samples of the next prompts with the largest possible size."""
        settings = self.settings
        rows, _ = self.stream.batches.take(host.position)
        top_k = settings.decoding.sampling.top_k
        tokens = settings.max_new_tokens
        samples = [
            Sample(
                0,
                Request(self.stream.prompts.tokens[row], (0,), tokens),
                [],
                tokens=[place] * tokens,  # of equal answers none may be preferred
                logprobs=[0.0] * tokens,
                top_k_ids=[np.zeros(top_k, np.int32)] * tokens if top_k else [],
            )
            for place, row in enumerate(np.repeat(rows, settings.samples_per_prompt))
        ]
        longest = as_sequences(samples, settings.decoding.max_length).with_columns(
            rewards=np.arange(len(samples), dtype=np.float32),  # nor of equal rewards
            ended=np.ones(len(samples), bool),  # otherwise none may be trained on (drop_overlong)
        )
        if settings.dynamic is None:
            return longest
        return longest.with_columns(temperatures=np.ones(longest.mask.shape, np.float32))

    def models(self, state: RunState) -> ModelPair:
        """Return policy and drafter in generation's layout."""
        return decoding_models(state.models, self.frozen, self.settings.layout)

    def drawn(
        self,
        rewarded: RewardedSamples,
        host: HostState,
        metrics: dict[str, float],
        began: float,
        spans: list[Span],
    ) -> Drawn:
        """Return rewarded samples in the form that a step reads."""
        settings = self.settings
        batch = as_sequences(rewarded.samples, settings.decoding.max_length).with_columns(
            rewards=rewarded.clipped, ended=rewarded.ended
        )
        if settings.dynamic:
            group = settings.samples_per_prompt
            drawn_at = [
                settings.decoding.temperature_of(one.request, one.sample_id)
                for one in rewarded.samples
            ]
            by_token = np.broadcast_to(np.array(drawn_at, np.float32)[:, None], batch.mask.shape)
            batch = batch.with_columns(temperatures=by_token)
            batch = batch.spread(rewarded.places, settings.prompts_per_step * group)
            batch = batch.with_columns(rewards=rewarded.by_prompt(group).reshape(-1))
        count = len(rewarded.samples)
        of_rewards = [
            Span(lane, "inference", *rewarded.rewarded, count, "reward_inference", 0)
            for lane in self.reward_lanes
        ]
        return Drawn(
            batch,
            host,
            metrics,
            table_of(rewarded.responses, rewarded.rewards if self.rewards.function else None),
            began,
            spans + since(of_rewards, began),
        )

    def measured(self, drawn: RewardedSamples, attempts: int) -> dict[str, float]:
        """Return metrics of all samples drawn for a step, and of their rewards."""
        unfinished = float(1 - drawn.ended.mean())
        metrics = drawn.metrics | {
            "generation/attempts": attempts,
            "response/unfinished": unfinished,
        }
        if self.rewards.function is None:
            return metrics
        group = self.settings.samples_per_prompt
        differ = groups_with_signal(drawn.by_prompt(group).reshape(-1), group)
        return metrics | {
            "generation/groups_without_signal": float(1 - differ.mean()),
            "reward/mean": float(np.nanmean(drawn.rewards)),
            "reward/std": float(np.nanstd(drawn.rewards)),
        }

    def _queue(self, policy: Model, models: Models) -> ScoringQueue | None:
        """Make the queue of samples to score during generation; None if not enabled.

        policy: in generation's layout.
        """
        if not self.settings.scoring_seconds:
            return None
        layout = self.settings.layout
        length = self.settings.decoding.max_length
        rows = max(1, self.scoring.extent.rows // layout.slices)
        place = functools.partial(decoding_weights, layout=layout)
        rewards = {
            name: dataclasses.replace(one, model=place(one.model), rows=rows, length_bucket=length)
            for name, one in self.rewards.models.items()
        }
        scoring = self.scoring.models_of(models, self.frozen)
        return ScoringQueue(
            Scoring(
                {role: policy if role == "policy" else place(one) for role, one in scoring.items()},
                temperature=self.scoring.temperature,
                rows=rows,
                max_length=length,
                rewards=rewards,
            )
        )


def _join(draws: Sequence[RewardedSamples], places: int) -> RewardedSamples:
    """Join several roll-outs of so many places each.

    Of metrics, failures add up, counts of labels so far only grow, and the rest are means.
    """
    names = dict.fromkeys(name for draw in draws for name in draw.metrics)
    metrics = {}
    for name in names:
        values = [draw.metrics[name] for draw in draws if name in draw.metrics]
        join = {"failed": np.sum, "learned": np.max}.get(name.rpartition("/")[2], np.mean)
        metrics[name] = float(join(values))
    return RewardedSamples(
        samples=[sample for draw in draws for sample in draw.samples],
        responses=[response for draw in draws for response in draw.responses],
        places=np.concatenate([draw.places + places * i for i, draw in enumerate(draws)]),
        rewards=np.concatenate([draw.rewards for draw in draws]),
        clipped=np.concatenate([draw.clipped for draw in draws]),
        ended=np.concatenate([draw.ended for draw in draws]),
        metrics=metrics,
        rewarded=draws[-1].rewarded,
    )
