"""Open and check all that a config names: sources, prompts, devices; no weight is loaded."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import operator
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Device, choose
from rlhf_jax.config import derived
from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.checks import require_texts
from rlhf_jax.config.earlier import settled
from rlhf_jax.config.identity import binding_settings
from rlhf_jax.config.schema import Config, flat
from rlhf_jax.data.given import Given, check_labels, read_given
from rlhf_jax.data.prompts import Prompts, tokenize
from rlhf_jax.data.rows import read
from rlhf_jax.generation import drafting
from rlhf_jax.generation.speculative.protocol import register as register_drafter
from rlhf_jax.memory import estimate
from rlhf_jax.memory.sizes import PlannedRun, bubble_warnings, count_weights, parameter_counts
from rlhf_jax.models import kernels as mesh_kernels
from rlhf_jax.models.families import register as register_family
from rlhf_jax.models.files.source import Source, digest, open_source
from rlhf_jax.placement import plan as plans
from rlhf_jax.placement.pipelined import check_layers, check_pipelines, is_pipelined
from rlhf_jax.placement.plan import CallLayouts, Placement, Plan, training_layout
from rlhf_jax.placement.presets import layer_counts, plan_of
from rlhf_jax.rewards.sources import check_columns
from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.checkpoint.folder import latest_document
from rlhf_jax.runtime.extensions import load_named
from rlhf_jax.runtime.files import find, is_remote
from rlhf_jax.runtime.mirror import folder_of
from rlhf_jax.setup import sample_checks, validation
from rlhf_jax.training.distill import student_config
from rlhf_jax.types import ModelConfig, ModelConfigs

ENDS = "the tokens that end a text"  # key in an identity; early checkpoints have none


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """Hold the opened and checked parts of a config; no weight is loaded."""

    config: Config
    policy: Source
    drafter: Source | None
    # from which KL is measured: the policy's own where none is named
    reference: Source
    # initial model of each critic: the policy itself if its trunk is used
    critic: Source
    rewards: tuple[Source, ...]
    prompts: Prompts
    # how many of them each source has: data.train, then data.mixture's
    sizes: tuple[int, ...]
    # by prompt, the given samples; none if the policy generates them
    given: list[list[Given]]
    # by held-out prompt, likewise
    held_out_given: list[list[Given]]
    held_out: Prompts | None
    # the devices of each call, and the layouts that follow
    plan: Plan
    layouts: CallLayouts
    # the reason for each kernel, by the kernel's name
    kernel_reasons: dict[str, str]
    # whether the backward pass recomputes layers, and why
    remat: bool
    remat_reason: str

    @property
    def student(self) -> ModelConfig | None:
        """Return the shape of a drafter that is a student of the policy."""
        layers = drafting.has_drafter(self.config) and self.config.drafter.layers
        return student_config(self.policy.config, layers) if layers else None

    @property
    def models(self) -> ModelConfigs:
        """Return the shapes of all models."""
        drafter = self.student or (self.drafter and self.drafter.config)
        rewards = tuple(source.config for source in self.rewards)
        critics = dict.fromkeys(derived.critics(self.config), self.critic.config)
        reference = self.reference.config if self.config.kl.reference else None
        return ModelConfigs(self.policy.config, drafter, critics, rewards, reference)

    @property
    def workdir(self) -> Path:
        """Return the folder of the run; for a URL its copy on this machine."""
        return folder_of(self.config.workdir)


def date_of_run(config: Config) -> str:
    """Return the day for chat templates, YYYY-MM-DD; a resumed run keeps its own.

    It is the config's, else that of the run's latest checkpoint, else today: a run that was ended
    before its first checkpoint has nothing to resume from.
    """
    if config.data.date:
        return config.data.date
    saved = latest_document(folder_of(config.workdir) / "checkpoints").get("identity", {})
    return saved.get("data.date") or datetime.date.today().isoformat()


def prepare(config: Config) -> RunSpec:
    """Open everything that the config names.

    Raises ValueError or OSError, in one sentence, for the first problem.
    """
    require_texts(config)
    config = settled(config)
    register_own(config)
    signatures = validation.validate(config, count_devices(), distributed.count())
    policy = _open_dated(config.model.path, config)
    if not config.training.learning_rate:
        usual = algorithm_of(config).learning_rate
        config.training.learning_rate = usual(count_weights(policy.config))
    critic = open_source(config.critic.path) if config.critic.path else policy
    drafts = drafting.has_drafter(config)
    drafter = open_source(config.drafter.path) if drafts and config.drafter.path else None
    rewards = tuple(_open_dated(path, config) for path in derived.reward_models(config))
    sources = {"data.train": config.data.train}
    sources |= {f"data.mixture[{at}]": one for at, one in enumerate(config.data.mixture)}
    read_samples = functools.partial(_read_samples, config, policy, critic)
    parts = [read_samples(place, name) for name, place in sources.items()]
    prompts = functools.reduce(operator.add, (own for own, _ in parts))
    given = [samples for _, own in parts for samples in own]
    check_labels(given, algorithm_of(config).label, "data.train")
    held_out = None
    held_out_given = []
    if config.evaluation.every:
        held_out, held_out_given = read_samples(config.data.eval, "data.eval")
        check_labels(held_out_given, algorithm_of(config).label, "data.eval")

    spec = RunSpec(
        config=config,
        policy=policy,
        drafter=drafter,
        reference=open_source(config.kl.reference) if config.kl.reference else policy,
        critic=critic,
        rewards=rewards,
        prompts=prompts,
        sizes=tuple(len(own) for own, _ in parts),
        given=given,
        held_out=held_out,
        held_out_given=held_out_given,
        plan=Plan(0, {}),
        layouts={},
        kernel_reasons={},
        remat=True,
        remat_reason="",
    )
    for prompts in (spec.prompts, spec.held_out):
        if prompts is not None:
            check_columns(signatures, prompts.rows)
    sample_checks.check_models(config, spec.models)
    sample_checks.check_tokenizers(policy.tokenizer, spec.reference.tokenizer, critic.tokenizer)
    sample_checks.check_student(config, policy.config, drafter and drafter.config)
    return _placed(spec)


def _placed(spec: RunSpec) -> RunSpec:
    """Place the calls of a run on its devices, and decide whether layers are recomputed."""
    config = spec.config
    devices = jax.devices()
    slices = [getattr(device, "slice_index", 0) for device in devices]
    in_slice = slices.count(slices[0])
    plan, reasons = place_calls(config, spec.models, devices[0], len(devices), in_slice)
    layouts = plan.layouts(devices)
    limit = estimate.memory_for_remat(config, jax.local_devices()[0])
    without = estimate.fullest(config, spec.models, plan, layouts, remat=False)
    remat, reason = estimate.settle_remat(config, without, limit)
    spec = dataclasses.replace(
        spec, plan=plan, layouts=layouts, kernel_reasons=reasons, remat=remat, remat_reason=reason
    )
    if distributed.leads():
        for sentence in _model_warnings(spec):
            warnings.warn(sentence, stacklevel=1)
    return spec


def count_devices() -> int:
    """Count the devices; ValueError if JAX cannot use the requested platform."""
    try:
        return jax.device_count()
    except (RuntimeError, AssertionError) as error:
        # AssertionError if a platform is known but not installed
        reason = (str(error).splitlines() or ["it is not installed"])[0].rstrip(".")
        raise ValueError(
            f"JAX cannot use the platform {jax.config.values['jax_platforms']!r} ({reason});"
            " install JAX for it,"
            " or change JAX_PLATFORMS."
        ) from error


def place_calls(
    config: Config, models: ModelConfigs, device: Device, count: int, in_slice: int
) -> tuple[Plan, dict[str, str]]:
    """Return the plan of a run on `count` equal devices, and the reason for each kernel.

    in_slice: the devices of one TPU slice; all, if there is only one. Raises ValueError or
    FileNotFoundError if the config's plan does not fit devices or models.
    """
    named = config.model.compute_dtype
    if named == "auto":
        ampere = float(getattr(device, "compute_capability", 0) or 0) >= 8
        named = "bfloat16" if device.platform == "tpu" or ampere else "float32"
    shapes = [mesh_kernels.shape_of(model) for model in models[:2] if model]
    kernels, reasons = choose(config.kernels, device, jnp.dtype(named).itemsize, shapes)
    layers = layer_counts(models)
    plan = plan_of(config, count, Placement(0, count, dtype=named, kernels=kernels), layers)
    source = f"plan: {config.plan or 'mesh'}"
    plans.check_kernels(plan, source, device.platform)
    plans.check_parts(plan, source, device.device_kind, in_slice)
    if is_pipelined(plan):
        validation.check_pipelined_training(config)
    check_pipelines(plan, source)
    check_layers(plan, source, layers)
    if plan.parameters:
        plans.check_models(plan, source, parameter_counts(models))
    return plan, reasons


def _open_dated(path: str, config: Config) -> Source:
    """Open a model whose chat template uses the config's day, if that is set."""
    source = open_source(path)
    if not config.data.date:
        return source
    day = datetime.date.fromisoformat(config.data.date)
    return dataclasses.replace(source, tokenizer=dataclasses.replace(source.tokenizer, day=day))


