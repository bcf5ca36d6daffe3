"""Checkpoints: what comes back is what was saved, bit for bit, or it is refused by name."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import IDENTITY, as_bytes, flip, flip_in, listed, make_state, opened, restore, save
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_jax import mesh as meshes
from rlhf_jax.runtime.checkpoint import document
from rlhf_jax.runtime.checkpoint.store import Checkpoints, steps
from rlhf_jax.types import Trained


def test_everything_comes_back_bit_for_bit(tmp_path, capfd):
    state = make_state(5)
    history = np.arange(6, dtype=np.int32).reshape(2, 3)
    host = {
        "kl": 0.1 + 0.2,
        "rate": np.float32(0.1),
        "at": {"epoch": 2},
        "history": [history, np.zeros(0, np.int32)],
    }
    with opened(tmp_path) as checkpoints:
        assert checkpoints.restore(state) is None
        checkpoints.save(5, state, host)
        history[:] = -1  # the caller's again
        host["at"]["epoch"] = 9
        step, restored, back = restore(checkpoints, jax.eval_shape(lambda: state))
    assert step == 5 and as_bytes(restored) == as_bytes(state)
    assert (
        jax.tree.structure(restored) == jax.tree.structure(state)
        and restored.weights["none"] is None
    )
    assert (
        back["kl"] == 0.1 + 0.2
        and np.float32(back["rate"]) == np.float32(0.1)
        and back["at"] == {"epoch": 2}
    )
    assert back["history"][0].tolist() == [[0, 1, 2], [3, 4, 5]] and back["history"][1].shape == (
        0,
    )
    assert back["history"][0].dtype == np.int32 and back["history"][0].flags.writeable
    assert capfd.readouterr() == ("", "")  # orbax says nothing


def test_arrays_lie_in_files_as_they_are(tmp_path):
    """Uncompressed: weights would hardly shrink, and it takes the CPU's time."""
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, [jnp.zeros(1 << 18)], {})
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) > 1 << 20


def test_the_latest_few_are_kept_and_a_saved_step_stays(tmp_path):
    save(tmp_path, 1, 2, 3)
    assert listed(tmp_path) == {"2", "3"}
    with opened(tmp_path) as checkpoints:
        checkpoints.save(3, make_state(7), {})
        assert restore(checkpoints, make_state(0)).host == {"step": 3}
    assert steps(tmp_path) == [2, 3]


def split(state, mesh, *axes):
    spec = PartitionSpec(*axes)
    return jax.tree.map(
        lambda leaf: jax.device_put(
            leaf, NamedSharding(mesh, spec if leaf.ndim == 2 else PartitionSpec())
        ),
        state,
    )


def test_another_mesh_may_go_on(tmp_path):
    state = split(make_state(1), meshes.make_mesh(fsdp=4, tensor=2), "tensor", "fsdp")
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        template = split(
            make_state(0), meshes.make_mesh(data=2, fsdp=2, tensor=2), "fsdp", "tensor"
        )
        restored = restore(checkpoints, template).state
    assert as_bytes(restored) == as_bytes(state)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(
        lambda leaf: leaf.sharding, template
    )


@functools.partial(jax.jit, donate_argnums=0)
def update(state):
    return jax.tree.map(lambda leaf: leaf * 3 + 1, state)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_save_and_the_next_donated_update_share_no_buffer(tmp_path, sharded):
    sharding = NamedSharding(meshes.make_mesh(), PartitionSpec("fsdp")) if sharded else None
    state = [jax.device_put(jnp.arange(1 << 23, dtype=jnp.int32) + n, sharding) for n in range(4)]
    expected = [np.array(leaf) for leaf in state]
    jax.block_until_ready(update([leaf + 0 for leaf in state]))  # compiled
    state = [leaf + 0 for leaf in state]  # without the views that numpy may have kept
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        updated = jax.block_until_ready(update(state))
        # Where the writer still looked at the memory, jax would have copied instead of giving it to
        # the update.
        assert all(leaf.is_deleted() for leaf in state)
        restored = restore(checkpoints, updated).state
    for leaf, saved in zip(restored, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), saved)


def forge(folder: Path) -> None:
    file = folder / "host/document.json"
    file.write_text(file.read_text().replace('"step": 2', '"step": 7'))


