"""The fixtures that other tests rely on."""

import jax
import jax.numpy as jnp


def test_there_are_eight_devices_and_promotion_is_strict():
    assert jax.device_count() >= 8 or jax.default_backend() != "cpu"
    assert jax.config.values["jax_numpy_dtype_promotion"] == "strict"


def test_each_program_is_counted_once(compilations):
    program = jax.jit(lambda x: jnp.tanh(x) * 3)
    short, long = jnp.ones(3), jnp.ones(4)
    with compilations() as seen:
        _ = program(short), program(short)
    assert len(seen) == 1
    with compilations() as seen:
        _ = program(short), program(long)
    assert len(seen) == 1
