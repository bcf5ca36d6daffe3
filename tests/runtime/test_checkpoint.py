"""Saves that fail, folders that cannot be used, and files out of reach: nothing saved is lost."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import as_bytes, flip, listed, make_state, opened, restore, save
from jax.sharding import NamedSharding, PartitionSpec
from places import ROOT

from rlhf_jax import mesh as meshes
from rlhf_jax.command import export
from rlhf_jax.models import transformer
from rlhf_jax.runtime.checkpoint.fingerprint import fingerprint
from rlhf_jax.runtime.checkpoint.store import Checkpoints, Unsaved, read_part
from rlhf_jax.types import Trained


def test_a_preview_says_from_where_a_run_would_go_on(tmp_path, capsys):
    """By documents alone, and it changes nothing; 0 where there is nothing, or no folder."""
    template = jax.eval_shape(lambda: make_state(0))
    folder = tmp_path / "checkpoints"
    assert opened(folder).preview(template) == 0 and not folder.exists()
    folder.mkdir()
    assert opened(folder).preview(template) == opened(folder).on_disk() == 0
    save(folder, 1, 2)
    assert opened(folder).preview(template) == opened(folder).on_disk() == 2
    assert capsys.readouterr().err == ""
    flip(folder / "2")
    before = listed(folder)
    assert opened(folder).preview(template) == 1
    said = capsys.readouterr().err
    assert said.startswith("warning: the checkpoint of step 2 is damaged (")
    assert said.count("\n") == 1 and "would be moved aside" in said
    flip(folder / "1")
    with pytest.raises(ValueError, match=r"No checkpoint in .* is valid"):
        opened(folder).preview(template)
    assert listed(folder) == before


@pytest.mark.parametrize(
    ("changes", "more", "said"),
    [
        ({"seed": 4}, {}, "seed = 3, and this run has 4"),
        ({}, {"critic": jnp.float32(0)}, r"has nothing for critic, and this run float32\[\]"),
    ],
)
def test_a_preview_refuses_what_a_run_would_refuse(changes, more, said, tmp_path):
    save(tmp_path, 1)
    template = {**vars(make_state(0)), **more}
    with pytest.raises(ValueError, match=said):
        opened(tmp_path, **changes).preview(template)
    assert listed(tmp_path) == {"1"}


def failing(error: Exception):
    """A reader of orbax's that ends with an error."""

    def restore(self, directory, args):
        raise error

    return restore


def tensorstore(said: str):
    """As above, with an error of tensorstore's, which orbax passes on as the cause of its own."""
    error = RuntimeError("Encountered error while reading array index")
    error.__cause__ = ValueError(said)
    return failing(error)


OPEN = 'Error reading "step/0" in OCDBT database at local file "/x/": Failed to open: "/x/d/1": '


UNPROVED = {
    "EMFILE": (failing(OSError(24, "Too many open files")), "Too many open files"),
    "EIO": (failing(OSError(5, "Input/output error")), "Input/output error"),
    "EACCES": (failing(PermissionError(13, "Permission denied")), "Permission denied"),
    "no memory": (failing(MemoryError()), "MemoryError"),
    "orbax": (failing(TypeError("restore() got an unexpected argument")), "an unexpected argument"),
    "tensorstore EMFILE": (
        tensorstore(f"RESOURCE_EXHAUSTED: {OPEN}Too many open files [os_error_code='24']"),
        "Too many open files",
    ),
    "tensorstore EIO": (
        tensorstore(f"UNKNOWN: {OPEN}Input/output error [os_error_code='5']"),
        "Input/output error",
    ),
    "tensorstore no device": (
        tensorstore(f"NOT_FOUND: {OPEN}No such device [os_error_code='19']"),
        "No such device",
    ),
    "tensorstore ENOMEM": (
        tensorstore(f"RESOURCE_EXHAUSTED: {OPEN}Cannot allocate memory [tensorstore_spec='{{}}']"),
        "Cannot allocate memory",
    ),
}


