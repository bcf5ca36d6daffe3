"""RLHF in one command: python launch/train.py --config configs/quickstart.py --config.any.key=value"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from rlhf_jax import command_line, memory, metrics, rlhf
from rlhf_jax import mesh as meshes
from rlhf_jax.config import Config, validate, validate_models
from rlhf_jax.data.iterator import Batches
from rlhf_jax.data.prompts import Prompts, read, tokenize
from rlhf_jax.generation import tree
from rlhf_jax.generation.engine import Decoding, RoundReport
from rlhf_jax.generation.rollout import History, Tally
from rlhf_jax.generation.sampling import Sampling
from rlhf_jax.inference.rewards import load_reward
from rlhf_jax.model import huggingface, transformer
from rlhf_jax.model.attention import causal_on
from rlhf_jax.model.source import Source, open_source
from rlhf_jax.training.update import UpdateConfig, init_train_state, make_optimizer
from rlhf_jax.types import Model, TrainState

EVALUATION_SEED = 1 << 31  # keeps evaluation's noise apart from training's


def main(argv: list[str]) -> int:
    """The exit code; a mistake of the user's is one sentence on stderr."""
    try:
        train(command_line.read(argv))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        print(
            f"error: the device failed, {str(error).splitlines()[0]} (out of memory? lower the rows)", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print("error: stopped by the keyboard; what was written stays in the workdir.", file=sys.stderr)
        return 130
    return 0


def train(config: Config) -> None:
    """The run that a config describes. Mistakes are found before any weight is loaded."""
    validate(config, jax.device_count())
    source = open_source(config.model.path)
    drafts = tree.parse(config.generation.strategy).drafter == "model"
    draft_source = open_source(config.drafter.path) if drafts else None
    validate_models(config, source.config, draft_source and draft_source.config)
    prompts = load_prompts(config, config.data.train, source)
    held_out = load_prompts(config, config.data.eval, source) if config.evaluation.every else None
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    dtype = compute_dtype(config)
    announce(config, source, draft_source, prompts, mesh, dtype)

    keep_programs(config.compilation_cache)
    stages = make_stages(config, source, mesh, dtype)
    workdir = Path(config.workdir).expanduser()
    writer = metrics.open_run(workdir, config.to_json_best_effort())
    state = init_train_state(load(source, jnp.float32, mesh), stages.optimizer, mesh)
    reference = load(source, dtype, mesh) if config.training.kl_coefficient else None
    drafter = draft_source and rlhf.decoding_weights(load(draft_source, dtype, mesh), dtype, mesh)
    with metrics.Progress(config.steps) as progress:
        evaluate = make_evaluation(config, stages, drafter, held_out, writer, progress)
        state = loop(config, stages, (state, reference, drafter), prompts, evaluate, writer, progress)
    writer.close()
    if held_out:
        metrics.compare(*metrics.before_and_after(workdir))
    huggingface.save(workdir / "policy", state.policy, source.tokenizer, source.stop_tokens, jnp.float32)
    print(f"The trained policy is in {workdir}/policy, every step in {workdir}/metrics.jsonl.")


def loop(config: Config, stages: rlhf.Stages, models, prompts: Prompts, evaluate, writer, progress) -> TrainState:
    """Evaluate every so often; roll out, infer and update `config.steps` times."""
    state, reference, drafter = models
    batches = Batches(len(prompts), config.generation.prompts_per_step, config.seed)
    history = History(config.generation.history_tokens)
    watch = Watch(progress)
    watch("compiling", None)
    rlhf.compile_rounds(state.policy, drafter, config.generation.prompts_per_step, stages)
    for step in range(config.steps):
        evaluate(step, state.policy)
        start = time.perf_counter()
        state, figures, table = rlhf.step(state, reference, drafter, prompts, batches.next(), history, stages, watch)
        figures |= {"step": step, "step/seconds": time.perf_counter() - start}
        writer.write(figures)
        writer.write_samples(step, table)
        progress.finish(figures)
    evaluate(config.steps, state.policy)
    return state


class Watch:
    """Shows each phase, and the rounds of generation as they arrive."""

    def __init__(self, progress: metrics.Progress):
        self._progress, self._tally, self._start = progress, Tally(), 0.0

    def __call__(self, phase: str, report: RoundReport | None) -> None:
        if report is None:
            self._tally, self._start = Tally(), time.perf_counter()
            self._progress.update(phase)
            return
        self._tally.add(report)
        seen = self._tally.metrics(time.perf_counter() - self._start)
        numbers = {name: seen[f"generation/{name}"] for name in ("tokens_per_second", "tokens_per_round")}
        self._progress.update(phase, live_rows=report.live, **numbers)


def make_evaluation(config: Config, stages: rlhf.Stages, drafter, held_out: Prompts | None, writer, progress):
    """A function of (updates done, policy) that measures the policy on held-out prompts when it is time to."""
    asked = config.evaluation
    measures = {"reward": stages.reward} | {name: load_reward(spec) for name, spec in config.reward.metrics.items()}
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
    decoding = dataclasses.replace(stages.decoding, sampling=sampling, seed=config.seed ^ EVALUATION_SEED)

    def evaluate(step: int, policy: Model) -> None:
        if held_out is None or (step % asked.every and step < config.steps):
            return
        means, table = rlhf.evaluate(
            policy, drafter, held_out, measures, decoding, stages, asked.samples_per_prompt, Watch(progress)
        )
        writer.write_evaluation(step, means, table)

    return evaluate


def load_prompts(config: Config, path: str, source: Source) -> Prompts:
    """The prompts of a file, rendered through the model's chat template and filtered by length."""
    data = config.data
    return tokenize(read(path, data.prompt_key), source.tokenizer, data.system, data.max_prompt_tokens)


def compute_dtype(config: Config):
    """bfloat16 where the chip is fast at it, float32 on a CPU, or what the config names."""
    named = config.model.compute_dtype
    return jnp.dtype(("bfloat16" if _fast_at_bfloat16(jax.devices()[0]) else "float32") if named == "auto" else named)


def _fast_at_bfloat16(device) -> bool:
    """A TPU, or an NVIDIA GPU since Ampere."""
    return device.platform == "tpu" or float(getattr(device, "compute_capability", 0) or 0) >= 8


def load(source: Source, dtype, mesh: jax.sharding.Mesh) -> Model:
    """The weights, split as training wants them, each device reading its own slices."""
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), source.config, dtype))
    return source.load(dtype, meshes.model_shardings(shapes, mesh, "training"))


