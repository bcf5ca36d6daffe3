"""Text to token ids and back, and chat messages to text, without `transformers`."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from rlhf_jax.data.rendering import Message, Renderer, RenderingError
from rlhf_jax.runtime.foreign import parse_json, reading_foreign
from rlhf_jax.types import ModelConfig

# The keys under which a tokenizer's files name its special tokens.
SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Hold a tokenizer with its chat template, and the special tokens the template may name."""

    backend: tokenizers.Tokenizer
    template: str | None  # In jinja2; None where there is none.
    special: Mapping[str, str]  # Of SPECIAL_TOKENS, those that the tokenizer has.
    settings: Mapping[str, Any]  # The content of tokenizer_config.json, written back on saving.
    origin: Path  # Where it was read, for error sentences.
    # What a template is told that asks which day it is; of the run, where there is one.
    day: datetime.date = dataclasses.field(default_factory=datetime.date.today)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a plain text, with the special tokens that belong around it."""
        return self.backend.encode(text).ids

    def encode_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **arguments: Any
    ) -> list[int]:
        """Return the token ids of messages in the chat template; errors are those of `render`."""
        return self.encode_chats([messages], add_generation_prompt, **arguments)[0]

    def encode_chats(
        self,
        chats: Sequence[Sequence[Message]],
        /,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> list[list[int]]:
        """Return the token ids of each chat in the chat template; errors are those of `render`."""
        texts = self.render_all(chats, add_generation_prompt, **arguments)
        # The template has already placed every special token.
        return [self.backend.encode(text, add_special_tokens=False).ids for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **arguments: Any
    ) -> str:
        """Put messages into the chat template, as transformers' `apply_chat_template` does.

        `arguments` are what the template reads besides, such as `enable_thinking`. Raises
        ValueError when there is no template; RenderingError when it refuses the messages or goes
        beyond the limits of `templates.py`.
        """
        return self.render_all([messages], add_generation_prompt, **arguments)[0]

    def render_all(
        self,
        chats: Sequence[Sequence[Message]],
        /,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> list[str]:
        """Put each chat into the chat template, as `render` does."""
        if self._renderer is None:
            raise ValueError(f"{self.origin} has no chat template; give prompts as plain strings.")
        given = {"add_generation_prompt": add_generation_prompt, **self.special, **arguments}
        try:
            return self._renderer.render(chats, given)
        except RenderingError as error:
            raise RenderingError(
                f"{self.origin}: the chat template failed on the messages: {error}.", error.index
            ) from error

    @functools.cached_property
    def _renderer(self) -> Renderer | None:
        return None if self.template is None else Renderer(self.template, self.day)

    @functools.cached_property
    def largest_id(self) -> int:
        """Return the largest token id that `encode` can give."""
        return max(self.backend.get_vocab(with_added_tokens=True).values())

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja.

        AutoTokenizer of transformers loads them.
        """
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        settings = {key: value for key, value in self.settings.items() if key != "chat_template"}
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
        if self.template is not None:
            (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a Hugging Face folder.

    Raises FileNotFoundError or ValueError, in one sentence.
    """
    file = Path(folder) / "tokenizer.json"
    if not file.exists():
        hint = "; tokenizer.model alone is not read" if file.with_suffix(".model").exists() else ""
        raise FileNotFoundError(f"{file} is missing{hint}: copy the publisher's there.")
    with reading_foreign(file, "a tokenizer"):
        backend = tokenizers.Tokenizer.from_file(str(file))
    backend.no_padding()
    backend.no_truncation()
    beside = [file.with_name("tokenizer_config.json"), file.with_name("special_tokens_map.json")]
    settings, mapped = (read_json(other) if other.exists() else {} for other in beside)
    named = mapped | settings
    special = {}
    for key in SPECIAL_TOKENS:
        token = named.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(token, str):
            raise ValueError(f"{beside[0]}: {key} is {token!r:.60}; it must be a text.")
        if token:
            special[key] = token

    # A file of its own comes before the template among the settings.
    template = settings.get("chat_template")
    own = file.with_name("chat_template.jinja")
    if own.exists():
        with reading_foreign(own, "a chat template"):
            template = own.read_text(encoding="utf-8")
    elif isinstance(template, list):
        with reading_foreign(beside[0], "a list of named chat templates"):
            templates = {str(entry["name"]): entry["template"] for entry in template}
        if "default" not in templates:
            raise ValueError(
                f"{file.parent}: of the chat templates {sorted(templates)} in"
                " tokenizer_config.json none is 'default'."
            )
        template = templates["default"]
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{beside[0]}: chat_template is {template!r:.60}; it must be a text.")

    # An `auto_map` points at code that is not saved with the tokenizer.
    if "auto_map" in settings or "tokenizer_class" not in settings:
        settings = settings | {"tokenizer_class": "PreTrainedTokenizerFast"}
    portable = special | {key: value for key, value in settings.items() if key != "auto_map"}
    return Tokenizer(backend, template, special, settings=portable, origin=file.parent)


def read_json(file: Path) -> dict:
    """Read a JSON object from a file; FileNotFoundError or ValueError in one sentence."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing; {file.parent} is not a complete model folder.")
    with reading_foreign(file, "valid JSON"):
        content = parse_json(file.read_bytes().decode("utf-8-sig"))
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not hold a JSON object; download it again.")
    return content


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise ValueError when the tokenizer can give an id that the model has no embedding for."""
    if tokenizer.largest_id >= config.vocab_size:
        raise ValueError(
            f"Wrong tokenizer: {tokenizer.origin} gives token ids up to {tokenizer.largest_id},"
            f" but the model's vocabulary has {config.vocab_size}."
        )
