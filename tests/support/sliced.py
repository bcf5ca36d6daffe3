"""Texts that several slices of a mesh write."""

from __future__ import annotations

import jax
from tiny_stage import requests

from rlhf_jax import mesh as meshes
from rlhf_jax.generation.engine import generate
from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.models.shardings import model_shardings


def over(layout: Layout, model):
    """A model as `generate` wants it on the devices of a layout."""
    return model and jax.device_put(model, model_shardings(model, layout))


def roll_out(target, drafter, how, layout=ONE_DEVICE, wanted=None, **options):
    drafter = drafter if any(one.needs_model for one in how.drafters) else None
    models = (
        (target, drafter) if layout.mesh is None else (over(layout, target), over(layout, drafter))
    )
    found = list(
        generate(*models, requests() if wanted is None else wanted, how, layout, **options)
    )
    samples = {sample.sample_id: sample for sample in found}
    assert len(samples) == len(found)
    return samples


def texts(samples) -> dict[int, list[int]]:
    return {number: sample.tokens for number, sample in samples.items()}


def slices(count: int, fsdp: int = 1, tensor: int = 1):
    devices = jax.devices()[: count * fsdp * tensor]
    return Layout(meshes.make_mesh(1, fsdp, tensor, devices, slices=count), "generation")
