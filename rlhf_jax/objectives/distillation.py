"""The objective 'distill': a student learns to draft for the policy, which stays as it is."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping

from rlhf_jax.config.checks import require, require_positive
from rlhf_jax.config.schema import Config
from rlhf_jax.generation.requests import as_sequences
from rlhf_jax.rlhf import distill_drafter, report_step
from rlhf_jax.rollout import roll_out
from rlhf_jax.state import Observer, Run, RunState, StepReport, decoding_models


class DistillationObjective:
    """Train a student of the policy, and nothing else, on all samples of a step."""

    uses_rewards = False
    trains_policy = False
    distills = True

    def title(self, config: Config) -> str:
        """Name what is made."""
        return "distillation of a drafter"

    def validate(self, config: Config) -> None:
        """Raise ValueError for what a run without rewards would not use."""
        require_positive(config, "drafter.layers", "drafter.learning_rate")
        keys = ("reward.functions", "reward.models", "evaluation.every", "generation.resample")
        unused = [key for key in keys if operator.attrgetter(key)(config)]
        require(
            not unused,
            "objective is 'distill', which trains a drafter and earns no reward: clear"
            f" {', '.join(unused)}.",
        )

    def compile_step(self, state: RunState, run: Run) -> None:
        """Compile nothing: the student's programs are small."""

    def step(self, state: RunState, run: Run, observe: Observer) -> tuple[RunState, StepReport]:
        """Roll out the next prompts, and let the student learn from all samples.

        The reward of the metrics is the share of the policy's tokens that the student draws too,
        before it learns from them; KL and loss are the policy's divergence from the student, in
        nats a token.
        """
        models = decoding_models(state.models, run)
        rolled = roll_out(
            models, state, run.prompts, run.generation, run.rewards, queue=None, observe=observe
        )
        del models  # else generation's weights would stay while the student learns
        observe("training", None)
        samples = as_sequences(rolled.samples, run.generation.decoding.max_length)
        models, distilled = distill_drafter(state.models, samples, run, state.step, observe)
        if "drafter/not_finite" in distilled:
            raise ValueError("The student's loss is not finite; lower drafter.learning_rate")

        host = dataclasses.replace(rolled.host, step=state.step + 1, distilled_at=state.step)
        metrics = {k: v for k, v in rolled.metrics.items() if not k.startswith("reward/")}
        metrics |= distilled
        metrics |= {
            "reward/mean": distilled["drafter/acceptance"],
            "training/seconds": distilled["drafter/seconds"],
            "kl/mean": distilled["drafter/loss"],
            "loss/policy": distilled["drafter/loss"],
        }
        models = models | {"policy": models["policy"].counted()}
        report = report_step(rolled, metrics, host)
        texts = [{k: v for k, v in row.items() if k != "reward"} for row in report.samples]
        return RunState(models, host), dataclasses.replace(report, samples=texts)

    def report_names(self) -> Mapping[str, str]:
        """Say what stands in for reward, KL and loss."""
        return {
            "reward/mean": "share of tokens that the student draws too",
            "kl/mean": "divergence of the policy from the student, nats a token",
            "loss/policy": "loss of the student, nats a token",
        }
