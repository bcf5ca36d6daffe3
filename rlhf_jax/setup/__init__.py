"""From a config to a run; everything is checked before any weight is loaded."""

from rlhf_jax.setup.models import initial_models, load, source_shapes
from rlhf_jax.setup.opened import ENDS, Opened, date_of_run, identity, prepare
from rlhf_jax.setup.run import make_run
from rlhf_jax.setup.settings import initial_host_state, restored_host_state

__all__ = [
    "ENDS",
    "Opened",
    "date_of_run",
    "identity",
    "initial_host_state",
    "initial_models",
    "load",
    "make_run",
    "prepare",
    "restored_host_state",
    "source_shapes",
]
