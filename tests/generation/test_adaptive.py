"""Strategies that change from round to round: the text stays, nothing compiles at a switch, what is
learned is true.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generated import assert_equal

from rlhf_jax.generation import precompile
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.precompile import BackgroundCompiler
from rlhf_jax.generation.requests import GenerationConfig, Request
from rlhf_jax.generation.speculative import protocol
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.drafters.search import Found, SearchDrafter
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.strategy import candidates, cost, roofline
from rlhf_jax.generation.strategy.acceptance import RANKS
from rlhf_jax.generation.strategy.predict import Choice, Situation
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.mesh import ONE_DEVICE, Layout, make_mesh
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.runtime.compilation import Programs

NAMES = (
    "plain",
    "lookup-chain-1",
    "lookup-chain-6",
    "lookup-tree-2x2",
    "replay-chain-4",
    "replay-chain-8",
    "model-chain-3",
    "model-tree-3x1",
    "replay-chain-8-packed-2",
    "replay-chain-8-packed-3",
)
STRATEGIES = tuple(map(trees.parse, NAMES))
STOP = 7


@dataclasses.dataclass
class Chooser:
    """Chooses as told, whatever it hears, and keeps what it hears."""

    pick: Callable[[Situation], int]  # an index into STRATEGIES
    heard: list = dataclasses.field(default_factory=list)
    asked: list = dataclasses.field(default_factory=list)

    def choose(self, situation) -> Choice:
        wanted = STRATEGIES[self.pick(situation)]
        ready = situation.ready(wanted)
        self.asked.append((wanted, ready, situation))
        return Choice(
            wanted if ready else STRATEGIES[0],
            1.0,
            1.0,
            None if ready else wanted,
            "told",
            1.0,
            1.0,
        )

    def observe_round(self, report) -> None:
        self.heard.append(report)


def moved(model, size: float, seed: int = 5):
    """The weights after a small step in a random direction."""
    leaves, treedef = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return treedef.unflatten(
        [
            leaf + size * jax.random.normal(k, leaf.shape)
            for k, leaf in zip(keys, leaves, strict=True)
        ]
    )


def requests(earlier=None, count: int = 5, new: int = 40) -> list[Request]:
    rng = np.random.default_rng(0)
    texts = earlier or {}
    asked = []
    for i in range(count):
        prompt = rng.integers(0, 300, rng.integers(2, 12)).astype(np.int32)
        ids = tuple(range(4 * i, 4 * i + 4))
        known = {name: texts[name] for name in ids if name in texts}
        asked.append(Request(prompt, ids, int(rng.integers(8, new)), tuple(known.values()), known))
    return asked


def decoding(**changes) -> GenerationConfig:
    base = GenerationConfig(
        Sampling(1.0),
        STRATEGIES,
        (STOP,),
        max_rows=8,
        max_length=64,
        seed=3,
        history=64,
        min_rows=4,  # rows shrink once: each of their numbers has all strategies' programs
    )
    return dataclasses.replace(base, **changes)


def run(target, drafter, how, wanted, **options):
    return {
        sample.sample_id: sample for sample in generate(target, drafter, wanted, how, **options)
    }


def texts_of(samples) -> dict[int, np.ndarray]:
    return {name: np.array(sample.tokens, np.int32) for name, sample in samples.items()}


@pytest.fixture(scope="module")
def earlier(target):
    """What slightly other weights wrote with the same noise."""
    plain = decoding(strategies=STRATEGIES[:1])
    return texts_of(run(moved(target, 3e-4), None, plain, requests()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        pytest.param(Sampling(0.0), marks=pytest.mark.long),
        pytest.param(Sampling(0.7, top_k=20), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_text_is_plain_text_when_every_round_drafts_otherwise(target, drafter, earlier, sampling):
    wanted = requests(earlier)
    plain = run(target, None, decoding(strategies=STRATEGIES[:1], sampling=sampling), wanted)
    rng = np.random.default_rng(2)
    chooser = Chooser(lambda situation: int(rng.integers(len(STRATEGIES))))
    how = decoding(sampling=sampling)
    found = run(target, drafter, how, wanted, selector=chooser)
    assert_equal(target, found, plain, how)
    assert {report.strategy for report in chooser.heard} == set(STRATEGIES)


@pytest.mark.slow
def test_a_changed_policy_replays_most_of_its_earlier_text(target, earlier):
    """Drafts of the same noise are nearly always right; without that noise they are not."""
    how = decoding(strategies=(trees.parse("replay-chain-8"),), stop_tokens=(), max_rows=20)
    plain = decoding(strategies=STRATEGIES[:1], stop_tokens=(), max_rows=20)
    wanted = requests()
    before = texts_of(run(moved(target, 3e-4), None, plain, wanted))
    reports = []
    found = run(target, None, how, requests(before), observe=reports.append)
    assert_equal(target, found, run(target, None, plain, wanted), how)
    tokens, live = (sum(getattr(report, name) for report in reports) for name in ("tokens", "live"))
    assert tokens / live > 3
    other = []
    run(target, None, dataclasses.replace(how, seed=4), requests(before), observe=other.append)
    assert sum(report.tokens for report in other) / sum(report.live for report in other) < 1.5


@pytest.mark.long
def test_rounds_are_packed_where_half_of_the_texts_stray(target, earlier):
    """Verifying costs here, and of the samples that wait for rows half have an earlier text of
    somebody else's.
    """
    plain = decoding(strategies=STRATEGIES[:1], stop_tokens=())
    own = texts_of(run(target, None, plain, requests(earlier)))
    mixed = {name: own[name if name % 2 else (name + 4) % len(own)] for name in own}
    machine = roofline.Machine(roofline.Roofline(1e-3, 1e-6, 1e-3, 1e-8, 1e-3, 1e-2), None, 1e-4)
    selector = Selector(
        candidates.adaptive(["replay"], 8), cost.Costs(machine, machine), frozen_costs=True
    )
    reports = []
    how = dataclasses.replace(plain, strategies=selector.candidates.strategies)
    for _ in range(2):
        reports.clear()
        found = run(target, None, how, requests(mixed), selector=selector, observe=reports.append)
        selector.stage_ended(kept=1.0)
        assert_equal(target, found, run(target, None, plain, requests()), how)
    full = [report for report in reports if report.live == report.rows == 8]
    packed = [report for report in full if report.strategy.packed]
    assert len(packed) > 0.6 * len(full)
    drafted = [
        report.drafted / max(1, report.live * len(report.strategy.parents)) for report in packed
    ]
    assert max(drafted) < 1
    assert sum(report.accepted for report in packed) > 0.5 * sum(
        report.drafted for report in packed
    )


@pytest.mark.slow
@pytest.mark.parametrize("meshed", [False, True], ids=["alone", "mesh"])
def test_a_switch_compiles_nothing(target, drafter, earlier, meshed, compilations):
    """What is not compiled is not used; when it is, a whole run with all switches compiles nothing
    more.
    """
    layout = Layout(role="generation")
    if meshed:
        layout = Layout(make_mesh(1, -1, 1, jax.devices()[:2]), "generation")
        target, drafter = (jax.device_put(m, model_shardings(m, layout)) for m in (target, drafter))
    how = decoding(max_length=72, min_rows=8, history=0)
    compiler = BackgroundCompiler(Programs())
    names = "plain", "lookup-chain-6", "replay-chain-8", "model-chain-3", "replay-chain-8-packed-3"
    turns = list(map(NAMES.index, names))

    def chooser() -> Chooser:
        made = Chooser(lambda situation: turns[len(made.asked) % len(turns)])
        return made

    options = {"layout": layout, "compiler": compiler}
    play = functools.partial(run, target, drafter, how, requests(earlier), **options)
    first = chooser()
    again = chooser()
    deadline = time.monotonic() + 120
    while not all(compiler.ready(STRATEGIES[turn], 8, how, layout) for turn in turns):
        assert time.monotonic() < deadline, "never compiled"
        play(selector=first)
        while compiler.programs.left and time.monotonic() < deadline:
            time.sleep(0.01)
    assert not all(ready for _, ready, _ in first.asked)
    with compilations() as seen:
        play(selector=again)
    compiler.programs.close()
    assert not seen
    assert all(ready for _, ready, _ in again.asked) and len(again.asked) > 2 * len(turns)


def test_a_strategy_that_cannot_be_compiled_is_left_out(target, monkeypatch):
    """It is said once, told to the selector, and the run goes on without it."""
    chooser = Chooser(lambda situation: 1)
    compiler = BackgroundCompiler(Programs())
    real = precompile.compile_only

    def fail(*arguments, **options):
        raise RuntimeError("no room")

    monkeypatch.setattr(precompile, "compile_only", fail)
    how = decoding(strategies=STRATEGIES[:3], max_length=80)
    with pytest.warns(UserWarning, match="left out: no room"):
        run(target, None, how, requests(), selector=chooser, compiler=compiler)
    monkeypatch.setattr(precompile, "compile_only", real)
    assert not any(ready for _, ready, _ in chooser.asked)
    assert compiler.failed(8, how, ONE_DEVICE) == {STRATEGIES[1]}
    assert any(STRATEGIES[1] in situation.failed for _, _, situation in chooser.asked)


def test_finished_siblings_are_looked_up(target):
    """Four samples that write the same: the last one reads what the first ones wrote."""
    how = decoding(
        strategies=(trees.parse("lookup-chain-4"),),
        stop_tokens=(),
        max_rows=1,
        sampling=Sampling(0.0),
    )
    prompt = np.array([5, 9, 2], np.int32)
    samples = run(target, None, how, [Request(prompt, (0, 1, 2), 30)])
    assert samples[0].tokens == samples[1].tokens == samples[2].tokens
    assert samples[2].rounds < 0.5 * samples[0].rounds


@pytest.mark.slow
def test_running_siblings_are_looked_up(target):
    """Two rows write the same text, one of them earlier: the later one reads the other's tokens as
    they come.
    """
    how = decoding(
        strategies=(trees.parse("lookup-chain-4"),),
        stop_tokens=(),
        max_rows=2,
        sampling=Sampling(0.0),
    )
    how = dataclasses.replace(how, history=0)
    prompt = np.array([5, 9, 2], np.int32)
    alone = [Request(prompt, (0,), 40)]
    short = [Request(np.array([1, 2], np.int32), (9,), 12)]
    together = run(
        target, None, how, [Request(prompt, (0,), 40), *short, Request(prompt, (1,), 40)]
    )
    assert together[1].tokens == run(target, None, how, alone)[0].tokens
    # Different requests are no siblings; the same request is.
    shared = run(
        target, None, dataclasses.replace(how, max_rows=2), [*short, Request(prompt, (0, 1), 40)]
    )
    assert shared[1].rounds < together[1].rounds


@pytest.mark.slow
def test_situations_and_reports_say_what_is(target, drafter, earlier):
    chooser = Chooser(lambda situation: NAMES.index("model-chain-3") if situation.live <= 4 else 0)
    how = decoding(stop_tokens=())
    wanted = requests(earlier)
    run(target, drafter, how, wanted, selector=chooser)
    for _, _, situation in chooser.asked:
        counts = situation.classes["replay"]
        assert counts.shape == (2, 4) and counts.sum() == situation.live <= situation.rows
        assert counts[1].sum() == situation.live  # every prompt was rolled out before
        assert situation.context >= situation.live
    lags = [situation.draft_lag for _, _, situation in chooser.asked]
    # what the draft model has not seen is fed before it drafts
    assert max(lags) > 5 and lags[-1] <= 2 * 4
    for report in chooser.heard:
        assert report.tokens >= report.live and set(report.observations) >= {"lookup", "replay"}
        assert ("model" in report.observations) == (report.strategy.drafter == "model")
    ends = [
        report for report in chooser.heard if report.strategy.drafter == "model" and report.live
    ]
    hits = sum(
        (found := report.observations["model"]).ranks.size and (found.ranks == 0).sum()
        for report in ends
    )
    assert hits == sum(report.accepted for report in ends) > 0


def test_rounds_are_timed_only_when_nothing_else_ran(target):
    """A round's seconds are its own: none at the first, none where rows were admitted."""
    chooser = Chooser(lambda situation: 0)
    run(target, None, decoding(strategies=STRATEGIES[:5]), requests(count=8), selector=chooser)
    assert chooser.heard[0].seconds is None
    assert all(report.seconds is None or report.seconds > 0 for report in chooser.heard)
    assert not jnp.isnan(jnp.array([report.seconds or 0.0 for report in chooser.heard])).any()


