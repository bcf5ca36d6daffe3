"""The fixtures that other tests rely on."""

import jax
import jax.numpy as jnp
import tiny_run

from pallas_kernels.dispatch import FUNCTIONS, INTERPRETED, REFERENCE
from rlhf_jax.config import default
from rlhf_jax.mesh import ONE_DEVICE, Layout


def test_there_are_eight_devices_and_promotion_is_strict():
    assert jax.device_count() >= 8 or jax.default_backend() != "cpu"
    assert jax.config.values["jax_numpy_dtype_promotion"] == "strict"


def test_kernels_are_those_asked_for(kernels_are_interpreted, tmp_path):
    """In configs and where no config is, in each process that runs tests (`-n 2`), and in commands
    that these begin.
    """
    wanted = ("interpret", INTERPRETED) if kernels_are_interpreted else ("auto", REFERENCE)
    assert set(default().kernels.values()) == {wanted[0]}
    assert Layout().kernels == ONE_DEVICE.kernels == wanted[1]
    assert {f"--config.kernels.{name}={wanted[0]}" for name in FUNCTIONS} <= set(
        tiny_run.arguments(tmp_path, tmp_path)
    )


def test_each_program_is_counted_once(compilations):
    program = jax.jit(lambda x: jnp.tanh(x) * 3)
    short = jnp.ones(3)
    long = jnp.ones(4)
    with compilations() as seen:
        _ = program(short), program(short)
    assert len(seen) == 1
    with compilations() as seen:
        _ = program(short), program(long)
    assert len(seen) == 1
