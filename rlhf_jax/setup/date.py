"""The day that chat templates are told: a run that goes on tomorrow renders the same prompts."""

from __future__ import annotations

import datetime

from rlhf_jax.config.schema import Config
from rlhf_jax.runtime.checkpoint.folder import saved_identity
from rlhf_jax.runtime.mirror import folder_of


def date_of_run(config: Config) -> str:
    """Return the config's day, else that of the run's latest checkpoint, else today, YYYY-MM-DD.

    A run that was ended before its first checkpoint has nothing to go on from, and begins today.
    """
    if config.data.date:
        return config.data.date
    saved = saved_identity(folder_of(config.workdir) / "checkpoints")
    return saved.get("data.date") or datetime.date.today().isoformat()
