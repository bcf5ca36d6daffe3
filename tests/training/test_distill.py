"""The student: what it is made of, what it learns from, and that it drafts; as a run of its own and
within one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run
from students import CONFIG, make, responses_of, run

from rlhf_jax import mesh
from rlhf_jax.command import export
from rlhf_jax.config import default
from rlhf_jax.generation.decoding import completed, decoding_weights, student_for
from rlhf_jax.generation.speculative.sampling import draw
from rlhf_jax.mesh import Layout
from rlhf_jax.models.files.source import open_source
from rlhf_jax.models.transformer import forward, logits
from rlhf_jax.sequences.batch import PackedSequences, Sequences
from rlhf_jax.setup import sample_checks, validation
from rlhf_jax.training.distill import (
    DISTILLATION,
    Distillation,
    distill,
    forward_kl,
    read_by_policy,
    student_of,
)
from rlhf_jax.training.gradients import Gradient, Learner, accumulate
from rlhf_jax.training.learn import trained
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Trained

DISTILL = {
    "algorithm__name": "distill",
    "steps": 4,
    "reward__functions": "()",
    "evaluation__every": 0,
    "generation__strategy": "plain",
    "drafter__layers": 2,
    "drafter__learning_rate": 3e-3,
    "training__epochs": 3,
    "training__minibatches": 2,
    "checkpoint__every": 2,
}
ONLINE = {
    "deterministic": True,
    "generation__strategy": "model-chain-2",
    "generation__history_tokens": 0,
    "evaluation__every": 0,
    "drafter__layers": 1,
    "drafter__learning_rate": 3e-3,
    "drafter__samples": 4,
    "checkpoint__every": 1,
}


SEED = 5


@pytest.fixture(scope="module")
def policy():
    return make(jax.random.key(0), dataclasses.replace(tiny_run.CONFIG, num_layers=4))


def batch_of(policy, sequences: Sequences) -> PackedSequences:
    """The sequences as the only batch."""
    rows = len(sequences.tokens)
    settings = dataclasses.replace(CONFIG, seed=SEED, microbatch_rows=rows)
    (batch,) = read_by_policy(policy, sequences, settings=settings)
    return batch


def gradient_of(student, policy, sequences: Sequences) -> Gradient:
    """The student's gradient on the sequences."""
    batch = batch_of(policy, sequences)
    return accumulate(None, student, batch, policy, loss=DISTILLATION, settings=CONFIG)


@jax.jit
def read(model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return forward(model, jnp.asarray(tokens), positions)[0]


@jax.jit
def whole_logits(model, tokens):
    """[B, T - 1, V] float32 of all places at once, tempered: what the program never holds."""
    return logits(model, read(model, tokens))[:, :-1] / CONFIG.temperature


def test_a_student_has_first_last_and_layers_between(policy):
    student = student_of(policy, 3)
    assert student.embed is None and student.head is None and student.config.num_layers == 3
    np.testing.assert_array_equal(
        student.layers["query"], policy.layers["query"][np.array([0, 2, 3])]
    )
    with pytest.raises(ValueError, match="student of 5 layers cannot be made of 4"):
        student_of(policy, 5)


def test_the_gradient_is_that_of_the_loss_and_of_layers_and_norm_alone(policy):
    student = student_of(policy, 2)
    rollout = responses_of(4, 13, policy.config.vocab_size)
    found = gradient_of(student, policy, rollout)

    def loss(student):
        losses = forward_kl(
            whole_logits(policy, rollout.tokens),
            whole_logits(completed(student, policy), rollout.tokens),
        )
        return jnp.sum(jnp.where(rollout.mask[:, 1:], losses, 0.0)) / np.float32(rollout.mask.sum())

    value, weights = jax.jit(jax.value_and_grad(loss))(student)
    assert jax.tree.structure(found.weights) == jax.tree.structure(student)
    assert found.weights.embed is None and found.weights.head is None
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-7), found.weights, weights
    )
    assert float(found.metrics["drafter/loss"]) == pytest.approx(float(value), rel=1e-5)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(found.weights))


def test_acceptance_is_the_share_of_tokens_that_the_student_draws(policy):
    """Drawn again from all logits at once; one token more that is the student's own draw counts one
    more.
    """
    student = student_of(policy, 2)
    rollout = responses_of(4, 24, policy.config.vocab_size)
    scores = whole_logits(completed(student, policy), rollout.tokens) * CONFIG.temperature
    positions = jnp.broadcast_to(jnp.arange(1, 24, dtype=jnp.int32), scores.shape[:2])
    drawing = jax.jit(functools.partial(draw, temperature=CONFIG.temperature))
    key = np.stack([np.full(4, SEED, np.uint32), rollout.columns["sample_ids"]], axis=1)
    drawn = drawing(scores, key[:, None], positions).token
    expected = np.mean((np.asarray(drawn) == rollout.tokens[:, 1:])[rollout.mask[:, 1:]])
    last = np.flatnonzero(rollout.mask[0])[-1]
    tokens = rollout.tokens.copy()
    tokens[0, last] = drawn[0, last - 1]  # nothing after it is read, so it changes no other draw
    assert tokens[0, last] != rollout.tokens[0, last]
    for text, share in ((rollout.tokens, expected), (tokens, expected + 1 / rollout.mask.sum())):
        found = gradient_of(student, policy, dataclasses.replace(rollout, tokens=text))
        assert float(found.metrics["drafter/acceptance"]) == pytest.approx(share, abs=1e-6)


