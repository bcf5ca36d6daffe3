"""Whatever is wrong with a file that others wrote: one sentence, or what the format says it is."""

from __future__ import annotations

import time

import damage
import hypothesis
import pytest

FILES = (
    "safetensors",
    "index",
    "config",
    "tokenizer",
    "settings",
    "generation",
    "template",
    "gguf",
    "jsonl",
    "parquet",
    "document",
    "message",
    "arrays",
    "leaves",
    "manifest",
    "kept",
)
SLOWLY_READ = ("leaves", "manifest")


@pytest.mark.parametrize("name", FILES)
def test_whole_files_are_read_as_the_formats_own_readers_do(name, whole, judge):
    assert judge(name, whole[name].read_bytes()) == ""


def fuzz(name: str, original: bytes, judge, examples: int, seed: int | None = None) -> None:
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=seed is None,
        suppress_health_check=(
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.function_scoped_fixture,
        ),
    )
    @hypothesis.given(damage.damaged(name, original))
    def try_one(content: bytes) -> None:
        assert judge(name, content) == ""

    if seed is not None:
        try_one = hypothesis.seed(seed)(try_one)
    try_one()


@pytest.mark.parametrize("name", FILES)
def test_damage_is_a_sentence_or_what_the_format_says(name, whole, judge):
    fuzz(name, whole[name].read_bytes(), judge, 8 if name in SLOWLY_READ else 25)


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_more_damage_is_a_sentence_or_what_the_format_says(name, whole, judge):
    fuzz(name, whole[name].read_bytes(), judge, 200, seed=1)


@pytest.mark.slow
def test_damage_for_as_long_as_is_asked(whole, judge, request):
    """`pytest -m slow tests/fuzz --fuzz-minutes 60`."""
    end = time.monotonic() + 60 * request.config.getoption("--fuzz-minutes")
    seed = time.time_ns()
    while time.monotonic() < end:
        for name in FILES:
            fuzz(name, whole[name].read_bytes(), judge, 100, seed)
        seed += 1
