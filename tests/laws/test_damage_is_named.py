"""Every file of a checkpoint and every kind of damage: what comes back is what was saved, or the
damage is named and the checkpoint before is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import as_bytes, listed, opened, restore

from rlhf_jax.runtime.checkpoint import document, proof
from rlhf_jax.runtime.checkpoint.folder import DOCUMENT, HOST, RUN_FILE
from rlhf_jax.runtime.checkpoint.store import read_part, steps

PLACES = (0.0, 0.5, 1.0)  # of a file's bytes, those that are flipped


def small_state(seed: int) -> dict[str, Any]:
    """Arrays of several kinds, a few hundred bytes of them."""
    values = jax.random.normal(jax.random.key(seed), (8, 9))
    return {"a": {"b": values, "c": jnp.int32(seed)}, "d": (values.astype(jnp.bfloat16),)}


def save(folder: Path, *saved: int, seed: int = 0) -> None:
    with opened(folder, keep=9) as checkpoints:
        for step in saved:
            checkpoints.save(step, small_state(seed + step), {"step": step})


@contextlib.contextmanager
def restoring(folder: Path) -> Iterator[int]:
    """The step that a folder gives, whose numbers are those that were saved."""
    with opened(folder, keep=9) as checkpoints:
        step, state, host = restore(checkpoints, small_state(0))
        assert as_bytes(state) == as_bytes(small_state(step)) and host == {"step": step}
        yield step


def flip_at(place: float) -> Callable[[Path], object]:
    def flip(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[round(place * (len(content) - 1))] ^= 0x20
        file.write_bytes(content)

    return flip


FILE_DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"flipped at {place}": flip_at(place) for place in PLACES},
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file: os.truncate(file, 0),
    "removed": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a link to nowhere": lambda file: (file.unlink(), file.symlink_to("nowhere")),
    "nested": lambda file: file.write_text("[" * 100_000),
    "other JSON": lambda file: file.write_text('{"a": null}'),
}


FAST = ("flipped at 0.5", "truncated", "removed", "nested")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in FILE_DAMAGES],
)
def test_a_file_that_is_damaged_is_named_or_does_no_harm(name, tmp_path, capfd):
    """Each file in turn: wrong numbers never come back, nor an error without a name."""
    save(tmp_path / "whole", 1, 2)
    whole = tmp_path / "whole" / "2"
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    seen = set()
    for file in files:
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "whole", folder)
        FILE_DAMAGES[name](folder / "2" / file)
        with restoring(folder) as step:
            said = capfd.readouterr().err
            assert said.count("\n") == said.count("checkpoint of step 2 is damaged (") == 2 - step
            assert listed(folder) == ({"1", "damaged-2"} if step == 1 else {"1", "2"})
        seen |= {file.name} if step == 1 else set()
        shutil.rmtree(folder)
    assert seen >= {"document.json", "manifest.ocdbt"} and len(files) > 10


def replace(folder: Path, other: Callable[[Path], object]) -> None:
    shutil.rmtree(folder)
    other(folder)


def swap(folder: Path) -> None:
    """Each of the two latest gets the other's name."""
    aside = folder.with_name("aside")
    other = folder.with_name("2")
    folder.rename(aside)
    other.rename(folder)
    aside.rename(other)


FOLDER_DAMAGES = {
    "swapped": (swap, {2, 3}),
    "renamed": (lambda folder: folder.rename(folder.with_name("4")), {4}),
    "copied": (lambda folder: shutil.copytree(folder, folder.with_name("4")), {4}),
    "linked": (lambda folder: folder.with_name("4").symlink_to(folder), {4}),
    "a link to nowhere": (lambda folder: replace(folder, lambda f: f.symlink_to("nowhere")), {3}),
    "a file": (lambda folder: replace(folder, lambda f: f.write_text("3")), {3}),
    "empty": (lambda folder: replace(folder, Path.mkdir), {3}),
}