STUDENT = Learner("drafter", DISTILLATION, optax.adam(1e-3), CONFIG)


def new_student(policy, layout: Layout = mesh.ONE_DEVICE) -> Trained:
    part = functools.partial(student_of, layers=2)
    return trained(policy, STUDENT.optimizer, layout, part)


def taught(policy, layout: Layout, config: TrainingSettings):
    """Policy, student and metrics after one call on eight rows, on the mesh."""
    policy = trained(jax.tree.map(jnp.copy, policy), None, layout).weights
    learner = dataclasses.replace(STUDENT, settings=dataclasses.replace(config, layout=layout))
    texts = responses_of(8, 16, policy.config.vocab_size)
    student = new_student(policy, layout)
    return policy, *distill(student, policy, texts, Distillation(learner, 8), step=0)


@pytest.mark.slow
def test_the_split_over_devices_and_micro_batches_changes_nothing(policy):
    config = dataclasses.replace(CONFIG, minibatches=2, epochs=2, microbatch_rows=4)
    _, student, metrics = taught(policy, Layout(), config)
    teacher, other, split = taught(
        policy, Layout(mesh.make_mesh(2, 2, 2)), dataclasses.replace(config, chunk=512)
    )
    assert split == pytest.approx(metrics, rel=1e-3)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=2e-5), student.weights, other.weights
    )
    assert int(student.version) == int(other.version) == 1
    assert isinstance(other.weights.layers, dict)
    assert not cast(jax.Array, other.weights.layers["gate"]).sharding.is_fully_replicated
    assert isinstance(teacher.layers, dict)
    np.testing.assert_array_equal(teacher.layers["query"], policy.layers["query"])


def test_without_a_token_nothing_is_learned(policy):
    student = new_student(policy)
    texts = responses_of(8, 16, policy.config.vocab_size)
    silent = dataclasses.replace(texts, mask=np.zeros_like(texts.mask))
    after, metrics = distill(student, policy, silent, Distillation(STUDENT, 8), step=0)
    assert after is student and metrics["drafter/loss"] == 0


@pytest.mark.parametrize("tied", [True, False])
def test_what_drafts_shares_embedding_and_head_with_the_target(policy, tied):
    model = (
        policy if tied else make(jax.random.key(1), dataclasses.replace(policy.config, tied=False))
    )
    devices = mesh.make_mesh(1, 1, 1, jax.devices()[:1])
    layout = Layout(devices, "generation", dtype=jnp.dtype(jnp.bfloat16))
    target = decoding_weights(model, layout)
    drafter = student_for(target, student_of(model, 2), layout)
    assert drafter is not None and isinstance(drafter.layers, tuple)
    assert drafter.embed is target.embed and drafter.head is target.head
    dtypes = {leaf.dtype for layer in drafter.layers for leaf in jax.tree.leaves(layer)}
    assert len(drafter.layers) == 2 and dtypes == {jnp.dtype(jnp.bfloat16)}
    assert student_for(target, None) is None and student_for(target, target) is target


# Runs


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distill")
    tiny_run.make_model(folder / "tiny", num_layers=4)
    tiny_run.make_files(folder)
    return folder


@pytest.fixture(scope="module")
def distilled(place):
    return run(place, "distilled", **DISTILL)[0]


@pytest.mark.slow
def test_a_distilled_student_predicts_more(distilled):
    assert [line["step"] for line in distilled] == [0, 1, 2, 3]
    assert distilled[-1]["drafter/loss"] < 0.5 * distilled[0]["drafter/loss"]
    assert distilled[-1]["drafter/acceptance"] > distilled[0]["drafter/acceptance"]


@pytest.mark.slow
def test_its_report_names_the_curves_for_what_they_are(place, distilled):
    report = (place / "distilled" / "report.html").read_text()
    assert "Tokens that the student draws, too" in report
    assert "distillation of a drafter" in report
    assert ">Reward<" not in report and "KL to the reference" not in report


