"""What a config describes, opened and checked: sources, prompts, devices; no weight is loaded."""

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
import numpy as np

from rlhf_jax.config import derived
from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.checks import require_texts
from rlhf_jax.config.earlier import settled
from rlhf_jax.config.identity import binding_settings
from rlhf_jax.config.schema import Config, flat
from rlhf_jax.data.given import Given, read_given
from rlhf_jax.data.prompts import Prompts, tokenize
from rlhf_jax.data.rows import read
from rlhf_jax.generation import drafting
from rlhf_jax.generation.speculative.protocol import register as register_drafter
from rlhf_jax.memory import estimate
from rlhf_jax.memory.sizes import PlannedRun, bubble_warnings, count_weights
from rlhf_jax.models.families import register as register_family
from rlhf_jax.models.files.source import Source, digest, open_source
from rlhf_jax.placement.plan import CallLayouts, Plan, training_layout
from rlhf_jax.rewards.sources import check_columns
from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.checkpoint.folder import latest_document
from rlhf_jax.runtime.extensions import load_named
from rlhf_jax.runtime.files import find, is_remote
from rlhf_jax.runtime.mirror import folder_of
from rlhf_jax.setup import validation
from rlhf_jax.setup.calls import count_devices, place_calls
from rlhf_jax.training.distill import student_config
from rlhf_jax.types import ModelConfig, ModelConfigs

ENDS = "the tokens that end a text"  # as an identity names them; checkpoints of before have none


@dataclasses.dataclass(frozen=True)
class Opened:
    """Hold what a config describes, opened and checked; no weight is loaded."""

    config: Config
    policy: Source
    drafter: Source | None
    # from which KL is measured: the policy's own where none is named
    reference: Source
    # of which each critic is made: the policy's own where its trunk is taken
    critic: Source
    rewards: tuple[Source, ...]
    prompts: Prompts
    # how many of them each source has: data.train, then data.mixture's
    sizes: tuple[int, ...]
    # of each prompt the samples that are given with it; none where the policy writes them
    given: list[list[Given]]
    # of each held-out prompt likewise
    held_out_given: list[list[Given]]
    held_out: Prompts | None
    # which devices each call has, and the layouts that follow
    plan: Plan
    layouts: CallLayouts
    # why each kernel is what it is, by the kernel's name
    kernel_reasons: dict[str, str]
    # whether the backward pass computes layers again, and why
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
        """Return the folder in which all of the run lives; of a URL its copy on this machine."""
        return folder_of(self.config.workdir)


def date_of_run(config: Config) -> str:
    """Return the day that chat templates are told, YYYY-MM-DD: a run that goes on keeps its own.

    It is the config's, else that of the run's latest checkpoint, else today: a run that was ended
    before its first checkpoint has nothing to go on from.
    """
    if config.data.date:
        return config.data.date
    saved = latest_document(folder_of(config.workdir) / "checkpoints").get("identity", {})
    return saved.get("data.date") or datetime.date.today().isoformat()


def prepare(config: Config) -> Opened:
    """Open what the config names.

    Raises ValueError or OSError, in one sentence, for the first thing that is wrong.
    """
    require_texts(config)
    config = settled(config)
    register_own(config)
    signatures = validation.validate(config, count_devices(), distributed.count())
    policy = _open_dated(config.model.path, config)
    if not config.training.learning_rate:
        usual = algorithm_of(config).learning_rate
        config.training.learning_rate = usual(count_weights(policy.config))
    drafts = drafting.has_drafter(config)
    drafter = open_source(config.drafter.path) if drafts and config.drafter.path else None
    rewards = tuple(_open_dated(path, config) for path in derived.reward_models(config))
    sources = (config.data.train, *config.data.mixture)
    found = [_read_samples(config, policy, source, "train") for source in sources]
    prompts = functools.reduce(operator.add, (own for own, _ in found))
    given = [samples for _, own in found for samples in own]
    held_out = None
    held_out_given = []
    if config.evaluation.every:
        held_out, held_out_given = _read_samples(config, policy, config.data.eval, "eval")

    opened = Opened(
        config=config,
        policy=policy,
        drafter=drafter,
        reference=open_source(config.kl.reference) if config.kl.reference else policy,
        critic=open_source(config.critic.path) if config.critic.path else policy,
        rewards=rewards,
        prompts=prompts,
        sizes=tuple(len(own) for own, _ in found),
        given=given,
        held_out=held_out,
        held_out_given=held_out_given,
        plan=Plan(0, {}),
        layouts={},
        kernel_reasons={},
        remat=True,
        remat_reason="",
    )
    for prompts in (opened.prompts, opened.held_out):
        if prompts is not None:
            check_columns(signatures, prompts.rows)
    validation.validate_models(config, opened.models)
    validation.validate_student(config, policy.config, drafter and drafter.config)
    return _placed(opened)


