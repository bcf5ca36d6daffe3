"""One update of a run's trained models: epochs of minibatches, cut into micro-batches."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlhf_jax.mesh import ONE_DEVICE, Layout, for_all_to_read, place_rows
from rlhf_jax.models.attention import packed_block
from rlhf_jax.models.packed import padding_flops
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import cast, stack
from rlhf_jax.monitoring.parts import PhaseParts
from rlhf_jax.placement.pipelined import StageTimes
from rlhf_jax.runtime import to_host
from rlhf_jax.runtime.compilation import Execute, compile_only, run_now
from rlhf_jax.runtime.shards import place_parts
from rlhf_jax.sequences.batch import PackedSequences, Sequences
from rlhf_jax.sequences.minibatches import minibatches, with_shares
from rlhf_jax.sequences.packing import pack, padding_share
from rlhf_jax.training.gradients import Gradient, Learner, measure_loss, sum_gradients
from rlhf_jax.training.kinds import is_maximum
from rlhf_jax.training.optimizer import norms_and_finite, take_step
from rlhf_jax.training.pipelined import measure_stages, sum_pipelined
from rlhf_jax.training.schedules import FusedSchedule, schedule_of
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Model, Models, Trained

Learners = Mapping[str, Learner]  # by role, in the order of their gradients


class NonFiniteStep(ValueError):
    """Report more consecutive minibatches with non-finite numbers than may be skipped.

    `batch` was to be learned from. `models` are finite: they lack the steps of the failed
    minibatches.
    """

    def __init__(self, message: str, batch: Sequences, models: Models):
        super().__init__(message)
        self.batch = batch
        self.models = models


def trained(
    model: Model,
    optimizer: optax.GradientTransformation | None,
    layout: Layout = ONE_DEVICE,
    part: Callable[[Model], Model] | None = None,
) -> Trained:
    """Return a model prepared for training: float32, stacked layers, in the layout.

    The given model is donated: a caller that continues to use the same weights, such as a
    reference, passes a copy. With `part`, which makes a model of it, it is not. Without an
    optimizer a model is frozen. Shapes give shapes.
    """

    def make(model: Model) -> Trained:
        weights = cast(stack(part(model) if part else model), jnp.float32)
        moments = None if optimizer is None else optimizer.init(weights)  # pyright: ignore[reportArgumentType]
        return Trained(weights, moments, jnp.zeros((), jnp.int32))

    shapes = jax.eval_shape(make, model)
    places = None if layout.mesh is None else model_shardings(shapes, layout)
    # All processes read the version, even those without the model, so it is on more devices.
    everywhere = None if places is None else for_all_to_read(layout)
    if isinstance(model.norm, jax.ShapeDtypeStruct):
        if places is None:
            return shapes
        places = dataclasses.replace(places, version=everywhere)
        return jax.tree.map(lambda shape, place: shape.update(sharding=place), shapes, places)
    donated = () if part else (0,)
    model_trained = jax.jit(make, donate_argnums=donated, out_shardings=places)(model)
    if everywhere is None:
        return model_trained
    return dataclasses.replace(
        model_trained, version=place_parts(np.zeros((), np.int32), everywhere)
    )


class Minibatch(NamedTuple):
    """Hold the data of one optimizer step of each learner."""

    learners: list[Learner]
    models: list[Model]
    batches: list[list[PackedSequences]]  # the micro-batches of each, of the host
    padding: tuple[float, float]  # the padding shares of the first one's tokens and FLOPs

    def schedule(self, times: Mapping[str, StageTimes]) -> FusedSchedule | None:
        """Return the schedule of pipelined learners; None for others, which take turns."""
        if self.learners[0].settings.layout.role != "pipelined":
            return None
        return schedule_of(self.learners, self.models, self.batches, times)

    def gradients(
        self,
        fused: FusedSchedule | None,
        progress: PhaseParts | None = None,
        execute: Execute = run_now,
    ) -> Iterator[Gradient]:
        """Yield the gradient of each learner, computed on request.

        So activations of two models never coexist. fused: the schedule of pipelined learners, which
        run at once: all gradients are computed with the first.
        """
        if fused is not None:
            yield from sum_pipelined(
                self.learners, self.models, self.batches, fused.schedule, progress, execute
            )
            return
        for learner, model, own in zip(self.learners, self.models, self.batches, strict=True):
            yield sum_gradients(learner, model, own, progress=progress, execute=execute)


def learn(
    models: Models,
    batch: Sequences,
    learners: Learners,
    *,
    step: int,
    observe: Callable[[PhaseParts], None] = lambda parts: None,
    skipped: int = 0,
    stage_times: Mapping[str, StageTimes] | None = None,
) -> tuple[Models, dict[str, float]]:
    """Train on one batch of sequences: `epochs` times `minibatches` optimizer steps.

    The given models are donated. A minibatch's loss is a weighted sum, so the result does not
    depend on `microbatch_rows`. Gradients of the learners are taken one after the other, or by
    concurrent pipelines if their layouts are pipelined. `observe` is called before each minibatch,
    with its micro-batches. `step` counts updates and, with the seed, orders the rows; a learner
    whose `first_update` is later leaves its model unchanged.

    A minibatch with a non-finite number, of any model, is skipped: no model takes a step.
    NonFiniteStep if more than `max_skipped` come in a row, of which `skipped` came before this
    update. The metrics, means over the other minibatches (maxima for `.../max`), are read from the
    device once, at the end; with `target_kl`, one of them after each minibatch. `stage_times` is
    the result of `measure_update`, of pipelines.
    """
    batch = batch.on_host()
    present = {role: one for role, one in learners.items() if step >= one.first_update}
    _check_old(batch, present.values())
    settings = _settings(learners)
    history: list[dict[str, Any]] = []
    planned = []
    padding = []
    tokens = 0
    done = 0
    for rows in _rows_of_minibatches(batch, learners, step, settings.epochs):
        minibatch = _minibatch(models, batch.take(rows), present)
        padding.append(minibatch.padding)
        tokens += int(batch.mask[rows].sum())
        observe(progress := PhaseParts(sum(map(len, minibatch.batches))))
        fused = minibatch.schedule(stage_times or {})
        planned += [fused.metrics()] if fused else []
        stepped, metrics = _take_steps(models, minibatch, fused, progress)
        history.append(metrics)
        del minibatch
        if stepped is None:
            break
        models = stepped
        done += 1

    metrics = _means(to_host.fetch(history), batch, models, settings.max_skipped, skipped, step)
    if planned:
        metrics |= {name: float(np.mean([own[name] for own in planned])) for name in planned[0]}
    metrics["training/minibatches_done"] = done - metrics["training/skipped"]
    in_tokens, in_flops = np.mean(padding or [(0.0, 0.0)], axis=0).tolist()
    metrics |= {"training/padding": in_tokens, "training/padding_flops": in_flops}
    metrics["training/tokens"] = float(tokens)
    metrics |= _learning_rates(models, learners)
    return models | {role: models[role].counted() for role in learners}, metrics


def measure(models: Models, batch: Sequences, learners: Learners) -> dict[str, float]:
    """Return the metrics of the losses over a whole batch, without training."""
    minibatch = _minibatch(models, batch.on_host(), learners)
    totals: dict[str, float] = {}
    for learner, model, own in zip(*minibatch[:3], strict=True):
        layout = learner.settings.layout.unpipelined
        settings = dataclasses.replace(learner.settings, layout=layout)
        for part in own:
            placed = place_rows(part, layout)
            metrics = to_host.fetch(
                measure_loss(model, placed, loss=learner.loss, settings=settings)
            )
            for name, value in metrics.items():
                join = max if is_maximum(name) else operator.add
                totals[name] = join(totals[name], float(value)) if name in totals else float(value)
    return totals


def compile_update(models: Models, batch: Sequences, learners: Learners, step: int) -> None:
    """Compile the programs of `learn` for the first minibatch, if any trains, without running."""
    minibatch = _first_minibatch(models, batch, learners, step)
    if minibatch is not None:
        _take_steps(models, minibatch, minibatch.schedule({}), execute=compile_only)


def measure_update(
    models: Models, batch: Sequences, learners: Learners, step: int
) -> dict[str, StageTimes]:
    """Return by call the times of pipeline stages, for the first micro-batch of some sequences.

    Without pipelines there is nothing to measure. No gradient is kept.
    """
    if _settings(learners).layout.role != "pipelined":
        return {}
    minibatch = _first_minibatch(models, batch, learners, step)
    if minibatch is None:
        return {}
    given = zip(minibatch.learners, minibatch.models, minibatch.batches, strict=True)
    return {learner.call: measure_stages(learner, model, own[0]) for learner, model, own in given}


def _settings(learners: Learners) -> TrainingSettings:
    """Return the settings of the first learner; epochs, minibatches and order are common."""
    return next(iter(learners.values())).settings


def _check_old(batch: Sequences, learners: Iterable[Learner]) -> None:
    """Raise ValueError if a later minibatch would lack the log-probs from before the update."""
    for learner in learners:
        steps = learner.settings.epochs * learner.settings.minibatches
        if steps > 1 and "logprobs" in learner.loss.reads and "logprobs" not in batch.columns:
            raise ValueError(
                "Several minibatches need the log-probs from before the update; score the policy"
                " first."
            )


def _rows_of_minibatches(
    batch: Sequences, learners: Learners, step: int, epochs: int
) -> Iterator[np.ndarray]:
    """Yield the rows of each minibatch that has tokens to learn from."""
    settings = _settings(learners)
    order = minibatches(
        len(batch.tokens),
        settings.minibatches,
        epochs,
        seed=settings.seed,
        step=step,
        groups=np.asarray(batch.group) if _keeps_groups(learners) else None,
    )
    return (rows for rows in order if batch.mask[rows].any())


def _first_minibatch(
    models: Models, batch: Sequences, learners: Learners, step: int
) -> Minibatch | None:
    """Return the first minibatch of an update of all learners; None without tokens."""
    batch = batch.on_host()
    rows = next(_rows_of_minibatches(batch, learners, step, epochs=1), None)
    return None if rows is None else _minibatch(models, batch.take(rows), learners)


def _minibatch(models: Models, minibatch: Sequences, learners: Learners) -> Minibatch:
    """Cut a minibatch of host arrays into the micro-batches of each learner.

    Learners with equal row shards share them, with the columns that any of them reads.
    """
    settings = _settings(learners)
    weights = settings.aggregate(minibatch.mask, settings.max_new_tokens)
    reads = {name for one in learners.values() for name in one.loss.reads}
    known = with_shares(minibatch.reading(*reads), weights)
    block = packed_block(settings.layout)
    together = _keeps_groups(learners)
    shards = [one.settings.layout.row_shards for one in learners.values()]
    packed = {
        count: pack(known, settings.extent, block, count, whole_groups=together)
        for count in set(shards)
    }
    weights_of_roles = [models[role].weights for role in learners]
    first = packed[shards[0]]
    in_flops = padding_flops(first, weights_of_roles[0].config, settings.layout, settings.chunk)
    return Minibatch(
        list(learners.values()),
        weights_of_roles,
        [[part.batch for part in packed[count]] for count in shards],
        (padding_share(first), in_flops),
    )


def _keeps_groups(learners: Learners) -> bool:
    """Return whether a loss compares the sequences of a group."""
    return any(one.loss.whole_groups for one in learners.values())


def _take_steps(
    models: Models,
    minibatch: Minibatch,
    fused: FusedSchedule | None,
    progress: PhaseParts | None = None,
    execute: Execute = run_now,
) -> tuple[Models | None, dict[str, jax.Array]]:
    """Take a minibatch's step of each learner, or of none if a number is not finite.

    Returns the models and all metrics, norms included. Once the policy has moved too far no further
    step is taken: None in place of the models.
    """
    metrics: dict[str, jax.Array] = {}
    gradients = []
    given = minibatch.gradients(fused, progress, execute)
    for learner, gradient in zip(minibatch.learners, given, strict=True):
        metrics |= gradient.metrics
        if execute is run_now and _has_moved(learner, gradient):
            return None, gradient.metrics
        gradients.append(gradient)
    norms, finite = norms_and_finite(gradients, execute)
    models = dict(models)
    stepped = zip(minibatch.learners, gradients, norms, finite, strict=True)
    for learner, gradient, norm, flag in stepped:
        models[learner.role] = take_step(learner, models[learner.role], gradient, flag, execute)
        metrics[learner.norm_metric] = norm
    return models, metrics


def _has_moved(learner: Learner, gradient: Gradient) -> bool:
    """Return whether the policy has moved too far from the old one for further steps."""
    limit = learner.settings.target_kl
    if not limit or "kl/old" not in gradient.metrics:
        return False
    metrics = to_host.fetch(gradient.metrics)
    finite = np.isfinite([*metrics.values()]).all()
    return bool(finite and metrics["kl/old"] > limit)


def _means(
    history: list[dict[str, Any]],
    batch: Sequences,
    models: Models,
    max_skipped: int,
    in_row: int,
    step: int,
) -> dict[str, float]:
    """Return each metric's mean over the minibatches that have it, or its maximum for `.../max`.

    Minibatches with a non-finite number were skipped, and are only counted; `in_row` were skipped
    before. NonFiniteStep if more than `max_skipped` come in a row.
    """
    taken = []
    for index, metrics in enumerate(history):
        broken = [name for name, value in metrics.items() if not math.isfinite(value)]
        in_row = in_row + 1 if broken else 0
        if not broken:
            taken.append(metrics)
        elif in_row > max_skipped:
            # A loss is a better clue than its consequences.
            name = min(broken, key=lambda name: not name.startswith("loss/"))
            raise NonFiniteStep(
                f"{name} is {float(metrics[name])} in minibatch {index + 1} of update"
                f" {step}{_not_finite(batch)}; its step was not taken, and"
                f" training.max_skipped is {max_skipped}: look for a reward out of scale, or lower"
                " the learning rate and resume with checkpoint.allow_changes=True.",
                batch,
                models,
            )
    means = {}
    for name in dict.fromkeys(name for metrics in taken for name in metrics):
        values = [float(metrics[name]) for metrics in taken if name in metrics]
        means[name] = max(values) if is_maximum(name) else float(np.mean(values))
    skipped = float(len(history) - len(taken))
    return means | {"training/skipped": skipped, "training/skipped_in_row": float(in_row)}


def _learning_rates(models: Models, learners: Learners) -> dict[str, float]:
    """Return the learning rate of the last step of each optimizer, or of its first."""
    rates = {}
    for role, learner in learners.items():
        rate = learner.learning_rate
        if callable(rate):
            # AdamW counts its steps, and so does a schedule: only those taken, both alike.
            counts = optax.tree_utils.tree_get_all_with_path(models[role].moments, "count")
            taken = int(np.max(to_host.fetch([count for _, count in counts])))
            rate = rate(max(taken - 1, 0))
        if rate is not None:
            name = "training" if role == "policy" else role
            rates[f"{name}/learning_rate"] = np.asarray(rate).item()
    return rates


def _not_finite(batch: Sequences) -> str:
    """Describe the non-finite numbers by token column."""
    counts = ""
    tokens = int(batch.mask.sum())
    for name, numbers in batch.columns.items():
        if numbers.shape == batch.mask.shape:
            bad = int((~np.isfinite(numbers[batch.mask])).sum())
            counts += f", where {bad} of {tokens} {name.replace('_', ' ')} are not" * (bad > 0)
    return counts
