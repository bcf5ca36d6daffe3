"""What the host remembers, into a checkpoint and out of it."""

import pytest
from host_states import host_state


@pytest.mark.parametrize(
    ("saved", "own", "kept"),
    [
        (("4 of a kind", False), ("4 of a kind", True), False),  # chosen for the same devices
        (("4 of a kind", False), ("8 of a kind", True), True),
        (("", False), ("", True), True),  # asked for, then and now
    ],
)
def test_how_layers_are_trained_is_kept_on_the_same_devices(saved, own, kept):
    before = host_state(remat_devices=saved[0], remat=saved[1], kl_coefficient=0.3)
    now = host_state(remat_devices=own[0], remat=own[1])
    restored = now.restored(3, before.document())
    assert restored.remat is kept and restored.remat_devices == own[0]
    assert restored.kl_coefficient == 0.3 and restored.step == 3


def test_a_checkpoint_of_before_the_choice_is_read():
    document = host_state().document()
    del document["remat"], document["remat_devices"]
    assert host_state(remat_devices="4 of a kind", remat=False).restored(1, document).remat is False
