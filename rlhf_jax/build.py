"""From a config to all that a run consists of; everything is checked before any weight is
loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pallas_kernels.dispatch import Kernels, choose
from rlhf_jax import mesh as meshes
from rlhf_jax.collect import decoding_weights
from rlhf_jax.config import derived, validation
from rlhf_jax.config.schema import Config, flat
from rlhf_jax.data.batches import Batches
from rlhf_jax.data.prompts import Prompts, read, tokenize
from rlhf_jax.generation.history import History
from rlhf_jax.generation.precompile import BackgroundCompiler
from rlhf_jax.generation.requests import GenerationConfig
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.strategy import prior
from rlhf_jax.generation.strategy.cost import RATES
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.inference.values import critic_of
from rlhf_jax.model import kernels as laid
from rlhf_jax.model import transformer
from rlhf_jax.model.attention import causal_on
from rlhf_jax.model.weights.source import Source, digest, open_source
from rlhf_jax.reallocation import planner
from rlhf_jax.reallocation.planner import ClusterView, Reallocation
from rlhf_jax.rewards.combination import Scorer, Term, weighted
from rlhf_jax.rewards.models import RewardModel, model_scorer
from rlhf_jax.rewards.sharing import shared_out
from rlhf_jax.rewards.workers import Workers
from rlhf_jax.runtime import distributed
from rlhf_jax.state import Controller, FrozenModels, HostState, SpeculationState, Stages
from rlhf_jax.training import kl as shaping
from rlhf_jax.training.advantages import ESTIMATORS, EstimatorConfig
from rlhf_jax.training.distill import Distillation, student_config, student_of, with_student
from rlhf_jax.training.experience import AdvantageConfig
from rlhf_jax.training.losses import AGGREGATES
from rlhf_jax.training.update import Optimizers, UpdateConfig, init_train_state, make_optimizer
from rlhf_jax.types import Model, ModelConfig, ModelConfigs, TrainState

# What may change between a checkpoint and the run that goes on from it: names, or how they begin.
FREE = (
    "workdir",
    "steps",
    "dry_run",
    "watchdog_seconds",
    "compilation_cache",
    "checkpoint.",
    "mesh.",
    "kernels.",
    "reward.workers",
    "reward.seconds",
    "generation.max_rows",
    "generation.min_rows",
    "generation.reallocate",
    "generation.fuse_inference",
    "training.microbatch_rows",
)
# tokens that are remembered of each held-out prompt: its last samples are the next one's drafts
EVERYTHING = 1 << 40


@dataclasses.dataclass(frozen=True)
class Run:
    """What a config describes, opened and checked; no weight is loaded."""

    config: Config
    policy: Source
    drafter: Source | None
    critic: Source | None  # None without one; the policy's own source where its trunk is taken
    rewards: tuple[Source, ...]
    prompts: Prompts
    held_out: Prompts | None
    mesh: jax.sharding.Mesh
    dtype: Any

    @property
    def models(self) -> ModelConfigs:
        """The shapes of all models."""
        drafter, critic = (source and source.config for source in (self.drafter, self.critic))
        drafter = self.student or drafter
        return ModelConfigs(
            self.policy.config, drafter, critic, tuple(source.config for source in self.rewards)
        )

    @property
    def student(self) -> ModelConfig | None:
        """The shape of a drafter that is a student of the policy."""
        layers = derived.has_drafter(self.config) and self.config.drafter.layers
        return student_config(self.policy.config, layers) if layers else None

    @property
    def kernels(self) -> tuple[Kernels, dict[str, str]]:
        """The implementation of each kernel, and the reason for it by the kernel's name."""
        models = [laid.shape_of(model) for model in self.models[:2] if model]
        return choose(self.config.kernels, self.mesh.devices.flat[0], self.dtype.itemsize, models)

    @property
    def workdir(self) -> Path:
        """The folder in which all of the run lives."""
        return Path(self.config.workdir).expanduser()


