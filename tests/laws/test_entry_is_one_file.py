"""A drafter, an estimator, a reward, an algorithm, a model family is a file and a line: `toys.py`
has one of each, and no file of the package knows of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import runpy
from typing import Any

import jax
import numpy as np
import pytest
import tiny_run
import toys
from generated import assert_equal
from pages import ADAPTIVE, CONFIG, page, played, row
from places import ROOT

from rlhf_jax.config import algorithms, default
from rlhf_jax.generation import drafting
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.requests import GenerationConfig, Request
from rlhf_jax.generation.speculative import protocol, tree
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.strategy import cost
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.losses.advantages import ESTIMATORS, EstimatorConfig
from rlhf_jax.models import families
from rlhf_jax.models.files import huggingface_config
from rlhf_jax.models.files.source import open_source
from rlhf_jax.models.transformer import init, unstack
from rlhf_jax.monitoring import metrics
from rlhf_jax.rewards import sources
from rlhf_jax.rewards.combination import Response
from rlhf_jax.rewards.sources import term_names
from rlhf_jax.setup.validation import validate
from rlhf_jax.training.experience import AdvantageConfig, compute_advantages

REGISTRIES: tuple[dict[str, Any], ...] = (
    protocol.DRAFTERS,
    ESTIMATORS,
    sources.SOURCES,
    algorithms.ALGORITHMS,
    families.FAMILIES,
)
NAMES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture
def restored():
    """What a test registers is unknown again after it."""
    before = [dict(registry) for registry in REGISTRIES]
    yield
    for registry, entries in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.fixture
def registered(restored):
    """The toys are registered."""
    toys.register()


def config_of(tmp_path, **changes):
    """A valid config whose prompts are there."""
    tiny_run.make_files(tmp_path)
    config = default()
    config.model.path = "somewhere"
    config.data.train = str(tmp_path / "prompts.jsonl")
    config.reward.functions = ("toy://length/3",)
    config.mesh.fsdp = 1
    for key, value in changes.items():
        config.update_from_flattened_dict({key.replace("__", "."): value})
    return config


def test_a_run_of_five_toys(restored, tmp_path, monkeypatch, capsys):
    """A config file that imports the user's own is all that it takes."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    tiny_run.make_files(tmp_path)
    own = "import toys\nfrom rlhf_jax.config import default as get_config\ntoys.register()\n"
    (tmp_path / "config.py").write_text(own)
    model = tiny_run.make_model(tmp_path / "tiny", family="qwen3")
    said = (model / "config.json").read_text()
    (model / "config.json").write_text(said.replace('"qwen3"', '"toy"'))
    changes = {
        "algorithm__name": "toy",
        "steps": 1,
        "algorithm__estimator": "toy",
        "reward__functions": "toy://length/3",
        "generation__strategy": "adaptive",
        "generation__max_new_tokens": 4,
        "evaluation__every": 0,
    }
    launch = runpy.run_path(str(ROOT / "launch" / "train.py"), run_name="launch")
    assert launch["main"](tiny_run.arguments(tmp_path, model, **changes)) == 0
    assert "guessing, 1 step" in capsys.readouterr().out

    folder = tmp_path / "run"
    (line,) = tiny_run.lines(folder / "metrics.jsonl")
    assert line["reward/length/mean"] < 0 and line["toy/samples"] == 16
    assert {"strategy/share_toy", "strategy/acceptance_toy"} <= line.keys()
    report = (folder / "report.html").read_text()
    assert "guessing" in report and "toy/samples" in report
    assert open_source(folder / "policy").config.family == "toy"


@pytest.mark.parametrize("name", ["toy-chain-2", "adaptive"])
def test_text_by_the_drafter_is_plain_text(registered, tmp_path, name):
    """At temperature 1, of a model so sure of itself that drafts are accepted."""
    model = unstack(init(jax.random.key(0), tiny_run.CONFIG))
    model = dataclasses.replace(model, norm=8 * model.norm)
    config = config_of(tmp_path, generation__strategy=name, generation__max_new_tokens=6)
    validate(config, num_devices=1)
    choices = drafting.strategies(config)
    assert set(choices.drafters) == ({"toy"} if name != "adaptive" else {"lookup", "toy"})

    prompts = np.random.default_rng(0).integers(0, 300, (4, 3)).astype(np.int32)
    wanted = [Request(p, tuple(range(4 * i, 4 * i + 4)), 40) for i, p in enumerate(prompts)]
    plain = GenerationConfig(
        Sampling(1.0), (tree.PLAIN,), (), max_rows=8, max_length=64, seed=0, min_rows=8
    )
    how = dataclasses.replace(plain, strategies=choices.strategies)
    machine = cost.Machine(cost.Roofline(1e-3, 1e-6, 1e-3, 1e-8, 1e-3, 1e-2), None, 1e-4)
    costs = cost.Costs(machine, machine)
    selector = Selector(choices, costs, frozen_costs=True) if name == "adaptive" else None
    reports = []
    drafted = generate(model, None, wanted, how, selector=selector, observe=reports.append)
    found = {one.sample_id: one for one in drafted}
    expected = {one.sample_id: one for one in generate(model, None, wanted, plain)}
    assert_equal(model, found, expected, how)

    own = [report for report in reports if report.strategy.drafter == "toy"]
    assert sum(report.accepted for report in own) > 0
    # What cannot look back is known by its own drafts alone.
    assert all(("toy" in one.observations) == (one in own) for one in reports)
    if selector is not None:
        assert selector.acceptance["toy"].drafts > 0
        # Of class 0 nothing is known, which is not that there is nothing to draft.
        columns = selector.candidates.paths["toy"].columns
        assert (selector.expectations.tokens[0, columns] > 1).all()
        assert selector.metrics()["strategy/share_toy"] > 0