@pytest.mark.parametrize("name", FOLDER_DAMAGES)
def test_a_folder_that_is_not_what_its_name_says_is_named_and_the_one_before_used(
    name, tmp_path, capfd
):
    damage, named = FOLDER_DAMAGES[name]
    save(tmp_path, 1, 2, 3)
    damage(tmp_path / "3")
    left = set(steps(tmp_path)) - named
    with restoring(tmp_path) as step:
        assert step == max(left)
    said = re.findall(r"checkpoint of step (\d+) is damaged", capfd.readouterr().err)
    assert set(map(int, said)) == named and set(steps(tmp_path)) == left


@pytest.mark.parametrize("put", [shutil.copytree, lambda there, here: here.symlink_to(there)])
def test_a_checkpoint_of_a_run_that_is_alike_is_refused_by_name(put, tmp_path, capfd):
    """The two runs have one identity: the same config, weights and prompts."""
    save(tmp_path / "other", 1, 2, seed=100)
    save(tmp_path / "own", 1)
    put(tmp_path / "other" / "2", tmp_path / "own" / "2")
    with pytest.raises(ValueError, match=r"2 is damaged \(it is of another run, copied here\)"):
        read_part(tmp_path / "own", small_state(0))
    with restoring(tmp_path / "own") as step:
        assert step == 1
    said = capfd.readouterr().err
    assert "step 2 is damaged (it is of another run, copied here); it is now " in said
    assert listed(tmp_path / "own") == {"1", "damaged-2"}
    assert listed(tmp_path / "other") == {"1", "2"}


def test_a_run_that_is_copied_or_moved_whole_goes_on(tmp_path, capfd):
    save(tmp_path / "here", 1, 2)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    with restoring(tmp_path / "there") as step:
        assert step == 2
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("lose", [Path.unlink, flip_at(0.5), lambda file: file.write_text("[")])
def test_a_run_whose_file_is_lost_or_damaged_keeps_its_id(lose, tmp_path, capfd):
    save(tmp_path, 1, 2)
    before = (tmp_path / RUN_FILE).read_text()
    lose(tmp_path / RUN_FILE)
    flip_at(0.5)(tmp_path / "2" / HOST / DOCUMENT)
    with restoring(tmp_path) as step:
        assert step == 1
    assert (tmp_path / RUN_FILE).read_text() == before
    assert capfd.readouterr().err.count("\n") == 1


def test_checkpoints_of_an_earlier_version_are_of_this_run(tmp_path, capfd):
    save(tmp_path, 1, 2)
    (tmp_path / RUN_FILE).unlink()
    for step in (1, 2):
        file = tmp_path / str(step) / HOST / DOCUMENT
        parts = document.read(file)
        del parts["run"]
        file.write_text(json.dumps(document.make(**parts)))
        (tmp_path / str(step) / "state" / proof.PROOF).unlink()
    for saved in (2, 3):
        with opened(tmp_path, keep=9) as checkpoints:
            assert restore(checkpoints, small_state(0)).step == saved
            checkpoints.save(saved + 1, small_state(saved + 1), {"step": saved + 1})
    assert steps(tmp_path) == [1, 2, 3, 4] and capfd.readouterr().err == ""


def test_of_a_large_file_the_length_is_proved(tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "MOST_PROVED", 100)
    save(tmp_path, 1)
    arrays = tmp_path / "1" / "state"
    file = max(arrays.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    proof.check(arrays)
    file.write_bytes(content[:-1])
    with pytest.raises(proof.Damaged, match=r"state/.*d/\w+ has changed"):
        proof.check(arrays)
    file.unlink()
    with pytest.raises(proof.Damaged, match="is missing"):
        proof.check(arrays)


def test_a_fault_while_the_files_are_proved_is_not_told_in_place_of_the_first(
    tmp_path, monkeypatch
):
    """A disk that cannot be read stays an error of the disk, and moves nothing."""
    save(tmp_path, 1)

    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("orbax.checkpoint.PyTreeCheckpointHandler.restore", fail)
    monkeypatch.setattr(proof, "_marks", fail)
    with opened(tmp_path) as checkpoints, pytest.raises(OSError, match="state cannot be read"):
        checkpoints.restore(small_state(0))
    assert listed(tmp_path) == {"1"} and np.isfinite(small_state(0)["a"]["b"]).all()