def prepare(config: Config) -> Run:
    """Open what the config names. Raises ValueError or OSError, in one sentence, for the first
    thing that is wrong.
    """
    validation.validate(config, meshes.count_devices(), distributed.count())
    policy = open_source(config.model.path)
    drafter = (
        open_source(config.drafter.path)
        if derived.has_drafter(config) and config.drafter.path
        else None
    )
    critic = None
    if config.objective == "reward" and ESTIMATORS[config.advantage.estimator].critic:
        critic = open_source(config.critic.path) if config.critic.path else policy
    rewards = tuple(open_source(path) for path in config.reward.models)
    run = Run(
        config=config,
        policy=policy,
        drafter=drafter,
        critic=critic,
        rewards=rewards,
        prompts=load_prompts(config, config.data.train, policy),
        held_out=load_prompts(config, config.data.eval, policy)
        if config.evaluation.every
        else None,
        mesh=meshes.make_mesh(
            config.mesh.data, config.mesh.fsdp, config.mesh.tensor, slices=config.mesh.slices
        ),
        dtype=compute_dtype(config),
    )
    validation.validate_models(config, run.models)
    validation.validate_student(config, policy.config, drafter and drafter.config)
    return run


def load_prompts(config: Config, path: str, source: Source) -> Prompts:
    """The prompts of a file, rendered through the model's chat template and filtered by length."""
    data = config.data
    return tokenize(
        read(path, data.prompt_key), source.tokenizer, data.system, data.max_prompt_tokens
    )


def compute_dtype(config: Config):
    """bfloat16 where the chip is fast at it, float32 on a CPU, or what the config names."""
    named = config.model.compute_dtype
    return jnp.dtype(
        ("bfloat16" if _fast_at_bfloat16(jax.devices()[0]) else "float32")
        if named == "auto"
        else named
    )


def _fast_at_bfloat16(device) -> bool:
    """A TPU, or an NVIDIA GPU since Ampere."""
    return device.platform == "tpu" or float(getattr(device, "compute_capability", 0) or 0) >= 8


def identity(run: Run) -> dict[str, Any]:
    """What a checkpoint must share with the run that goes on from it, by name."""
    models = {"policy": run.policy.config, "critic": run.critic and run.critic.config}
    shapes = {
        f"the {name}'s {field}": value
        for name, model in models.items()
        for field, value in (dataclasses.asdict(model) if model else {}).items()
    }
    loaded = {"policy": run.policy, "critic": run.critic} | dict(
        zip(run.config.reward.models, run.rewards, strict=True)
    )
    weights = {
        f"the weights of the {name}": digest(source) for name, source in loaded.items() if source
    }
    files = {"data.train": run.prompts, "data.eval": run.held_out}
    prompts = {f"the prompts of {name}": _digest(found) for name, found in files.items() if found}
    return shapes | weights | prompts | settings(run.config)


def settings(config: Config) -> dict[str, Any]:
    """The config's values that make a run what it is, by dotted name."""
    return {key: value for key, value in flat(config).items() if not key.startswith(FREE)}


def _digest(prompts: Prompts) -> str:
    """Of the tokens and of whatever else a reward may read in the rows."""
    tokens = b"".join(np.append(tokens, -1).tobytes() for tokens in prompts.tokens)
    rows = json.dumps(prompts.rows, sort_keys=True, default=repr).encode()
    return hashlib.sha256(tokens + rows).hexdigest()[:16]