def make_stages(config: Config, source: Source, mesh: jax.sharding.Mesh, dtype) -> rlhf.Stages:
    """What stays the same from step to step."""
    generation, training = config.generation, config.training
    decoding = Decoding(
        sampling=Sampling(generation.temperature, generation.top_k),
        strategy=tree.parse(generation.strategy),
        stop_tokens=source.stop_tokens,
        rows=generation.rows,
        fewest_rows=generation.fewest_rows,
        slots=config.data.max_prompt_tokens + generation.max_new_tokens,
        seed=config.seed,
        acceptance=generation.acceptance,
        history=generation.history_tokens,
    )
    update = UpdateConfig(
        epochs=training.epochs,
        minibatches=training.minibatches,
        micro_rows=training.microbatch_rows,
        bucket=training.length_bucket,
        temperature=generation.temperature,
        clip_low=training.clip_low,
        clip_high=training.clip_high,
        kl_weight=training.kl_coefficient,
        dtype=dtype,
        remat=training.remat,
        attend=causal_on(mesh, source.config.num_kv_heads),
        seed=config.seed,
    )
    return rlhf.Stages(
        decoding=decoding,
        training=update,
        optimizer=make_optimizer(
            training.learning_rate,
            warmup_steps=training.warmup_steps,
            max_grad_norm=training.max_grad_norm,
            weight_decay=training.weight_decay,
        ),
        reward=load_reward(config.reward.function),
        tokenizer=source.tokenizer,
        mesh=mesh,
        dtype=dtype,
        samples_per_prompt=generation.samples_per_prompt,
        max_new_tokens=generation.max_new_tokens,
    )


def keep_programs(folder: str) -> None:
    """Keep compiled programs in a folder between runs."""
    if folder:
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def announce(config: Config, source: Source, drafter: Source | None, prompts: Prompts, mesh, dtype) -> None:
    """Print what the run will use; raise ValueError where it does not fit the devices."""
    parts = memory.plan(config, source.config, drafter and drafter.config, dict(mesh.shape), dtype)
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), source.config, dtype))
    unsplit = meshes.unsplit(shapes, mesh, "training")
    known = memory.device_memory(config, jax.devices()[0])
    if known is not None:
        memory.check(parts, known)
    generation = config.generation
    samples = generation.prompts_per_step * generation.samples_per_prompt
    sizes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    dropped = "".join(f", {count} {reason} dropped" for reason, count in prompts.dropped.items())
    rows = [
        (
            "model",
            f"{source.path.name} ({source.config.num_layers} layers of {source.config.width}), {dtype.name}",
        ),
        ("devices", f"{jax.device_count()} x {jax.devices()[0].device_kind} ({sizes})"),
        ("prompts", f"{len(prompts)} from {config.data.train}{dropped}"),
        (
            "a step",
            f"{samples} samples, up to {samples * generation.max_new_tokens} tokens, {generation.strategy}",
        ),
        ("workdir", config.workdir),
        *(("not split", line) for line in unsplit),
        ("memory", "\n".join(memory.table(parts))),
    ]
    metrics.describe(f"rlhf_jax: GRPO, {config.steps} steps", rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