@pytest.mark.parametrize(("fail", "said"), UNPROVED.values(), ids=UNPROVED)
def test_what_proves_no_damage_moves_nothing(tmp_path, capfd, monkeypatch, fail, said):
    save(tmp_path, 1, 2)
    with opened(tmp_path) as checkpoints:
        with (
            monkeypatch.context() as patch,
            pytest.raises(OSError, match="state cannot be read") as caught,
        ):
            patch.setattr("orbax.checkpoint.PyTreeCheckpointHandler.restore", fail)
            checkpoints.restore(make_state(0))
        assert f"{said}); the checkpoint stays as it is: repeat the command" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert listed(tmp_path) == {"1", "2"} and capfd.readouterr() == ("", "")
        assert restore(checkpoints, make_state(0)).step == 2


@pytest.mark.parametrize("number", [5, 13, 24])
def test_a_document_out_of_reach_and_a_folder_out_of_reach_move_nothing(
    tmp_path, monkeypatch, number
):
    save(tmp_path, 1, 2)

    def fail(*_):
        raise OSError(number, os.strerror(number))

    with opened(tmp_path) as checkpoints:
        for place in ("pathlib.Path.read_bytes", "rlhf_jax.runtime.checkpoint.store.os.listdir"):
            with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(number)):
                patch.setattr(place, fail)
                checkpoints.restore(make_state(0))
        with (
            monkeypatch.context() as patch,
            pytest.raises(OSError, match=r"document\.json cannot be read"),
        ):
            patch.setattr("pathlib.Path.read_bytes", fail)
            read_part(tmp_path, make_state(0))
    assert listed(tmp_path) == {"1", "2"}