def test_the_estimator_turns_rewards_into_advantages(registered, tmp_path):
    validate(config_of(tmp_path, algorithm__estimator="toy"), num_devices=1)
    rewards = np.array([1, -2], np.float32)
    mask = np.array([[True, True], [True, False]])
    nothing = np.zeros((2, 2), np.float32)
    config = AdvantageConfig("toy", EstimatorConfig(2))
    _, advantages, _, _ = compute_advantages(
        rewards, np.ones(2, bool), mask, nothing, nothing, None, np.float32(0), config
    )
    np.testing.assert_allclose(advantages, [[2, 2], [-4, 0]])


def test_the_source_scores_responses_of_a_config(registered, tmp_path):
    config = config_of(tmp_path)
    validate(config, num_devices=1)
    assert term_names(config) == ["length"]
    with contextlib.ExitStack() as stack:
        spec = config.reward.functions[0]
        score = stack.enter_context(sources.source_of(spec).open(spec, config, lambda: None))
        scores = score([Response("", [], {}, text) for text in ("abc", "", "a")])
    np.testing.assert_array_equal(scores.values, [0, np.nan, -2])
    assert scores.failures == {1: "is empty"}


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [("toy://length/x", "must end in a length"), ("judge://host", "no source is registered for")],
)
def test_a_spec_that_cannot_work_is_refused(registered, tmp_path, spec, sentence):
    with pytest.raises(ValueError, match=sentence):
        validate(config_of(tmp_path, reward__functions=(spec,)), num_devices=1)


def test_the_algorithm_is_found_by_its_name(registered, tmp_path):
    config = config_of(tmp_path, algorithm__name="toy")
    validate(config, num_devices=1)
    assert algorithms.algorithm_of(config).title_of(config) == "guessing"


def test_config_json_of_the_family_is_written_and_read(registered, tmp_path):
    config = dataclasses.replace(tiny_run.CONFIG, family="toy")
    written = huggingface_config.config_json(config, (1,), np.dtype(np.float32))
    assert written["architectures"] == ["ToyForCausalLM"] and written["model_type"] == "toy"
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert huggingface_config.read_config(tmp_path) == config


def test_without_registration_the_toys_are_unknown(tmp_path):
    for changes in (
        {"algorithm__name": "toy"},
        {"algorithm__estimator": "toy"},
        {"generation__strategy": "toy-chain-2"},
        {},  # the reward
    ):
        with pytest.raises(ValueError, match="toy"):
            validate(config_of(tmp_path, **changes), num_devices=1)
    assert tuple(families.FAMILIES) == NAMES


def test_a_name_is_given_once(registered):
    other = dataclasses.replace(families.FAMILIES["qwen2"], name="toy")
    for again in (
        lambda: protocol.register(type("Other", (toys.ToyDrafter,), {})()),
        lambda: sources.register("toy", toys.LengthSource()),
        lambda: families.register(other),
    ):
        with pytest.raises(ValueError, match="already"):
            again()
    with pytest.raises(ValueError, match="scheme cannot be"):
        sources.register("Toy:", toys.LengthSource())


def test_a_report_is_headed_by_what_the_run_says_of_itself(tmp_path):
    """One of an earlier version, too."""
    about = json.dumps({"title": "guessing"})
    metrics.open_run(tmp_path, json.dumps(CONFIG), about=about).close()
    seen = page(tmp_path, [row(step) for step in range(3)])
    assert "algorithm guessing" in seen.text and "PPO" not in seen.text
    (tmp_path / "about.json").rename(tmp_path / "objective.json")
    assert "algorithm guessing" in page(tmp_path, [row(step) for step in range(3)]).text


def test_a_drafter_of_ones_own_is_drawn_too(tmp_path):
    chosen = [
        played(0, 4, "plain"),
        played(0, 4, "toy-parents:-1,0"),
        played(0, 4, "mine-parents:-1"),
    ]
    shares = {"none": 0.2, "toy": 0.5, "mine": 0.3}
    told = {f"strategy/share_{name}": share for name, share in shares.items()}
    told |= {"strategy/acceptance_toy": 0.5, "strategy/acceptance_mine": 0.25}
    seen = page(
        tmp_path, [row(step, **told) for step in range(3)], strategies=chosen, config=ADAPTIVE
    )
    legend = " ".join(attrs.get("class", "") for attrs in seen.all("i"))
    assert {"none", "other-0", "other-1"} <= set(legend.split()) and "lookup" not in legend.split()
    assert "plain 33% mine 33% toy 33%" in seen.text
    assert "strategy/share_toy" not in seen.charts()