@pytest.mark.long
def test_it_is_a_model_that_drafts(place, distilled):
    """Frozen, in a run with the same noise as plain decoding: the text stays, and drafts are
    accepted.
    """
    assert open_source(place / "distilled" / "drafter").config.num_layers == 2
    common = {"steps": 1, "evaluation__every": 0, "generation__history_tokens": 0}
    run(place, "plain", **common, generation__strategy="plain")
    drafter = place / "distilled" / "drafter"
    (line,), _ = run(
        place, "drafted", **common, generation__strategy="model-chain-2", drafter__path=drafter
    )
    texts = [(place / name / "samples.jsonl").read_bytes() for name in ("plain", "drafted")]
    assert texts[0] == texts[1]
    assert line["generation/acceptance"] > 0.4
    assert (line["drafter/version"], line["drafter/policy_step"], line["drafter/behind"]) == (
        0,
        0,
        1,
    )


@pytest.mark.slow
def test_a_student_made_before_goes_on(place, distilled):
    """Begun from the folder, it knows what it had learned."""
    changes = DISTILL | {
        "steps": 1,
        "drafter__path": place / "distilled" / "drafter",
        "checkpoint__every": 0,
    }
    (line,), _ = run(place, "further", **changes)
    assert line["drafter/loss"] < 0.5 * distilled[0]["drafter/loss"]


def leaves_of(workdir, step: int) -> dict:
    """The fingerprints of a checkpoint's arrays, by name."""
    (document,) = (workdir / "checkpoints" / str(step)).rglob("document.json")
    return json.loads(document.read_text())["leaves"]


@pytest.mark.long
def test_a_student_is_kept_current_and_goes_on_bit_for_bit(place):
    whole, said = run(place, "whole", **ONLINE, steps=3)
    run(place, "halves", **ONLINE, steps=1)
    halves, resumed = run(place, "halves", **ONLINE, steps=3)
    assert "kept current" in said and "Resuming from step 1" in resumed
    assert [line["drafter/version"] for line in whole] == [1, 2, 3]
    assert [line["drafter/policy_step"] for line in whole] == [1, 2, 3]
    assert all(line["drafter/behind"] == 0 and line["drafter/seconds"] > 0 for line in whole)
    found, expected = (leaves_of(place / name, 3) for name in ("halves", "whole"))
    parts = {name.split(".")[1] for name in found if name.startswith("drafter.")}
    assert parts == {"weights", "moments", "version"}
    assert found == expected
    for one, other in zip(halves, whole, strict=True):
        assert all(one[name] == other[name] for name in whole[0] if "second" not in name)
    assert export.main(["export.py", str(place / "whole"), "--step", "2", "--drafter"]) == 0
    assert open_source(place / "whole" / "drafter-2").config.num_layers == 1
    assert open_source(place / "whole" / "drafter").config.num_layers == 1


# What is refused


def configured(**changes):
    """A config that is valid but for the changes; the files are not looked at."""
    config = default()
    config.update(workdir="here")
    config.model.path = "there"
    config.data.train = __file__
    config.reward.functions = ("configs/rewards/arithmetic.py:gsm8k",)
    with config.unlocked():
        for name, value in changes.items():
            section, _, key = name.rpartition("__")
            (config[section] if section else config)[key] = value
    return config


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"algorithm__name": "both"}, "algorithm.name is 'both'; it must be one of grpo, ppo, sft"),
        ({"algorithm__name": "distill"}, "drafter.layers is 0; it must be above 0"),
        (
            {"drafter__learning_rate": 1e-4},
            "only a student is kept current: set drafter.layers, or 0",
        ),
        ({"drafter__layers": -1}, "drafter.layers is -1; it must be 0 or above"),
        ({"drafter__samples": 0}, "drafter.samples is 0; it must be above 0"),
        (
            {"algorithm__name": "distill", "drafter__layers": 2, "drafter__learning_rate": 1e-3},
            "'distill' has no use for reward.functions: clear what is named",
        ),
        (
            {"generation__strategy": "model-chain-2"},
            "drafts with a model; give drafter.path or drafter.layers",
        ),
        (
            {
                "generation__strategy": "model-chain-2",
                "drafter__layers": 2,
                "drafter__learning_rate": 1e-3,
            }
            | {"drafter__samples": 40},
            "drafter.samples is 40, but a step has 32",
        ),
    ],
)
def test_a_student_that_cannot_be_is_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        validation.validate(configured(**changes), 1)


@pytest.mark.parametrize(
    "layers, path, sentence",
    [
        (5, {}, "drafter.layers is 5, but the model has 4 layers"),
        (2, {"width": 64}, "no student of 2 layers of this model: its width is 64, not 32"),
        (2, {"num_layers": 3}, "its num_layers is 3, not 2"),
        (2, {"vocab_size": 99}, "its vocab_size is 99, not 320"),
    ],
)
def test_a_path_that_holds_another_model_is_one_sentence(layers, path, sentence, policy):
    config = configured(algorithm__name="distill", drafter__layers=layers)
    other = dataclasses.replace(policy.config, **({"num_layers": layers} | path))
    with pytest.raises(ValueError, match=sentence):
        sample_checks.check_student(config, policy.config, other)
