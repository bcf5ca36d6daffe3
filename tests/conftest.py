"""What every test shares: eight virtual CPU devices, strict dtypes, a compilation cache, small
models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# All are read before jax has its first device. Single-device tests run as fast with eight devices
# as with one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# With as few threads as there are cores, eight devices may wait for each other forever; see
# rlhf_jax/runtime/distributed.py.
os.environ.setdefault("NPROC", "32")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import jax
import pytest
import soon
from places import SUPPORT

from pallas_kernels import dispatch

if TYPE_CHECKING:  # imported where it is used: `pytest_configure` sets rlhf_jax's default kernels
    from rlhf_jax.types import Model, ModelConfig

# Tracing makes many objects and few cycles; looking for them takes a seventh of all time else.
gc.set_threshold(100_000, 10, 10)

# Compiling is most of the time: what one clone's tests have compiled, those of others take.
PROGRAMS = Path.home() / ".cache" / "rlhf_jax" / "tests"
KEPT_DAYS = 14

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(autouse=True)
def hangups_are_heard() -> None:
    """SIGHUP is ignored under nohup, and once libtpu is loaded: what a test starts would inherit
    that, but no handler.
    """
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest --kernels interpret`: everything with the TPU's kernels, interpreted."""
    parser.addoption(
        "--kernels", choices=("auto", "interpret"), default="auto", help="how tests run the kernels"
    )

    parser.addoption(
        "--fuzz-minutes", type=float, default=0.0, help="how long tests/fuzz damages files besides"
    )

    parser.addoption(
        "--soak-results", default="", help="a file for what tests/runs/test_soak.py has measured"
    )

    parser.addoption(
        "--mutant-results", default="", help="a file for what tests/laws/test_mutants.py has found"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Strict promotion, compiled programs kept between runs, telling asserts, and signals heard by
    what tests start.
    """
    # asserts of what tests share say as much as their own
    shared = {path.stem for path in SUPPORT.glob("*.py")} - sys.modules.keys()
    pytest.register_assert_rewrite(*shared)
    if config.getoption("--kernels") == "interpret":
        _interpret_kernels()
    # a job in the background has it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Tests held to a time, long ones and those of a GPU, each called by their mark, have programs
    # as users have them; what asks for `compiled_well` has all passes, but for emitters that a
    # process chooses once.
    if not str(config.getoption("markexpr")).startswith(("alone", "gpu", "long")):
        soon.compile_soon()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Programs that were compiled long ago go, as most of them are of code that has changed."""
    if not hasattr(session.config, "workerinput"):
        oldest = time.time() - KEPT_DAYS * 24 * 3600
        for program in PROGRAMS.glob("*"):
            if program.stat().st_mtime < oldest:
                program.unlink(missing_ok=True)


def pytest_collection_finish() -> None:
    """What thousands of collected tests are made of stays: no later collection looks at it."""
    gc.collect()
    gc.freeze()


def _interpret_kernels() -> None:
    """Other defaults than the reference, for configs and for whoever generates without one."""
    assert "rlhf_jax.mesh" not in sys.modules, "Its default layout has the kernels from before."
    dispatch.DEFAULT_KERNELS = dispatch.INTERPRETED
    from rlhf_jax.config import schema

    schema.DEFAULTS["kernels"] = dict.fromkeys(dispatch.FUNCTIONS, "interpret")


@pytest.fixture(scope="session")
def kernels_are_interpreted(pytestconfig: pytest.Config) -> bool:
    """Whether kernels are slow, so that a statistical test takes fewer samples, still enough for
    its law.
    """
    return pytestconfig.getoption("--kernels") == "interpret"


@pytest.fixture(autouse=True, scope="module")
def no_more_programs_than_needed() -> Iterator[None]:
    """Each program in memory takes several of the maps that Linux grants a process, and then XLA
    crashes.
    """
    yield
    jax.clear_caches()


@pytest.fixture
def compiled_well() -> Iterator[None]:
    """Programs have all of XLA's passes, for tests of the programs themselves."""
    before = jax.config.read(soon.PASSES)
    jax.config.update(soon.PASSES, False)
    yield
    jax.config.update(soon.PASSES, before)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as GGUF, fetched once and cached."""
    from rlhf_jax.data.download import smollm2

    return smollm2()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model of bytes, with its tokenizer."""
    import tiny_run

    return tiny_run.make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Where runs may begin: a model of bytes in `tiny`, prompts, a reward and a config."""
    import tiny_run

    place = tmp_path_factory.mktemp("runs")
    tiny_run.make_model(place / "tiny")
    tiny_run.make_files(place)
    return place


@pytest.fixture
def uncached() -> Iterator[None]:
    """Nothing is written to the compilation cache: programs of another machine cannot be read
    back.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    yield
    jax.config.update(name, before)


@pytest.fixture
def tiny() -> ModelConfig:
    """Two layers, grouped heads, tied: a model small enough to check by hand."""
    from rlhf_jax.types import ModelConfig

    return ModelConfig(
        family="llama",
        vocab_size=320,
        width=32,
        ffn_width=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_context=128,
        tied=True,
    )


@pytest.fixture(scope="module")
def target() -> Model:
    """A random policy of three layers, as it decodes."""
    from rlhf_jax.models.transformer import init, unstack
    from rlhf_jax.types import ModelConfig

    return unstack(init(jax.random.key(0), ModelConfig("llama", 300, 64, 96, 3, 4, 2, 16, 128)))


@pytest.fixture(scope="module")
def drafter(target: Model) -> Model:
    """The target without its last layer: right often, not always."""
    assert isinstance(target.layers, tuple)
    config = dataclasses.replace(target.config, num_layers=2)
    return dataclasses.replace(target, layers=target.layers[:2], config=config)


@pytest.fixture
def one_device(monkeypatch):
    """Only the first of the virtual devices."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.fixture
def compilations() -> Callable[[], contextlib.AbstractContextManager[list[float]]]:
    """`with compilations() as seen:` leaves in `seen` the seconds of each program made meanwhile.

    A program read from the compilation cache counts too: what is counted is retracing, not the work
    of XLA.
    """

    @contextlib.contextmanager
    def count() -> Iterator[list[float]]:
        seen: list[float] = []

        def listen(event: str, duration_secs: float, **_) -> None:
            if event == COMPILE_EVENT:
                seen.append(duration_secs)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield seen
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    return count