def make_stages(
    run: Run, optimizers: Optimizers, stack: contextlib.ExitStack, observe: Callable[[], None]
) -> Stages:
    """What stays the same from step to step; the stack ends the reward's processes, `observe` hears
    them work.
    """
    config = run.config
    generation = run.config.generation
    judges = _reward_models(run)
    return Stages(
        decoding=_decoding(run),
        shaping=_shaping(config),
        training=_training(run),
        optimizers=optimizers,
        reward=functools.partial(weighted, _terms(run, judges, stack, observe)),
        reward_models=judges,
        controller=_controller(config),
        tokenizer=run.policy.tokenizer,
        mesh=run.mesh,
        dtype=run.dtype,
        prompts_per_step=generation.prompts_per_step,
        samples_per_prompt=generation.samples_per_prompt,
        max_new_tokens=generation.max_new_tokens,
        failed=config.reward.failed,
        resample=generation.resample,
        repeated_noise=generation.repeated_noise,
        ahead=_ahead(config, stack),
        draft_attend=causal_on(run.mesh, (run.models.drafter or run.policy.config).num_kv_heads),
        distillation=_distillation(run),
        plan_reallocation=_decide(run),
        in_turn=config.deterministic,
        scoring=_scoring(run) if generation.fuse_inference else 0.0,
    )


def _scoring(run: Run) -> float:
    """Seconds, about, in which a slice scores a token under policy, reference, critic and reward
    models.
    """
    devices = run.mesh.size / run.mesh.shape["slices"]
    referred = [run.policy.config] if derived.needs_reference(run.config) else []
    models = [run.policy.config, *referred, *filter(None, [run.models.critic]), *run.models.rewards]
    flops = sum(prior.work(model, run.dtype.itemsize).token_flops for model in models)
    return flops / (RATES[jax.default_backend()][1] * devices)


def _decide(run: Run) -> Callable[[ClusterView], Reallocation] | None:
    """The plan of where samples run. Several processes plan by the clock: not in a run that repeats
    itself.
    """
    by_clock = run.config.deterministic and distributed.started()
    planned = run.config.generation.reallocate and run.mesh.shape["slices"] > 1 and not by_clock
    return planner.plan_reallocation if planned else None


def _ahead(config: Config, stack: contextlib.ExitStack) -> BackgroundCompiler | None:
    """Compiles adaptive strategies. A run that is to repeat itself does without: what is ready
    depends on the clock.
    """
    if config.deterministic or not derived.adaptive(config):
        return None
    ahead = BackgroundCompiler()
    stack.callback(ahead.close)
    return ahead


def _decoding(run: Run) -> GenerationConfig:
    config = run.config
    generation = run.config.generation
    return GenerationConfig(
        sampling=Sampling(generation.temperature, generation.top_k),
        strategies=derived.strategies(config).strategies,
        stop_tokens=run.policy.stop_tokens,
        max_rows=generation.max_rows,
        min_rows=generation.min_rows,
        max_length=config.data.max_prompt_tokens + generation.max_new_tokens,
        seed=config.seed,
        acceptance=generation.acceptance,
        history=generation.history_tokens,
        kernels=run.kernels[0],
    )


def _shaping(config: Config) -> AdvantageConfig:
    advantage = config.advantage
    reward = config.reward
    group = config.generation.samples_per_prompt
    return AdvantageConfig(
        estimator=advantage.estimator,
        estimation=EstimatorConfig(group, advantage.discount, advantage.gae_lambda),
        kl=config.kl.estimator,
        kl_in_reward=config.kl.place == "reward",
        missing_end=reward.missing_end,
        clip=reward.clip,
        whiten=reward.whiten,
        drop_overlong=config.training.drop_overlong,
    )


def _training(run: Run) -> UpdateConfig:
    config = run.config
    training = run.config.training
    return UpdateConfig(
        epochs=training.epochs,
        minibatches=training.minibatches,
        microbatch_rows=training.microbatch_rows,
        bucket=training.length_bucket,
        temperature=config.generation.temperature,
        clip_low=training.clip_low,
        clip_high=training.clip_high,
        value_clip=config.critic.clip,
        aggregate=AGGREGATES[training.aggregate],
        response_slots=config.generation.max_new_tokens,
        kl=shaping.KL[config.kl.estimator],
        entropy_weight=training.entropy_coefficient,
        target_kl=training.target_kl,
        dtype=run.dtype,
        remat=training.remat,
        seed=config.seed,
        attend=causal_on(run.mesh, run.policy.config.num_kv_heads),
        law=laid.law(run.kernels[0], run.mesh),
        critic_attend=causal_on(run.mesh, (run.critic or run.policy).config.num_kv_heads),
    )


