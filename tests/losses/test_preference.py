"""Losses of pairs beside TRL's own numbers in float64, value and gradient."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import GOLDEN

from rlhf_jax.algorithms.dpo import DPOOptions
from rlhf_jax.losses.preference import (
    PREFERENCE_LOSSES,
    Pairs,
    bradley_terry,
    comparison_metrics,
    kto,
)

THEIRS = json.loads((GOLDEN / "preference.json").read_text())


@pytest.mark.parametrize("name", THEIRS["losses"])
def test_losses_and_gradients_are_trls(name):
    wanted = THEIRS["losses"][name]
    with jax.enable_x64(True):
        policy, reference = (np.array(THEIRS[key]) for key in ("policy", "reference"))
        mask = np.array(THEIRS["mask"], float)
        constants = DPOOptions(
            beta=THEIRS["beta"], label_smoothing=THEIRS["label_smoothing"], margin=THEIRS["margin"]
        )

        def loss(policy):
            sums = (x.sum(axis=1).reshape(2, -1) for x in (policy, reference, mask))
            pairs = Pairs(*(side for both in sums for side in both))
            if name == "bradley_terry":
                return bradley_terry(pairs.chosen, pairs.rejected, constants.margin).mean()
            if name == "kto":
                gains = jnp.concatenate(pairs.gains)
                signs = jnp.asarray(np.repeat([1.0, -1.0], len(gains) // 2))
                return kto(gains, signs, jnp.asarray(THEIRS["baseline"]), constants.beta).mean()
            return PREFERENCE_LOSSES[name](pairs, constants).mean()

        value, gradient = jax.value_and_grad(loss)(jnp.asarray(policy))
        np.testing.assert_allclose(value, wanted["loss"], rtol=1e-12, atol=1e-12)
        found = np.where(mask, gradient, 0.0)
        np.testing.assert_allclose(found, wanted["gradient"], rtol=1e-12, atol=1e-12)


def test_every_loss_has_its_golden_numbers():
    assert {*PREFERENCE_LOSSES} < {*THEIRS["losses"]}


def test_half_of_the_ties_are_right():
    """So a reward model that has learned nothing is right as often as a coin."""
    found = comparison_metrics(jnp.array([-1.0, 0.0, 2.0]))
    np.testing.assert_array_equal(found["preference/accuracy"], [0.0, 0.5, 1.0])
    np.testing.assert_array_equal(found["preference/margin"], [-1.0, 0.0, 2.0])