def _read_samples(
    config: Config, policy: Source, critic: Source, place: str, name: str
) -> tuple[Prompts, list[list[Given]]]:
    """Read the prompts of a place, and the samples given with them; `name` is its config key.

    critic: the model that a classifier of chats begins as, whose padding its folder repeats.
    """
    algorithm = algorithm_of(config)
    return read_given(
        _read_prompts(config, policy, place, name),
        algorithm.given,
        policy.tokenizer,
        policy.stop_tokens,
        config.data.max_response_tokens,
        config.data.template_arguments.to_dict(),
        name=name,
        label=algorithm.label,
        whole=algorithm.rates_chats,
        padding=critic.repeated.get("config.json", {}).get("pad_token_id"),
        margins=any("margin" in loss.reads for loss in algorithm.losses.values()),
    )


def _read_prompts(config: Config, policy: Source, place: str, name: str) -> Prompts:
    """Read the prompts of a place, in the policy's tokens; `name` is its config key."""
    data = config.data
    left_out: list[str] = []
    rows = read(
        place if is_remote(place) else find(place),
        data.prompt_key,
        configuration=data.configuration,
        split=data.eval_split if name == "data.eval" else data.train_split,
        columns=data.columns.to_dict(),
        skip=left_out.append if data.on_bad_row == "skip" else None,
    )
    if left_out and distributed.leads():
        print(
            f"warning: {len(left_out)} rows of {name} are left out; the first: {left_out[0]}",
            file=sys.stderr,
        )
    if rewrite := algorithm_of(config).rewrite:
        rows = [
            rewrite(row, np.random.default_rng((config.seed, number)), f"Row {number} of {name}")
            for number, row in enumerate(rows, start=1)
        ]
    return tokenize(
        rows,
        policy.tokenizer,
        data.system,
        data.max_prompt_tokens,
        raw=data.raw,
        template_arguments=data.template_arguments.to_dict(),
    )