class LastTokenDrafter(SearchDrafter):
    """Drafts that the last token repeats."""

    name = "toy"

    def search(self, state, siblings, depth):
        last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
        tokens = jnp.full((len(last), depth, RANKS), -1).at[:, :, 0].set(last)
        return Found(tokens, jnp.full(len(last), 2, jnp.int8))


@pytest.mark.slow
def test_a_drafter_that_is_registered_is_chosen_among_the_others(target, monkeypatch):
    """It is observed by looking back and by its drafts, and the text stays plain text."""
    monkeypatch.setitem(protocol.DRAFTERS, "toy", LastTokenDrafter())
    machine = cost.Machine(cost.Roofline(1e-3, 1e-6, 1e-3, 1e-8, 1e-3, 1e-2), None, 1e-4)
    choices = candidates.adaptive(["lookup", "toy"], 4)
    selector = Selector(choices, cost.Costs(machine, machine), frozen_costs=True)
    plain = decoding(strategies=STRATEGIES[:1], sampling=Sampling(0.2), stop_tokens=())
    how = dataclasses.replace(plain, strategies=choices.strategies)
    reports = []
    found = run(target, None, how, requests(), selector=selector, observe=reports.append)
    assert_equal(target, found, run(target, None, plain, requests()), how)
    assert any(report.strategy.drafter == "toy" for report in reports)
    assert all(set(report.observations) == {"lookup", "toy"} for report in reports)
