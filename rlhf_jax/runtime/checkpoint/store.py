"""Store checkpoints in the background, atomically, and verify them when they are read.

A checkpoint is a folder named by its step. Orbax stores the device arrays, each device writing its
own slices, under their names in the tree; a document next to them holds the host state, the
identity of the run, and for every array its dtype, shape and fingerprint.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from rlhf_jax.runtime import distributed, messages
from rlhf_jax.runtime.checkpoint import divided, proof
from rlhf_jax.runtime.checkpoint import document as documents
from rlhf_jax.runtime.checkpoint.damage import Damaged, reading, reason, root
from rlhf_jax.runtime.checkpoint.earlier import saved_names
from rlhf_jax.runtime.checkpoint.fingerprint import fingerprints
from rlhf_jax.runtime.checkpoint.folder import (
    DOCUMENT,
    HOST,
    claim,
    names,
    naming,
    read_document,
    remove_unfinished,
    require_usable,
    steps,
)
from rlhf_jax.runtime.checkpoint.quiet import quiet, release
from rlhf_jax.runtime.files import alone

STATE = "state"  # the folder with a checkpoint's arrays
DAMAGED = "damaged-"  # prefix of the step in the name of a damaged checkpoint


@messages.register_error
class Unsaved(OSError):
    """Report that a checkpoint could not be saved."""


class Restored(NamedTuple):
    """Hold the content of a checkpoint."""

    step: int
    state: Any  # like the template, of jax.Array
    host: dict[str, Any]


class Checkpoints:
    """Keep the checkpoints of one run in `folder`; of complete ones the latest `keep` stay.

    Use as a context manager: leaving it waits for a running save. `identity`, flat JSON values, is
    saved with every checkpoint; a different one is refused, except for `changeable` keys of the
    config if `allow_changes`. `read_identity` translates that of an earlier version. A checkpoint
    of another run counts as damaged. Any error of saving except a device's is one Unsaved, raised
    once, at the next call or at the end, and leaves the earlier checkpoints as they were.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int,
        identity: Mapping[str, Any],
        changeable: Collection[str] = (),
        allow_changes: bool = False,
        read_identity: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    ):
        self._folder = Path(folder).absolute()
        self._keep = keep
        self._identity = dict(identity)
        self._changeable = changeable
        self._allow_changes = allow_changes
        self._read_identity = read_identity

    def __enter__(self) -> Checkpoints:
        self._saving = -1
        with contextlib.ExitStack() as stack:

            def take_folder() -> str:
                with naming(self._folder):
                    self._folder.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(alone(self._folder, self._folder.parent))
                    remove_unfinished(self._folder)
                    return claim(self._folder)

            self._run = distributed.run_on_leader(take_folder)
            if distributed.started():
                _check_shared(self._folder)
            stack.enter_context(quiet())
            with naming(self._folder):
                handlers = ocp.DefaultCheckpointHandlerRegistry()
                # Weights hardly shrink when compressed, and compression costs CPU time.
                arrays = proof.ProvedArrays(use_compression=False, **divided.writers())
                handlers.add(STATE, ocp.args.PyTreeSave, arrays)
                handlers.add(HOST, ocp.args.JsonSave, ocp.JsonCheckpointHandler(DOCUMENT))
                # Threads that wait for a folder which could not be made would delay the process's
                # end for minutes.
                at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
                # Lightweight: a damaged checkpoint must not hide the others.
                options = ocp.CheckpointManagerOptions(
                    max_to_keep=self._keep, lightweight_initialize=True, async_options=at_once
                )
                self._manager = ocp.CheckpointManager(
                    self._folder, options=options, handler_registry=handlers
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            with self._stack, self._failing(), contextlib.closing(self._manager):
                self._manager.wait_until_finished()
        except Exception as failure:
            if error is None:
                raise
            for note in [str(failure), *getattr(failure, "__notes__", ())]:
                error.add_note(note)

    def save(self, step: int, state: Any, host: Mapping[str, Any]) -> None:
        """Start saving; the caller may donate `state` and change `host` as soon as this returns.

        state: a pytree of jax.Array, however sharded. host: JSON values, numpy arrays and scalars
        in lists and in dicts with string keys. It waits for a save still running; a step that is
        already saved stays unchanged.
        """
        distributed.run_on_all(self._settle)  # one that failed alone must not leave others waiting
        if step in self._manager.all_steps():
            return
        leaves = named_leaves(state)
        fingerprint = fingerprints(leaves)
        table = {
            name: [leaf.dtype.name, list(leaf.shape), fingerprint[name]]
            for name, leaf in leaves.items()
        }
        about = {"step": step, "run": self._run, "identity": self._identity}
        document = documents.make(**about, leaves=table, host=host)

        # Orbax copies an accelerator's arrays to the host before its `save` returns, but writes a
        # CPU's in place, long after they were donated: so it gets copies of those.
        for name, leaf in leaves.items():
            if next(iter(leaf.devices())).platform == "cpu":
                leaves[name] = _copied(leaf)
        items = {STATE: ocp.args.PyTreeSave(leaves), HOST: ocp.args.JsonSave(document)}
        self._saving = step
        with self._failing():
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def check(self) -> None:
        """Raise Unsaved if the background save has failed; do not wait."""
        if distributed.leads() and not self._manager.is_saving_in_progress():
            self._settle()

    def on_disk(self) -> int:
        """Return the step of the latest complete checkpoint; 0 if there is none."""
        return max(steps(self._folder), default=0)

    def restore(self, template: Any) -> Restored | None:
        """Return the latest valid checkpoint, placed like `template`.

        None if there is none at all. template: a pytree of jax.ShapeDtypeStruct (with shardings,
        else for the first device) or jax.Array; its mesh need not be the one that saved. A damaged
        checkpoint is reported on stderr and moved to `damaged-STEP`, and the one before it is used.
        Raises ValueError if the identity or the arrays of the state differ from this run's, or if
        no checkpoint is valid, OSError if one cannot be read but nothing proves it damaged.
        """
        self._settle()
        saved = distributed.run_on_leader(lambda: steps(self._folder))
        for step in reversed(saved):
            folder = self._folder / str(step)
            read = functools.partial(read_document, folder, self._run)
            try:
                document = distributed.run_on_leader(read)
                self._require_fit(folder, document, template)
                state = _read_state(folder, document["leaves"], template)
                return Restored(step, state, document["host"])
            except Damaged as damage:
                self._move_aside(step, str(damage))
        distributed.run_on_leader(lambda: _require_none(self._folder))
        return None

    def preview(self, template: Any) -> int:
        """Return the step from which `restore` would resume, by documents alone; 0 if none.

        For one that is not entered: nothing is written or moved, and no array is loaded. Raises
        errors as `restore` would, and ValueError if another run is at work there.
        """
        require_usable(self._folder)
        if not self._folder.exists():
            return 0
        with alone(self._folder, self._folder.parent):
            for step in reversed(steps(self._folder)):
                folder = self._folder / str(step)
                try:
                    document = read_document(folder)
                    self._require_fit(folder, document, template)
                    _require_arrays(folder, document["leaves"], template)
                    with reading(folder / STATE):
                        proof.check(folder / STATE)
                except Damaged as damage:
                    finding = f"is damaged ({damage}), and would be moved aside"
                    print(f"warning: the checkpoint of step {step} {finding}.", file=sys.stderr)
                else:
                    return step
        _require_none(self._folder)
        return 0

    def _require_fit(self, folder: Path, document: dict[str, Any], template: Any) -> None:
        """Raise ValueError if a checkpoint is of another identity, or has more arrays."""
        identity = self._read_identity(document["identity"])
        for key, saved, current in documents.differences(identity, self._identity):
            if key in self._changeable and self._allow_changes:
                continue
            permit = " set checkpoint.allow_changes=True," if key in self._changeable else ""
            raise ValueError(
                f"The checkpoint {folder} was made with {key} = {saved!r}, and this run has"
                f" {current!r}; restore it,{permit} or name another workdir."
            )
        arrays = document["leaves"]
        for name in sorted(arrays.keys() - {*saved_names(named_leaves(template), arrays).values()}):
            raise ValueError(
                f"The checkpoint {folder} holds {name}, which this run lacks; name another workdir."
            )

    def _move_aside(self, step: int, why: str) -> None:
        """Rename a damaged checkpoint, so that it is ignored, and report it."""
        folder = self._folder / str(step)
        target = self._folder / f"{DAMAGED}{step}"
        number = 2
        while target.exists():
            target = self._folder / f"{DAMAGED}{step}-{number}"
            number += 1

        def move() -> None:
            with naming(folder):
                folder.rename(target)
            print(
                f"warning: the checkpoint of step {step} is damaged ({why}); it is now {target}.",
                file=sys.stderr,
            )

        distributed.run_on_leader(move)
        self._manager.reload()

    def _settle(self) -> None:
        """Wait for a running save."""
        with self._failing():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn any error of orbax within the context into one Unsaved, with nothing half written.

        It may be an error of the background. A device's is not converted: disk space would not
        help.
        """
        try:
            yield
        except Exception as error:
            release(error)
            # The first error is reported.
            with contextlib.suppress(OSError):
                if distributed.leads():
                    remove_unfinished(self._folder)
                self._manager.reload()
            unsaved = f"The checkpoint of step {self._saving} could not be saved in {self._folder}"
            if distributed.is_of_device(root(error)):
                root(error).add_note(f"{unsaved}; those before it are valid.")
                raise root(error) from None
            raise Unsaved(
                f"{unsaved} ({reason(error)}); those before it are valid: make room and give the"
                " same command again."
            ) from error


def read_part(folder: str | Path, template: Any, step: int | None = None) -> Restored:
    """Return the arrays in `template` from the checkpoint of `step` or the latest.

    It changes nothing, and is safe while a run saves there. template: as in `Checkpoints.restore`.
    Raises ValueError or OSError in one sentence.
    """
    saved = steps(Path(folder))
    if not saved or step not in (None, *saved):
        wanted = "" if step is None else f" of step {step}"
        raise FileNotFoundError(
            f"There is no checkpoint{wanted} in {folder}; found are: {saved or 'none'}."
        )
    step = saved[-1] if step is None else step
    place = Path(folder).absolute() / str(step)
    try:
        document = read_document(place)
        with quiet():
            state = _read_state(place, document["leaves"], template)
        return Restored(step, state, document["host"])
    except Damaged as damage:
        raise ValueError(
            f"The checkpoint {place} is damaged ({damage}); name another step."
        ) from damage


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their path in it, as `optimizer.1.0.mu.layers.query`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


_copied = jax.jit(jnp.copy)


def _require_none(folder: Path) -> None:
    """Raise ValueError if a folder has checkpoints, none of which is valid."""
    if any(name.isdigit() or name.startswith(DAMAGED) for name in names(folder)):
        raise ValueError(
            f"No checkpoint in {folder} is valid: restore one from a copy, or name another workdir."
        )


def _require_arrays(folder: Path, saved: dict[str, list], template: Any) -> None:
    """Raise ValueError if a checkpoint lacks an array of the template, or has another.

    saved: [dtype, shape, fingerprint] of each array there.
    """
    leaves = named_leaves(template)
    for name, saved_name in saved_names(leaves, saved).items():
        leaf = leaves[name]
        dtype, shape, _ = saved.get(saved_name, ("nothing", "", 0))
        if (dtype, shape) != (leaf.dtype.name, list(leaf.shape)):
            raise ValueError(
                f"The checkpoint {folder} has {dtype}{shape} for {name}, and this run"
                f" {leaf.dtype.name}{list(leaf.shape)}; name another workdir."
            )


def _read_state(folder: Path, saved: dict[str, list], template: Any) -> Any:
    """Return the template's arrays from a checkpoint, each verified by its fingerprint."""
    _require_arrays(folder, saved, template)
    leaves = named_leaves(template)
    names_there = saved_names(leaves, saved)
    wanted = {}
    for name, leaf in leaves.items():
        place = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        wanted[names_there[name]] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    own, others = divided.own_and_others(wanted)
    restored = {name: ocp.ArrayRestoreArgs(sharding=leaf.sharding) for name, leaf in own.items()}
    arguments = ocp.args.PyTreeRestore(own, restore_args=restored, partial_restore=True)

    def read_arrays() -> dict[str, jax.Array]:
        # Without orbax's Checkpointer, in which a process with a damaged part would leave the
        # others waiting.
        arrays = folder / STATE
        try:
            with reading(arrays), contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
                return others | handler.restore(epath.Path(arrays), args=arguments)
        except OSError:
            with contextlib.suppress(OSError):  # the first error is reported
                proof.check(arrays)
            raise

    leaves = distributed.run_on_all(read_arrays)
    # For an array that its own table no longer names, orbax returns the argument.
    if missing := [name for name in wanted if not isinstance(leaves.get(name), jax.Array)]:
        raise Damaged(f"{missing[0]} is not among its arrays")
    leaves = {name: leaves[name] for name in wanted}  # in one order on all ranks
    for name, fingerprint in fingerprints(leaves).items():
        if fingerprint != saved[name][2]:
            raise Damaged(f"the values of {name} have changed")
    in_order = [leaves[name] for name in names_there.values()]
    return jax.tree.unflatten(jax.tree.structure(template), in_order)


def _check_shared(folder: Path) -> None:
    """Raise ValueError, on all, if a process does not see the leader's folder.

    All call it. Each `run_on_leader` and `gather` ends on all together, so no process looks before
    the file is made, or after it is removed.
    """
    # a name that no earlier attempt can have left there
    marker = folder / distributed.broadcast(f".seen-{os.getpid()}-{time.time_ns()}")
    with naming(folder):  # in errors
        distributed.run_on_leader(marker.touch)
        seen = distributed.gather_results(marker.exists)
        distributed.run_on_leader(marker.unlink)
    if not all(seen):
        raise ValueError(
            f"Rank {seen.index(False)} of the run does not see what rank 0 writes to {folder}:"
            " name a workdir on a file system that all processes share."
        )