# What `test_damage_is_named.py` does to each file is not here.
DAMAGES = {
    "forged": forge,
    "no data": lambda folder: shutil.rmtree(folder / "state/ocdbt.process_0"),
    "flipped metadata": lambda folder: flip_in(folder / "state/_METADATA", b'"version", "k'),
    "no state": lambda folder: shutil.rmtree(folder / "state"),
    "no host": lambda folder: shutil.rmtree(folder / "host"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_it_used(tmp_path, capfd, damage):
    save(tmp_path, 1, 2)
    damage(tmp_path / "2")
    with opened(tmp_path) as checkpoints:
        step, restored, host = restore(checkpoints, make_state(0))
        said = capfd.readouterr()
        assert said.out == "" and said.err.count("\n") == 1
        assert "checkpoint of step 2 is damaged (" in said.err and "damaged-2" in said.err
        assert (step, host) == (1, {"step": 1}) and as_bytes(restored) == as_bytes(make_state(1))
        checkpoints.save(2, make_state(2), {})
        assert restore(checkpoints, make_state(0)).step == 2
    assert listed(tmp_path) == {"1", "2", "damaged-2"}


def test_where_none_is_whole_nothing_is_begun_anew(tmp_path):
    for _ in range(3):
        save(tmp_path, 1)
        flip(tmp_path / "1")
        with (
            opened(tmp_path) as checkpoints,
            pytest.raises(ValueError, match=r"No checkpoint in .* is valid"),
        ):
            restore(checkpoints, make_state(0))
    assert listed(tmp_path) == {"damaged-1", "damaged-1-2", "damaged-1-3"}
    with (
        opened(tmp_path) as checkpoints,
        pytest.raises(ValueError, match=r"No checkpoint in .* is valid"),
    ):
        restore(checkpoints, make_state(0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 4}, "seed = 3, and this run has 4"),
        ({"weights": [1.0]}, r"weights = \[1.0, 2.0\], and this run has \[1.0\]"),
        ({"new": True}, "new = None, and this run has True"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path, change, said):
    save(tmp_path, 1)
    with opened(tmp_path, **change) as checkpoints, pytest.raises(ValueError, match=said):
        restore(checkpoints, make_state(0))
    assert listed(tmp_path) == {"1"}
    assert document.differences(json.loads(json.dumps(IDENTITY)), IDENTITY) == []


def test_a_change_of_the_config_is_refused_with_the_way_out_and_may_be_allowed(tmp_path):
    save(tmp_path, 1)
    out = r"restore it, set checkpoint\.allow_changes=True, or name another workdir"
    for change, allowed, said in (
        ({"seed": 4}, False, rf"seed = 3, and this run has 4; {out}"),
        ({"model.path": "other"}, True, r"has 'other'; restore it, or name another workdir"),
    ):
        with (
            Checkpoints(tmp_path, 2, IDENTITY | change, ["seed"], allowed) as checkpoints,
            pytest.raises(ValueError, match=said),
        ):
            checkpoints.restore(make_state(0))
    with Checkpoints(
        tmp_path, 2, IDENTITY | {"seed": 4}, ["seed"], allow_changes=True
    ) as checkpoints:
        assert restore(checkpoints, make_state(0)).step == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda state: state.replace(weights=state.weights | {"more": state.weights["bits"]}),
            r"has nothing for weights.more, and this run float32\[",
        ),
        (lambda state: state.replace(moments=None), "holds moments"),
        (
            lambda state: state.replace(version=jnp.float32(0)),
            r"has int32\[\] for version, and this run float32\[\]",
        ),
        (
            lambda state: state.replace(version=jnp.zeros(2, jnp.int32)),
            r"has int32\[\] for version, and this run int32\[2\]",
        ),
    ],
)
def test_nothing_is_initialised_or_dropped_in_silence(tmp_path, change, said):
    save(tmp_path, 1)
    with opened(tmp_path) as checkpoints, pytest.raises(ValueError, match=said):
        restore(checkpoints, change(make_state(0)))
    assert listed(tmp_path) == {"1"}


def test_a_checkpoint_of_an_earlier_version_is_read_under_the_names_it_has(tmp_path):
    """Policy, critic and student each had fields of their own in one state."""
    numbers = iter(range(1, 99))
    names = ("policy", "optimizer", "critic", "critic_optimizer", "drafter", "drafter_optimizer")
    before: dict[str, Any] = {name: {"mu": jnp.full(2, next(numbers))} for name in names}
    before |= {"step": jnp.int32(7), "drafter_version": jnp.int32(5)}
    with opened(tmp_path) as checkpoints:
        checkpoints.save(7, before, {})
        now = {
            "policy": Trained(before["policy"], before["optimizer"], before["step"]),
            "critic": Trained(before["critic"], before["critic_optimizer"], before["step"]),
            "drafter": Trained(
                before["drafter"], before["drafter_optimizer"], before["drafter_version"]
            ),
        }
        _, found, _ = restore(checkpoints, jax.eval_shape(lambda: now))
    assert as_bytes(found) == as_bytes(now)
    with opened(tmp_path) as checkpoints, pytest.raises(ValueError, match=r"holds critic\.mu"):
        restore(checkpoints, {"policy": now["policy"], "drafter": now["drafter"]})
