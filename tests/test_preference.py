"""Losses of pairs beside TRL's own numbers in float64, value and gradient."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.algorithms.dpo import DPOOptions
from rlhf_jax.losses.preference import PREFERENCE_LOSSES, Pairs, bradley_terry, kto

GOLDEN = json.loads((Path(__file__).parent / "golden" / "preference.json").read_text())


@pytest.mark.parametrize("name", GOLDEN["losses"])
def test_losses_and_gradients_are_trls(name):
    wanted = GOLDEN["losses"][name]
    with jax.enable_x64(True):
        policy, reference = (np.array(GOLDEN[key]) for key in ("policy", "reference"))
        mask = np.array(GOLDEN["mask"], float)
        constants = DPOOptions(
            beta=GOLDEN["beta"], label_smoothing=GOLDEN["label_smoothing"], margin=GOLDEN["margin"]
        )

        def loss(policy):
            sums = (x.sum(axis=1).reshape(2, -1) for x in (policy, reference, mask))
            pairs = Pairs(*(side for both in sums for side in both))
            if name == "bradley_terry":
                return bradley_terry(pairs.chosen, pairs.rejected, constants.margin).mean()
            if name == "kto":
                gains = jnp.concatenate(pairs.gains)
                signs = jnp.asarray(np.repeat([1.0, -1.0], len(gains) // 2))
                return kto(gains, signs, jnp.asarray(GOLDEN["baseline"]), constants.beta).mean()
            return PREFERENCE_LOSSES[name](pairs, constants).mean()

        value, gradient = jax.value_and_grad(loss)(jnp.asarray(policy))
        np.testing.assert_allclose(value, wanted["loss"], rtol=1e-12, atol=1e-12)
        found = np.where(mask, gradient, 0.0)
        np.testing.assert_allclose(found, wanted["gradient"], rtol=1e-12, atol=1e-12)


def test_every_loss_has_its_golden_numbers():
    assert {*PREFERENCE_LOSSES} < {*GOLDEN["losses"]}
