"""Programs that are compiled beside a run: in order, for the phase that waits, all it needs."""

from __future__ import annotations

import functools
import threading

import jax
import numpy as np
import pytest

from rlhf_jax.generation import precompile
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.requests import GenerationConfig, Request
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.mesh import ONE_DEVICE, Layout, make_mesh
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.runtime.compilation import Programs


def test_a_phase_waits_for_its_own_programs(monkeypatch):
    """Begun in order on as many threads as cores; those of other phases go on."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    programs = Programs()
    begun = []
    held = threading.Event()

    def program(name: str, hold: bool = False) -> None:
        begun.append(name)
        if hold:
            held.wait(60)

    quiet = programs.events
    programs.add(functools.partial(program, "gradient", True), "training")
    for name in ("round", "admit", "narrower"):
        programs.add(functools.partial(program, name), "generation")
    assert programs.events != quiet, "something has begun"
    left = []
    programs.wait("generation", lambda: left.append(programs.left))
    assert begun == ["gradient", "round", "admit", "narrower"]
    assert left[-1] == 1 == programs.left
    programs.wait("generation", pytest.fail)  # they have been waited for
    before = programs.events
    held.set()
    programs.wait("training", lambda: None)
    assert programs.events != before and not programs.left, "something has ended"
    programs.wait("evaluation", pytest.fail)
    programs.close()


def test_what_cannot_be_compiled_ahead_is_said_and_left_to_the_phase():
    programs = Programs()
    programs.add(functools.partial(int, "no room"), "training")
    with pytest.warns(UserWarning, match="A program of training could not .* 'no room'"):
        programs.wait("training", lambda: None)
    programs.close()


def seldom(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("strategies", "meshed"),
    [
        ("plain", True),
        ("plain lookup-chain-2", False),
        pytest.param("model-chain-2", True, marks=pytest.mark.slow),
        seldom("plain", False),
        seldom("plain lookup-chain-2", True),
        seldom("model-chain-2", False),
    ],
)
def test_a_stage_finds_its_programs_compiled(strategies, meshed, target, drafter, compilations):
    """Samples of several lengths: rows are begun, shrink by halves, read what ended, and end."""
    layout = ONE_DEVICE
    if meshed:
        layout = Layout(make_mesh(1, -1, 1, jax.devices()[:2]), "generation")
        target, drafter = (jax.device_put(m, model_shardings(m, layout)) for m in (target, drafter))
    models = (target, drafter if "model" in strategies else None)
    decoding = GenerationConfig(
        Sampling(1.0),
        tuple(map(trees.parse, strategies.split())),
        (),
        8,
        72,
        seed=3,
        history=0 if strategies == "plain" else 16,
        min_rows=2,
    )
    prompts = [np.arange(5, 9 + i, dtype=np.int32) for i in range(2)]
    wanted = [
        Request(prompt, tuple(range(4 * i, 4 * i + 4)), 4 + 8 * i)
        for i, prompt in enumerate(prompts)
    ]
    found, analyse = precompile.first_programs(
        models, 8, [*map(len, prompts)], decoding, layout, looks_back=False
    )
    for compile_program in found:
        compile_program()
    with compilations() as seen:
        assert "plain" not in strategies or analyse()["flops"] > 0
        samples = list(generate(*models, wanted, decoding, layout))
    assert len(samples) == 8 and not seen
