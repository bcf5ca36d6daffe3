"""Train as a config describes, or resume the run from its last checkpoint.

    rlhf-jax train CONFIG[:ARGUMENT] [--config.any.key=value ...]
    rlhf-jax train --model DIR --prompts FILE --reward FILE.py:function [--config...]

CONFIG is a Python file or the name of a config that comes with the package: {names}.
`rlhf-jax config` prints the keys. Several processes need --coordinator HOST:PORT
--processes N --process I, or --processes auto on a cluster that provides these. --profile 5:7
writes a profile of those steps.
"""

from __future__ import annotations

import jax

from rlhf_jax.config import command_line
from rlhf_jax.config.schema import Config
from rlhf_jax.memory.parts import FEWER_ROWS
from rlhf_jax.runtime import distributed, joining
from rlhf_jax.runtime.files import SHIPPED
from rlhf_jax.runtime.joining import Place
from rlhf_jax.runtime.lost_ranks import guard
from rlhf_jax.runtime.mirror import folder_of
from rlhf_jax.runtime.signals import Stopped
from rlhf_jax.setup import validation
from rlhf_jax.trainer import do_run, plan


def main(argv: list[str]) -> int:
    """Return the exit code; a mistake of the user becomes one sentence on stderr."""
    if {"-h", "--help"} & {*argv[1:]}:
        names = sorted(path.stem for path in (SHIPPED / "configs").glob("*.py"))
        print((__doc__ or "").format(names=", ".join(names)))
        return 0
    place = Place()
    try:
        place, argv = command_line.place(argv)
        config = _read(argv, place)
        workdir = None if config.dry_run else folder_of(config.workdir)
        sends = bool(config.plan or config.training.pipelined)
        joining.start(place, config.heartbeat_seconds, workdir, sends=sends)
        (plan if config.dry_run else do_run)(config)
    except Stopped as stopped:
        message = f"Stopped by {stopped.name}: {' '.join(stopped.__notes__)}."
        return joining.leave(stopped.exit_code, message, place)
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
        of_device = distributed.is_of_device(error)
        message = str(error)
        if of_device:
            reason = message.splitlines()[0].rstrip(".")
            change = f"{FEWER_ROWS}, or generation.max_rows"
            message = f"the device failed ({reason}); if its memory is full, {change}."
            if distributed.started() and "RESOURCE_EXHAUSTED" not in reason:
                guard().await_verdict()
                message = (
                    f"the processes cannot go on together ({reason}); if one has ended, its message"
                    " has the reason, and the same command resumes from the last checkpoint."
                )
        # further errors on the way out follow it
        *firsts, last = dict.fromkeys([message, *getattr(error, "__notes__", ())])
        message = "; also: ".join([*(each.removesuffix(".") for each in firsts), last])
        return joining.leave(1 if of_device else 2, f"error: {message}", place)
    except KeyboardInterrupt:
        message = "error: stopped by the keyboard; the files in the workdir stay."
        return joining.leave(130, message, place)
    return joining.leave(0, "", place)


def _read(argv: list[str], place: Place) -> Config:
    """Return the config of the command line; only rank 0 reports its mistakes."""
    try:
        config = command_line.read(argv)
        validation.check_heartbeat(config)
    except (ValueError, OSError):
        if place.size is None:  # the rank, and so whether it prints, is known only then
            joining.start(place)
        raise
    return config