KILLED = """
import os, signal, sys
import jax, jax.numpy as jnp
from rlhf_jax.runtime.checkpoint.store import Checkpoints
checkpoints = Checkpoints(sys.argv[1], 2, {}).__enter__()
checkpoints.save(1, [jnp.ones(5)], {})
checkpoints.save(2, [jnp.ones(50_000_000)], {})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_save_that_was_killed_is_ignored_and_cleaned(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    assert any(name.startswith("2.") for name in listed(tmp_path)) and "2" not in listed(tmp_path)
    with Checkpoints(tmp_path, 2, {}) as checkpoints:
        assert restore(checkpoints, [jnp.zeros(5)]).step == 1
    assert listed(tmp_path) == {"1"}


def test_an_error_of_a_save_is_one_sentence_at_the_next_call(tmp_path, capfd):
    save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path) as checkpoints:
        # as a full disk: a file cannot grow
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
        try:
            with pytest.raises(
                OSError, match=r"step 2 could not be saved in .* \(File too large\)"
            ) as caught:
                checkpoints.save(2, make_state(2), {})
                checkpoints.restore(make_state(0))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
        assert listed(tmp_path) == {"1"}
        assert restore(checkpoints, make_state(0)).step == 1
        checkpoints.save(3, make_state(3), {})
    assert listed(tmp_path) == {"1", "3"} and capfd.readouterr() == ("", "")


def test_leaving_tells_of_a_save_that_failed(tmp_path, monkeypatch):
    def fail(self, x, directory):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orbax.checkpoint.JsonCheckpointHandler._save_fn", fail)
    with pytest.raises(OSError, match="step 4 could not be saved"), opened(tmp_path) as checkpoints:
        checkpoints.save(4, make_state(4), {})
    with pytest.raises(KeyError) as caught, opened(tmp_path) as checkpoints:
        checkpoints._saving = 5
        monkeypatch.setattr(checkpoints._manager, "wait_until_finished", lambda: fail(0, 0, 0))
        raise KeyError("the first error")
    assert "step 5 could not be saved" in caught.value.__notes__[0]


def test_a_save_that_failed_is_told_as_soon_as_it_is_known_and_once(tmp_path, monkeypatch):
    held = threading.Event()

    def fail(self, directory):  # behind the run, on a thread
        held.wait(60)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orbax.checkpoint.PyTreeCheckpointHandler.finalize", fail)
    with opened(tmp_path) as checkpoints:
        checkpoints.check()
        checkpoints.save(4, make_state(4), {})
        checkpoints.check()  # while it is running nothing is known, and nothing waited for
        held.set()
        with pytest.raises(
            Unsaved, match=r"step 4 could not be saved in .* \(No space left on dev"
        ):
            while True:
                checkpoints.check()
                time.sleep(0.01)
        checkpoints.check()
    assert listed(tmp_path) == set()


def test_leaving_tells_of_a_device_that_failed_in_a_save(tmp_path, monkeypatch):
    def fail():
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is lost")

    with pytest.raises(KeyError) as caught, opened(tmp_path) as checkpoints:
        checkpoints._saving = 5
        monkeypatch.setattr(checkpoints._manager, "wait_until_finished", fail)
        raise KeyError("the first error")
    told, unsaved = caught.value.__notes__
    assert "the device is lost" in told and "step 5 could not be saved" in unsaved


@pytest.mark.parametrize(
    "kind", [jax.errors.JaxRuntimeError, ValueError], ids=["running", "reading"]
)
def test_a_device_that_fails_in_a_save_or_a_read_is_no_fault_of_the_folder(
    tmp_path, monkeypatch, kind
):
    def fail(*_, **__):
        raise RuntimeError("A task of orbax has failed.") from kind("INTERNAL: the device is lost")

    save(tmp_path, 1)
    with opened(tmp_path) as checkpoints, monkeypatch.context() as patch:
        patch.setattr("orbax.checkpoint.CheckpointManager.save", fail)
        with pytest.raises(kind, match="the device is lost") as caught:
            checkpoints.save(2, make_state(2), {})
        assert "step 2 could not be saved" in caught.value.__notes__[0]
        patch.setattr("orbax.checkpoint.PyTreeCheckpointHandler.restore", fail)
        with pytest.raises(kind, match="the device is lost"):
            checkpoints.restore(make_state(0))
    assert listed(tmp_path) == {"1"}


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OSError, match=r"file/checkpoints cannot be used for checkpoints \(Not a directory\)"
    ):
        opened(tmp_path / "file" / "checkpoints").__enter__()


def test_a_part_is_read_beside_a_run_that_saves(tmp_path, tiny):
    policy = transformer.init(jax.random.key(0), tiny, jnp.float32)
    state = {"policy": Trained(policy, {"m": jnp.zeros(3)}, jnp.int32(1))}  # pyright: ignore
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.save(2, [jnp.zeros(1 << 22)], {})
        step, part, _ = read_part(tmp_path, export.policy_template(tiny), 1)
    assert step == 1 and as_bytes(part["policy"]["weights"]) == as_bytes(policy)
    assert listed(tmp_path) == {"1", "2"}
    with pytest.raises(
        FileNotFoundError, match=r"no checkpoint of step 7 in .*; found are: \[1, 2\]"
    ):
        read_part(tmp_path, part, 7)
    flip(tmp_path / "1")
    with pytest.raises(ValueError, match="1 is damaged"):
        read_part(tmp_path, part, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_a_fingerprint_sees_every_bit_and_its_place(dtype):
    array = np.random.default_rng(0).integers(0, 2, (6, 8)).astype(jnp.dtype(dtype))
    array[0, 0] = True
    array[0, 1] = False
    mark = int(fingerprint(jnp.asarray(array)))
    for place in np.ndindex(array.shape):
        changed = array.copy()
        changed.view(np.uint8)[place[0], place[1] * array.itemsize] ^= 1
        assert int(fingerprint(jnp.asarray(changed))) != mark
    swapped = array.copy()
    swapped[0, :2] = array[0, 1::-1]
    assert int(fingerprint(jnp.asarray(swapped))) != mark
    # the place is the one in memory
    assert int(fingerprint(jnp.asarray(array.reshape(8, 6)))) == mark


@pytest.mark.parametrize(
    "axes", [("fsdp", "tensor"), ("tensor", None), (None, ("fsdp", "tensor")), ()]
)
def test_a_fingerprint_does_not_depend_on_the_mesh(axes):
    array = jax.random.normal(jax.random.key(0), (16, 24))
    placed = jax.device_put(
        array, NamedSharding(meshes.make_mesh(fsdp=4, tensor=2), PartitionSpec(*axes))
    )
    assert int(fingerprint(placed)) == int(fingerprint(array))


def test_two_runs_cannot_share_a_folder(tmp_path):
    with (
        Checkpoints(tmp_path, 2, {}),
        pytest.raises(ValueError, match="Another run is at work"),
        Checkpoints(tmp_path, 2, {}),
    ):
        pass
    with Checkpoints(tmp_path, 2, {}):
        pass