def _placed(opened: Opened) -> Opened:
    """Place the calls of a run on its devices, and settle whether layers are computed again."""
    config = opened.config
    devices = jax.devices()
    slices = [getattr(device, "slice_index", 0) for device in devices]
    in_slice = slices.count(slices[0])
    plan, reasons = place_calls(config, opened.models, devices[0], len(devices), in_slice)
    layouts = plan.layouts(devices)
    limit = estimate.memory_for_remat(config, jax.local_devices()[0])
    without = estimate.fullest(config, opened.models, plan, layouts, remat=False)
    remat, reason = estimate.settle_remat(config, without, limit)
    opened = dataclasses.replace(
        opened, plan=plan, layouts=layouts, kernel_reasons=reasons, remat=remat, remat_reason=reason
    )
    if distributed.leads():
        for sentence in _doubts(opened):
            warnings.warn(sentence, stacklevel=1)
    return opened


def _open_dated(path: str, config: Config) -> Source:
    """Open a model whose chat template is told the day of the config, where that has one."""
    source = open_source(path)
    if not config.data.date:
        return source
    day = datetime.date.fromisoformat(config.data.date)
    return dataclasses.replace(source, tokenizer=dataclasses.replace(source.tokenizer, day=day))


def _read_samples(
    config: Config, policy: Source, source: str, key: str
) -> tuple[Prompts, list[list[Given]]]:
    """Read the prompts of a source of data.train or data.eval, and samples given with them."""
    return read_given(
        _read_prompts(config, policy, source, key),
        algorithm_of(config).given,
        policy.tokenizer,
        policy.stop_tokens,
        config.data.max_response_tokens,
        config.data.template_arguments.to_dict(),
        name=f"data.{key}",
        label=algorithm_of(config).label,
    )


def _read_prompts(config: Config, policy: Source, source: str, key: str) -> Prompts:
    """Read the prompts of a source of `data.train` or `data.eval`, as the policy's tokens."""
    data = config.data
    left_out: list[str] = []
    rows = read(
        source if is_remote(source) else find(source),
        data.prompt_key,
        configuration=data.configuration,
        split=data[f"{key}_split"],
        columns=data.columns.to_dict(),
        skip=left_out.append if data.on_bad_row == "skip" else None,
    )
    if left_out and distributed.leads():
        print(
            f"warning: {len(left_out)} rows of data.{key} are left out; the first: {left_out[0]}",
            file=sys.stderr,
        )
    if rewrite := algorithm_of(config).rewrite:
        rows = [
            rewrite(
                row, np.random.default_rng((config.seed, number)), f"Row {number} of data.{key}"
            )
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


def _doubts(opened: Opened) -> Iterator[str]:
    """Say what a run does that hardly is meant: waits for networks, idles, or never ends a text."""
    config = opened.config
    layouts = opened.layouts
    if layout := layouts.get("generation"):
        sharing = len(layout.owners)
        across = sharing // layout.slices
        if across > 1 and layout.platform != "tpu":
            yield (
                f"mesh.slices={layout.slices}: each slice spans {across} processes, and every layer"
                f" waits for the network between them; mesh.slices={sharing} keeps it within one."
            )
    yield from bubble_warnings(
        PlannedRun(config, opened.models, training_layout(layouts), opened.remat, layouts)
    )
    source = opened.policy
    stops = bool(config.generation.stop_strings)
    if said := source.ends.warning(source.path, has_stop_strings=stops):
        yield said


def identity(opened: Opened) -> dict[str, Any]:
    """Return what a checkpoint must share with the run that goes on from it, by name."""
    # First what another difference may come of: templates that print the day make other prompts.
    found: dict[str, Any] = {"data.date": opened.config.data.date}
    critic = opened.critic if derived.critics(opened.config) else None
    for name, model in (("policy", opened.policy), ("critic", critic)):
        shape = dataclasses.asdict(model.config) if model else {}
        found |= {f"the {name}'s {field}": value for field, value in shape.items()}

    found[ENDS] = list(opened.policy.stop_tokens)
    loaded = {"policy": opened.policy, "critic": critic}
    loaded |= {"reference": opened.reference} if opened.config.kl.reference else {}
    loaded |= dict(zip(derived.reward_models(opened.config), opened.rewards, strict=True))
    found |= {f"the weights of the {name}": digest(one) for name, one in loaded.items() if one}

    for name, prompts in (("data.train", opened.prompts), ("data.eval", opened.held_out)):
        if prompts:
            tokens = b"".join(np.append(tokens, -1).tobytes() for tokens in prompts.tokens)
            rows = json.dumps(prompts.rows, sort_keys=True, default=repr).encode()
            found[f"the prompts of {name}"] = hashlib.sha256(tokens + rows).hexdigest()[:16]
    return found | binding_settings(opened.config)


def check_alike(opened: Opened) -> None:
    """Raise ValueError where a process was given another config, model or data than the leader."""
    if not distributed.started():
        return
    found = distributed.gather(identity(opened) | flat(opened.config))
    for rank, other in enumerate(found):
        for key, value in found[0].items():
            if other.get(key) != value:
                raise ValueError(
                    f"{key} is {other.get(key)!r} on rank {rank} and {value!r} on rank 0: give all"
                    " the same."
                )


def register_own(config: Config) -> None:
    """Register the drafters and families that a config names by FILE.py:NAME; again is no harm."""
    for spec in config.generation.drafters:
        found = load_named(spec, "generation.drafters")
        register_drafter(found() if isinstance(found, type) else found)
    for spec in config.model.families:
        register_family(load_named(spec, "model.families"))
