"""Part e: a step of GRPO by phases, and forward and backward passes beside transformers'."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import kernels
from benchmarks.contest import spread
from benchmarks.gpu import passes
from benchmarks.gpu.ledger import Case, Ledger
from benchmarks.gpu.setting import NO_STOP, Sizes, layouts, random_model
from rlhf_jax.algorithms.grpo import POLICY_LOSS
from rlhf_jax.generation.decoding import decoding_weights
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.requests import GenerationConfig, Request, as_sequences
from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.inference.scoring import score_sequences
from rlhf_jax.losses.advantages import grpo
from rlhf_jax.mesh import Layout
from rlhf_jax.planner.search.costs import forward_flops, gradient_flops
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.training.gradients import Learner
from rlhf_jax.training.learn import learn, trained
from rlhf_jax.training.optimizer import make_optimizer
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Model, ModelConfig, Trained

TORCH = "transformers_passes.py"
OURS = {"script": "rlhf_jax_passes.py", "deterministic": False, "remat": False}


def cases(sizes: Sizes, ledger: Ledger) -> Iterator[Case]:
    """Yield a step of each model without and with kernels, and the passes beside torch's."""
    # Its workers have the device to themselves: no step has left its memory in this process.
    name = sizes.trained[0]
    yield Case(f"{name}: passes", functools.partial(time_passes, sizes, name))
    for name in sizes.trained:
        for how in layouts(sizes.models[name])[0]:
            yield Case(f"{name}, {how}", functools.partial(time_steps, sizes, name, how))


@dataclasses.dataclass
class Clock:
    """Measure the seconds of phases, each until the device has done its work."""

    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[list[Any]]:
        """Time a phase; the results that are put into the list are waited for."""
        results: list[Any] = []
        began = time.perf_counter()
        yield results
        jax.block_until_ready(results)
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)


@dataclasses.dataclass(frozen=True)
class Loop:
    """Hold the constants of the steps."""

    sizes: Sizes
    generation: Layout
    training: TrainingSettings
    learner: Learner
    reference: Model


def time_steps(sizes: Sizes, name: str, how: str) -> dict[str, Any]:
    """Take one step that compiles and then `repeats` that are timed; return figures by phase."""
    config = sizes.models[name]
    found, why = layouts(config)
    training = TrainingSettings(
        microbatch_rows=sizes.microbatch_rows,
        layout=dataclasses.replace(found[how], role="training"),
    )
    learner = Learner("policy", POLICY_LOSS, make_optimizer(1e-6), training)
    loop = Loop(sizes, found[how], training, learner, reference=random_model(config))
    policy = trained(random_model(config, seed=1), learner.optimizer, training.layout)
    clock = Clock()
    for number in range(1 + sizes.step.repeats):
        policy, metrics = take_step(policy, loop, clock, number)
    timed = {phase: seconds[1:] for phase, seconds in clock.seconds.items()}
    whole = [sum(step) for step in zip(*timed.values(), strict=True)]
    tokens = sizes.step.samples * sizes.step.new_tokens
    return {
        "batch": dataclasses.asdict(sizes.step),
        "group": sizes.group,
        "microbatch_rows": sizes.microbatch_rows,
        "seconds": {phase: spread(seconds) for phase, seconds in timed.items()},
        "first_seconds": {phase: seconds[0] for phase, seconds in clock.seconds.items()},
        "step_seconds": spread(whole),
        "tokens_per_second": tokens / spread(whole)["median"],
        "of_peak_flops": flops_shares(config, sizes, timed),
        "gradient_norm": metrics["gradient/norm"],
        "no_kernels": why,
    }


