"""Requirements and schedules of policy and critic as pipelines.

Both have as many stages as their placement has slices and `data` copies, on the same devices in
opposite order, so that each works in the bubbles of the other (RLHFuse, arXiv 2409.13221).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rlhf_jax.mesh import Layout
from rlhf_jax.pipeline.problem import Pipe, PipelineProblem, lay_copies
from rlhf_jax.pipeline.schedule import Schedule, one_f_one_b
from rlhf_jax.pipeline.search import solve
from rlhf_jax.placement.plan import Placement, Plan

TRIES = 20  # of the search for a schedule, after its first passes
INPUTS_OVER_1F1B = 2.0  # limit of a node, over the sum of both pipes' 1F1B
LEAST = 1e-6  # least time of a task, relative to the longest stage


class StageTimes(NamedTuple):
    """Hold the times of a model's stages for one micro-batch, and the number of these."""

    micro_batches: int
    forward: tuple[float, ...]  # [stages]
    backward: tuple[float, ...]  # [stages]
    kept: float  # a stage's input, until its backward
    copies: int = 1  # of the pipeline, each with a part of every micro-batch's rows

    @classmethod
    def of_work(
        cls, layout: Layout, micro_batches: int, *, forward: float, head: float, kept: float
    ) -> StageTimes:
        """Return the times of equal stages, in units of work.

        A backward recomputes its forward, and so takes three times as long. The last stage does
        this at once, and `head` in addition: its own forward only receives.
        """
        stages = layout.slices
        return cls(
            micro_batches,
            forward=(*[forward] * (stages - 1), LEAST * forward),
            backward=(*[3 * forward] * (stages - 1), 3 * forward + head),
            kept=kept,
            copies=layout.extent("data"),
        )


def joint_problem(models: Sequence[StageTimes]) -> PipelineProblem:
    """Return the pipes of a policy and of a critic in the opposite direction; or of one model."""
    pipes = []
    for index, model in enumerate(models):
        stages = len(model.forward)
        least = LEAST * max(model.forward)
        pipes.append(
            Pipe(
                nodes=lay_copies(model.copies * stages, stages, opposed=index > 0),
                micro_batches=model.micro_batches,
                forward=tuple(max(least, seconds) for seconds in model.forward),
                backward=model.backward,
                # The first stage receives nothing; but its outputs must not pile up before the
                # next.
                kept=(model.kept,) * stages,
            )
        )
    return PipelineProblem(tuple(pipes))


def limit_inputs(problem: PipelineProblem) -> PipelineProblem:
    """Return pipes with a limit on the inputs that a node keeps, for any number of micro-batches.

    It binds if a schedule without it would keep nearly all of them, and costs little time.
    """
    alone = [one_f_one_b(PipelineProblem((pipe,))).peak for pipe in problem.pipes]
    limit = INPUTS_OVER_1F1B * max(map(sum, zip(*alone, strict=True)))
    return dataclasses.replace(problem, limit=float(limit))


@functools.lru_cache(maxsize=256)
def fused_schedule(problem: PipelineProblem) -> Schedule:
    """Return the schedule of concurrent pipes, never longer than the serial one."""
    return solve(problem, tries=TRIES)


@functools.lru_cache(maxsize=256)
def serial_schedule(problem: PipelineProblem) -> Schedule:
    """Return the schedule of one pipe after the other, each by 1F1B."""
    return one_f_one_b(problem)


def trained(plan: Plan) -> dict[str, Placement]:
    """Return the placements of the calls that train."""
    return {call: placed for call, placed in plan.placements.items() if call.endswith("_training")}


def is_pipelined(plan: Plan) -> bool:
    """Return whether a call of a plan is trained as a pipeline."""
    return any(placed.pipelined for placed in trained(plan).values())


def check_pipelines(plan: Plan, source: str) -> None:
    """Raise ValueError if pipelines have one stage, or are not both on the same ones.

    source: the name of the plan in the message.
    """
    placed = trained(plan)
    if not is_pipelined(plan):
        return
    for call, one in placed.items():
        if one.pipelined and one.slices < 2:
            raise ValueError(
                f"{source} pipelines {call} over {one.slices} slice, and each slice is a stage:"
                " give it at least 2, or leave pipelined out."
            )
    if len({one.pipelined for one in placed.values()}) > 1:
        whole = next(call for call, one in placed.items() if not one.pipelined)
        raise ValueError(
            f"{source} pipelines one of policy and critic, and not {whole}: pipeline both, as each"
            " works in the bubbles of the other, or neither."
        )
    if len({(one.first, one.count, one.slices * one.data) for one in placed.values()}) > 1:
        raise ValueError(
            f"{source} pipelines policy and critic on other devices each, or on other parts of"
            " them: give both the same first and count, and slices x data that are the same, as"
            " each copy has stages of its own."
        )


def fill_with_copies(policy: Placement, layers: Mapping[str, int], role: str) -> Placement:
    """Return the placement of a critic's training next to a pipelined policy, with copies.

    A shallower critic has as few stages as divide its layers without exceeding the policy's layers
    per stage, and copies of its pipeline fill the nodes. If there are none it is placed like the
    policy. layers: of each model by its name.
    """
    stages = policy.slices
    for fewer in range(2, stages):
        own, rest = divmod(layers[role], fewer)
        if stages % fewer == 0 and rest == 0 and own * stages <= layers["policy"]:
            return dataclasses.replace(policy, slices=fewer, data=policy.data * stages // fewer)
    return policy


def check_layers(plan: Plan, source: str, layers: Mapping[str, int]) -> None:
    """Raise ValueError if stages do not divide the layers of policy or critic.

    layers: of each model by its name. A critic has at most as many layers as the policy, whose
    bubbles it is to fill.
    """
    placed = trained(plan)
    if not is_pipelined(plan):
        return
    for call, one in placed.items():
        name = call.removesuffix("_training")
        depth = layers[name]
        if depth % one.slices:
            fitting = [stages for stages in range(2, depth + 1) if depth % stages == 0]
            if name != "policy":  # copies of it fill as many nodes as the policy has
                fitting = [stages for stages in fitting if one.slices * one.data % stages == 0]
            below = [stages for stages in fitting if stages < one.slices][-1:]
            near = below + [stages for stages in fitting if stages > one.slices][:1]
            change = f"give {call} {' or '.join(map(str, near))} slices"
            raise ValueError(
                f"{source} cuts the {depth} layers of the {name} into {one.slices} stages, which do"
                f" not divide them; {change if near else 'leave pipelined out'}."
            )
        if depth > layers["policy"]:
            raise ValueError(
                f"{source} pipelines a {name} of {depth} layers beside a policy of"
                f" {layers['policy']}, which has too few bubbles for it: give a critic.path with at"
                " most as many layers, or leave pipelined out."
            )


def bubble_warnings(pipelines: Iterable[tuple[str, int, int]]) -> list[str]:
    """Yield a warning for each pipeline of few micro-batches, with its idle share.

    pipelines: (call, micro-batches, stages). It is that of the pipeline alone: the other one works
    in the meantime.
    """
    return [
        f"{call} has {count} micro-batch{'es' * (count > 1)} in a minibatch for {stages} stages, so"
        f" alone it idles for {(stages - 1) / (count + stages - 1):.0%} of its time: lower"
        " training.microbatch_rows or microbatch_tokens, or training.minibatches."
        for call, count, stages in pipelines
        if count < stages
    ]