def make_optimizers(run: Run) -> Optimizers:
    """The policy's, and the critic's where there is one; a policy that stays as it is has no
    moments.
    """
    if run.config.objective == "distill":
        return Optimizers(policy=optax.identity())
    training = run.config.training
    critic = run.config.critic
    make = functools.partial(
        make_optimizer, max_grad_norm=training.max_grad_norm, weight_decay=training.weight_decay
    )
    return Optimizers(
        policy=make(training.learning_rate, warmup_steps=training.warmup_steps),
        critic=make(critic.learning_rate, warmup_steps=critic.warmup_steps) if run.critic else None,
    )


def _student_optimizer(run: Run) -> optax.GradientTransformation | None:
    """None where there is no student, or it stays as it is."""
    rate = run.config.drafter.learning_rate
    training = run.config.training
    return (
        make_optimizer(rate, max_grad_norm=training.max_grad_norm) if run.student and rate else None
    )


def _distillation(run: Run) -> Distillation | None:
    """A student made for later learns from all samples, as often as training says; one beside the
    policy once.
    """
    optimizer = _student_optimizer(run)
    config = _training(run)
    if optimizer is None:
        return None
    if run.config.objective == "distill":
        generation = run.config.generation
        return Distillation(
            optimizer, config, generation.prompts_per_step * generation.samples_per_prompt
        )
    samples = run.config.drafter.samples
    rows = min(samples, config.microbatch_rows)
    return Distillation(
        optimizer,
        dataclasses.replace(config, epochs=1, minibatches=1, microbatch_rows=rows),
        samples,
    )


def _controller(config: Config) -> Controller:
    """The next KL coefficient: steered to the target, or the one there is."""
    if not config.kl.target:
        return lambda coefficient, kl, samples: coefficient
    return lambda coefficient, kl, samples: shaping.adapt_kl(
        coefficient, kl, config.kl.target, samples, config.kl.horizon
    )


def _terms(
    run: Run,
    judges: Mapping[str, RewardModel],
    stack: contextlib.ExitStack,
    observe: Callable[[], None],
) -> list[Term]:
    """The summands of the reward: functions in their processes, models on the mesh."""
    reward = run.config.reward
    make = functools.partial(function_scorer, run.config, stack=stack, observe=observe)
    scorers = [
        *map(make, reward.functions),
        *(model_scorer(judge, run.mesh) for judge in judges.values()),
    ]
    weights = map(float, reward.weights or (1.0,) * len(scorers))
    return [
        Term(*term) for term in zip(derived.term_names(run.config), weights, scorers, strict=True)
    ]


def function_scorer(
    config: Config, spec: str, stack: contextlib.ExitStack, observe: Callable[[], None]
) -> Scorer:
    """A reward function in worker processes, which the stack ends and `observe` hears of while they
    work.

    Each process of the run has workers of its own, for its share of the answers.
    """
    seconds = math.inf if config.deterministic else config.reward.seconds
    return shared_out(stack.enter_context(Workers(spec, config.reward.workers, seconds, observe)))


def _reward_models(run: Run) -> dict[str, RewardModel]:
    """By the names of their terms, which follow those of the functions."""
    names = derived.term_names(run.config)[len(run.config.reward.functions) :]
    training = run.config.training
    how = {"rows": training.microbatch_rows, "bucket": training.length_bucket}
    return {
        name: RewardModel(source, load(source, run.dtype, run.mesh), **how)
        for name, source in zip(names, run.rewards, strict=True)
    }


def load(source: Source, dtype, mesh: jax.sharding.Mesh) -> Model:
    """The weights, split as training wants them, each device reading its own slices."""
    shapes = weight_shapes(source.config, dtype)
    return source.load(dtype, meshes.model_shardings(shapes, mesh, "training"))


