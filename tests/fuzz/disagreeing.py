"""Folders at random in which several sources name the same fact, each as it likes."""

from __future__ import annotations

from typing import Any

from folders import SPECIAL, Fact, added
from hypothesis import strategies as st

NEW = ("<think>", "</think>", "<|tool|>")  # tokens that tokenizer.json lacks
FIRST = 36  # the id of the first new token
THETAS = st.sampled_from([500.0, 20_000.0])
NAMED = ("bos_token", "eos_token", "pad_token", "sep_token", "tool_token")
IDS = st.none() | st.integers(32, 37) | st.lists(st.integers(32, 37), max_size=3)


@st.composite
def ropes(draw: st.DrawFn) -> dict[str, Any]:
    """`rope_scaling` or `rope_parameters`, empty or whole."""
    kind = draw(st.sampled_from(["", "default", "linear", "llama3"]))
    rope: dict[str, Any] = {draw(st.sampled_from(["rope_type", "type"])): kind} if kind else {}
    if kind in ("linear", "llama3"):
        rope["factor"] = draw(st.sampled_from([2.0, 4.0]))
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        if draw(st.booleans()):
            rope["original_max_position_embeddings"] = draw(st.sampled_from([16, 32]))
    if kind and draw(st.booleans()):
        rope["rope_theta"] = draw(THETAS)
    return rope


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    keys = {
        "rope_scaling": ropes(),
        "rope_parameters": ropes(),
        "rope_theta": THETAS,
        "original_max_position_embeddings": st.just(24),
        "tie_word_embeddings": st.booleans(),
        "eos_token_id": IDS,
        "bos_token_id": st.integers(0, 36),
        "pad_token_id": st.none() | st.integers(0, 36),
    }
    return draw(st.fixed_dictionaries({}, optional=keys))


@st.composite
def tokens(draw: st.DrawFn) -> dict[str, Any]:
    """The files that name tokens beside tokenizer.json; most ids are those that follow there."""
    order = draw(st.permutations(NEW))
    shift = draw(st.sampled_from([0, 0, 0, 1]))
    ids = {token: FIRST + shift + place for place, token in enumerate(order)}
    count = st.integers(0, len(NEW))
    text = st.sampled_from([*NEW, *SPECIAL, "x"])
    named = st.dictionaries(st.sampled_from(NAMED), st.none() | text, max_size=3)
    settings: dict[str, Any] = {**draw(named)}
    files: dict[str, Any] = {"tokenizer_config.json": settings}
    if draw(st.booleans()):
        settings["added_tokens_decoder"] = {}
        for token in order[: draw(count)]:
            flags = {flag: draw(st.booleans()) for flag in ("special", "normalized", "lstrip")}
            settings["added_tokens_decoder"] |= added({"content": token} | flags, ids[token])
    if draw(st.booleans()):
        files["added_tokens.json"] = {token: ids[token] for token in order[: draw(count)]}
    if draw(st.booleans()):
        files["special_tokens_map.json"] = draw(named)
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if draw(st.integers(0, 3)) == 0:
            settings[key] = draw(st.lists(st.sampled_from([*NEW, *SPECIAL]), unique=True))
    return files


@st.composite
def folders_apart(draw: st.DrawFn) -> Fact:
    """A folder: what disagrees is the rotary embedding, tokens, their ids, ends and the head."""
    files = draw(tokens()) | {"config.json": draw(configs())}
    if draw(st.booleans()):
        files["generation_config.json"] = {"eos_token_id": draw(IDS)}
    if draw(st.booleans()):
        files["chat_template.jinja"] = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    weights = ["", "head is embed", "no head", "no embed", "stale shards"]
    tied = files["config.json"].get("tie_word_embeddings")
    return Fact(files, draw(st.sampled_from(weights if tied else ["", "stale shards"])))