def _model_warnings(spec: RunSpec) -> Iterator[str]:
    """Yield warnings about likely mistakes: network waits, idle devices, texts that never end."""
    config = spec.config
    layouts = spec.layouts
    if layout := layouts.get("generation"):
        sharing = len(layout.owners)
        across = sharing // layout.slices
        if across > 1 and layout.platform != "tpu":
            yield (
                f"mesh.slices={layout.slices}: each slice spans {across} processes, and every layer"
                f" waits for the network between them; mesh.slices={sharing} keeps it within one."
            )
    yield from bubble_warnings(
        PlannedRun(config, spec.models, training_layout(layouts), spec.remat, layouts)
    )
    source = spec.policy
    stops = bool(config.generation.stop_strings)
    if warning := source.ends.warning(source.path, has_stop_strings=stops):
        yield warning


def identity(spec: RunSpec) -> dict[str, Any]:
    """Return the facts, by name, that a checkpoint must share with a run that resumes from it."""
    # The date first, as it may cause other differences: templates that print it change prompts.
    facts: dict[str, Any] = {"data.date": spec.config.data.date}
    critic = spec.critic if derived.critics(spec.config) else None
    for name, model in (("policy", spec.policy), ("critic", critic)):
        shape = dataclasses.asdict(model.config) if model else {}
        facts |= {f"the {name}'s {field}": value for field, value in shape.items()}

    facts[ENDS] = list(spec.policy.stop_tokens)
    loaded = {"policy": spec.policy, "critic": critic}
    loaded |= {"reference": spec.reference} if spec.config.kl.reference else {}
    loaded |= dict(zip(derived.reward_models(spec.config), spec.rewards, strict=True))
    facts |= {f"the weights of the {name}": digest(one) for name, one in loaded.items() if one}

    for name, prompts in (("data.train", spec.prompts), ("data.eval", spec.held_out)):
        if prompts:
            tokens = b"".join(np.append(tokens, -1).tobytes() for tokens in prompts.tokens)
            rows = json.dumps(prompts.rows, sort_keys=True, default=repr).encode()
            facts[f"the prompts of {name}"] = hashlib.sha256(tokens + rows).hexdigest()[:16]
    return facts | binding_settings(spec.config)


def check_alike(spec: RunSpec) -> None:
    """Raise ValueError if a process has another config, model or data than the leader."""
    if not distributed.started():
        return
    identities = distributed.gather(identity(spec) | flat(spec.config))
    for rank, other in enumerate(identities):
        for key, value in identities[0].items():
            if other.get(key) != value:
                raise ValueError(
                    f"{key} is {other.get(key)!r} on rank {rank} and {value!r} on rank 0: give all"
                    " the same."
                )


def register_own(config: Config) -> None:
    """Register the drafters and families that a config names by FILE.py:NAME; repeating is safe."""
    for name in config.generation.drafters:
        drafter = load_named(name, "generation.drafters")
        register_drafter(drafter() if isinstance(drafter, type) else drafter)
    for name in config.model.families:
        register_family(load_named(name, "model.families"))