def weight_shapes(config: ModelConfig, dtype) -> Model:
    """Shapes and dtypes of a model, layers stacked."""
    return jax.eval_shape(lambda: transformer.init(jax.random.key(0), config, dtype))


def new_state(run: Run, optimizers: Optimizers) -> TrainState:
    """The state before the first step."""
    critic = run.critic and _critic(load(run.critic, jnp.float32, run.mesh))
    state = init_train_state(load(run.policy, jnp.float32, run.mesh), optimizers, run.mesh, critic)
    if run.student is None:
        return state
    source = load(run.drafter, jnp.float32, run.mesh) if run.drafter else state.policy
    return with_student(state, source, run.student.num_layers, _student_optimizer(run), run.mesh)


def state_template(run: Run, optimizers: Optimizers) -> TrainState:
    """Shapes and places of the state, for one that is restored."""

    def make() -> TrainState:
        critic = run.critic and _critic(transformer.init(key, run.critic.config, jnp.float32))
        state = init_train_state(
            transformer.init(key, run.policy.config, jnp.float32), optimizers, critic=critic
        )
        student = run.student
        return (
            state
            if student is None
            else with_student(state, state.policy, student.num_layers, _student_optimizer(run))
        )

    key = jax.random.key(0)
    shapes = jax.eval_shape(make)
    shardings = meshes.model_shardings(shapes, run.mesh, "training")
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def _critic(model: Model) -> Model:
    """A reward model is a critic already; of a language model the trunk is taken."""
    return model if model.config.scalar_head else critic_of(model)


def new_memory(run: Run) -> HostState:
    """What the host remembers before the first step."""
    config = run.config
    return HostState(
        batches=Batches(len(run.prompts), config.generation.prompts_per_step, config.seed),
        drafting=SpeculationState(History(_remembered(config)), _selector(run)),
        evaluation=SpeculationState(
            History(EVERYTHING if derived.uses_drafter(config, "replay") else 0), _selector(run)
        ),
        kl_start=config.kl.coefficient,
        kl_coefficient=config.kl.coefficient,
    )


def _remembered(config: Config) -> int:
    """Tokens of earlier responses to a prompt: what look-ups read, or what the samples that repeat
    noise replay.
    """
    generation = config.generation
    return max(
        generation.history_tokens, generation.repeated_noise * (generation.max_new_tokens + 1)
    )


def _selector(run: Run) -> Selector | None:
    """What chooses strategies, where that is left open."""
    if not derived.adaptive(run.config):
        return None
    decoding = _decoding(run)
    size = decoding.max_rows, decoding.max_length
    costs = prior.costs(run.models, jax.default_backend(), run.dtype.itemsize, {}, *size)
    return Selector(derived.strategies(run.config), costs, frozen_costs=run.config.deterministic)


def frozen(run: Run) -> FrozenModels:
    """The models that a run does not train, loaded; a student is part of the state, and here as it
    began.
    """
    reference = (
        load(run.policy, run.dtype, run.mesh) if derived.needs_reference(run.config) else None
    )
    if run.student:
        return FrozenModels(reference, student=_begun(run, run.student.num_layers, reference))
    if run.drafter is None:
        return FrozenModels(reference)
    return FrozenModels(
        reference, decoding_weights(load(run.drafter, run.dtype, run.mesh), run.dtype, run.mesh)
    )


def _begun(run: Run, layers: int, reference: Model | None) -> Model | None:
    """The student that `new_state` begins with, where one is kept current beside the policy."""
    if run.config.objective == "distill" or not run.config.drafter.learning_rate:
        return None
    source = reference if run.drafter is None else load(run.drafter, run.dtype, run.mesh)
    student = student_of(source or load(run.policy, run.dtype, run.mesh), layers)
    return jax.device_put(student, meshes.model_shardings(student, run.mesh, "training"))