def take_step(
    policy: Trained, loop: Loop, clock: Clock, number: int
) -> tuple[Trained, dict[str, float]]:
    """Take a step of GRPO with a KL term, phase by phase; each number has noise of its own."""
    with clock.phase("decoding weights") as results:
        weights = decoding_weights(policy.weights, loop.generation)
        results.append(weights)
    with clock.phase("generation"):
        batch = roll_out(weights, loop, number)
    del weights  # otherwise both copies would exist during the update
    rewards = (batch.tokens % 2 * batch.mask).mean(1).astype(np.float32)
    with clock.phase("scoring"):
        reference_logprobs = score_sequences(
            loop.reference, batch, rows=loop.sizes.microbatch_rows, layout=loop.training.layout
        )
    advantages = grpo(jnp.asarray(rewards), loop.sizes.group)[:, None]
    batch = batch.with_columns(
        reference_logprobs=reference_logprobs,
        advantages=jnp.where(batch.mask, advantages, 0.0),
        kl_weight=jnp.float32(0.04),
    )
    with clock.phase("update") as results:
        learners = {"policy": loop.learner}
        models, metrics = learn({"policy": policy}, batch, learners, step=number)
        results.append(models)
    return models["policy"], metrics


def roll_out(policy: Model, loop: Loop, number: int) -> Sequences:
    """Generate the samples of a step plainly, a group of each random prompt."""
    batch = loop.sizes.step
    group = loop.sizes.group
    random = np.random.default_rng(number)
    groups = batch.samples // group
    vocabulary = policy.config.vocab_size
    prompts = random.integers(0, vocabulary, (groups, batch.prompt_tokens), np.int32)
    ids = np.arange(batch.samples).reshape(groups, group).tolist()
    wanted = [
        Request(prompt, tuple(own), batch.new_tokens)
        for prompt, own in zip(prompts, ids, strict=True)
    ]
    decoding = GenerationConfig(
        Sampling(1.0),
        (tree.PLAIN,),
        NO_STOP,
        max_rows=batch.samples,
        min_rows=batch.samples,
        max_length=batch.slots,
        seed=number,
    )
    samples = generate(policy, None, wanted, decoding, loop.generation)
    return as_sequences(sorted(samples, key=lambda sample: sample.sample_id), batch.slots)


def flops_shares(
    config: ModelConfig, sizes: Sizes, timed: dict[str, list[float]]
) -> dict[str, float] | None:
    """Return the shares of the device's FLOPs that scoring and update reach.

    By the project's formulas, nothing counted twice that is computed again; each sample's prompt is
    counted, although packing computes that of a group once. None if the peak is not known.
    """
    peaks = kernels.peaks_of(jax.devices()[0].device_kind)
    if peaks is None:
        return None
    size = sizes.step
    flops = {
        "scoring": forward_flops(config, size.samples, size.slots, size.new_tokens),
        "update": gradient_flops(config, size.samples, size.slots, size.new_tokens, remat=False),
    }
    return {phase: one / spread(timed[phase])["median"] / peaks[1] for phase, one in flops.items()}


def time_passes(sizes: Sizes, name: str) -> dict[str, Any]:
    """Time forward and backward passes of a micro-batch beside transformers', where installed."""
    config = sizes.models[name]
    shape = {"rows": sizes.microbatch_rows, "tokens": sizes.step.slots}
    ours = OURS | shape | {"programs": passes.programs_folder()}
    workers = {f"rlhf_jax, {how}": ours | {"kernels": how} for how in layouts(config)[0]}
    workers["rlhf_jax, remat"] = ours | {"kernels": "reference", "remat": True}
    missing = [one for one in ("torch", "transformers") if not importlib.util.find_spec(one)]
    if not missing:
        workers["transformers"] = shape | {"script": TORCH}
    found = passes.take_turns(config, workers, repeats=5)
    peaks = kernels.peaks_of(jax.devices()[0].device_kind)
    tokens = shape["tokens"]
    flops = gradient_flops(config, shape["rows"], tokens, tokens, remat=False)
    for figures in found.values():
        if peaks and "seconds" in figures:
            figures["of_peak_flops"] = flops / figures["seconds"]["median"] / peaks[1]
    why = f"{' and '.join(missing)} not installed: ours alone" if missing else ""
    return shape | {"workers": found, "no_peer": why}
