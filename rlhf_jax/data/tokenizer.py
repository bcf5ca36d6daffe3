"""Convert text to token ids and back, and chat messages to text, without `transformers`."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from rlhf_jax.data.rendering import Message, Renderer, RenderingError
from rlhf_jax.data.special_tokens import add_tokens, read_settings
from rlhf_jax.data.templates import ANSWER_MARKS, MARKED
from rlhf_jax.runtime.foreign import has_surrogate, reading_foreign
from rlhf_jax.types import ModelConfig

NO_TEXT = "what it is to encode has half a character (a lone surrogate); take it out."
# The folder of transformers for chat templates other than the default, one file each.
OTHER_TEMPLATES = "additional_chat_templates"
# A dialogue whose rendering shows the text after an answer.
DIALOGUE = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Answer"})


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Hold a tokenizer with its chat template and the special tokens that the template may use."""

    backend: tokenizers.Tokenizer
    template: str | None  # In jinja2; None if there is none.
    special: Mapping[str, str]  # Special tokens by their keys, such as "eos_token".
    settings: Mapping[str, Any]  # The content of tokenizer_config.json, written back on saving.
    origin: Path  # The folder it was read from, for error messages.
    # The day given to templates that ask for it; the run's day, if there is a run.
    day: datetime.date = dataclasses.field(default_factory=datetime.date.today)
    # Templates besides the default, by name: "tool_use" is used if tools are given.
    named_templates: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a plain text, with the special tokens that belong around it.

        Raises ValueError if the text has a lone surrogate.
        """
        if has_surrogate(text):
            raise ValueError(f"{self.origin}: {NO_TEXT}")
        return self.backend.encode(text).ids

    def encode_chat(
        self, messages: Sequence[Message], /, add_generation_prompt: bool = True, **arguments: Any
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
        """Return the token ids of each chat in the chat template; errors as in `render_all`."""
        texts = self.render_all(chats, add_generation_prompt, **arguments)
        for index, text in enumerate(texts):
            if has_surrogate(text):
                raise RenderingError(f"{self.origin}: {NO_TEXT}", index)
        return [self.encode_rendered(text) for text in texts]

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of a text in which a template has placed every special token."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def decode_whole(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens written out."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def end_of_turn(self) -> int | None:
        """Return the id of the added token that the template writes after an answer, if any."""
        try:
            text = self.render(DIALOGUE, add_generation_prompt=False)
        except ValueError:  # no template, or one that refuses such a dialogue
            return None
        _, answer, after = text.rpartition(DIALOGUE[-1]["content"])
        ids = self.backend.encode(after.lstrip(), add_special_tokens=False).ids if answer else []
        added = self.backend.get_added_tokens_decoder()
        return ids[0] if ids and ids[0] in added else None

    def render(
        self, messages: Sequence[Message], /, add_generation_prompt: bool = True, **arguments: Any
    ) -> str:
        """Render messages by the chat template, as transformers' `apply_chat_template` does.

        `arguments` are further inputs of the template, such as `enable_thinking`, `tools` or
        `documents`. Raises ValueError if there is no template; RenderingError if it refuses the
        messages or exceeds the limits of `templates.py`.
        """
        return self.render_all([messages], add_generation_prompt, **arguments)[0]

    def render_all(
        self,
        chats: Sequence[Sequence[Message]],
        /,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> list[str]:
        """Render each chat by the chat template, as `render` does, all in one process.

        The `index` of a RenderingError is that of the first chat that failed.
        """
        renderer = self._renderer
        if arguments.get("tools") is not None:
            renderer = self._tool_renderer or renderer  # as in transformers
        if renderer is None:
            raise ValueError(f"{self.origin} has no chat template; give prompts as plain strings.")
        inputs = {"add_generation_prompt": add_generation_prompt, **self.special, **arguments}
        try:
            return renderer.render(chats, inputs)
        except RenderingError as error:
            raise RenderingError(
                f"{self.origin}: the chat template failed on the messages: {error}.", error.index
            ) from error

    def render_marked(
        self, messages: Sequence[Message], /, **arguments: Any
    ) -> tuple[str, list[slice]]:
        """Put messages into a template that marks answers: the text, and where answers stand in it.

        Raises ValueError where a message has a character that is the mark, and as `render` does.
        """
        text = json.dumps([dict(message) for message in messages], ensure_ascii=False, default=str)
        if any(mark in text for mark in ANSWER_MARKS):
            raise ValueError("A message has a character for private use, U+E0FE or U+E0FF.")
        marked = self.render(messages, False, **{MARKED: True}, **arguments)
        pieces = re.split("|".join(ANSWER_MARKS), marked)
        ends = np.cumsum([len(piece) for piece in pieces])
        # Marks stand before and after each answer, so every second piece is one.
        answers = [slice(*map(int, ends[at - 1 : at + 1])) for at in range(1, len(pieces), 2)]
        return "".join(pieces), answers

    def encode_marked(self, text: str, answers: Sequence[slice]) -> tuple[list[int], list[bool]]:
        """Return the token ids of a rendered text, and which of them begin within an answer.

        answers: in characters of the text.
        """
        encoding = self.backend.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        marked = [any(part.start <= start < part.stop for part in answers) for start in starts]
        return encoding.ids, marked

    @functools.cached_property
    def _renderer(self) -> Renderer | None:
        return None if self.template is None else Renderer(self.template, self.day)

    @functools.cached_property
    def _tool_renderer(self) -> Renderer | None:
        template = self.named_templates.get("tool_use")
        return None if template is None else Renderer(template, self.day)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat templates.

        AutoTokenizer of transformers loads them.
        """
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        settings = {key: value for key, value in self.settings.items() if key != "chat_template"}
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
        if self.template is not None:
            (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        for name, template in self.named_templates.items():
            (folder / OTHER_TEMPLATES).mkdir(exist_ok=True)
            (folder / OTHER_TEMPLATES / f"{name}.jinja").write_text(template, encoding="utf-8")


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
    settings = read_settings(file.parent)
    special = add_tokens(backend, file.parent, settings)
    backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
    templates = _read_templates(file.parent, settings)
    # An `auto_map` points at code that is not saved with the tokenizer.
    if "auto_map" in settings or "tokenizer_class" not in settings:
        settings = settings | {"tokenizer_class": "PreTrainedTokenizerFast"}
    portable = special | {key: value for key, value in settings.items() if key != "auto_map"}
    return Tokenizer(
        backend,
        templates.pop("default", None),
        special,
        settings=portable,
        origin=file.parent,
        named_templates=templates,
    )


def _read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a folder by name; ValueError if none is the default.

    Template files take precedence over the templates in tokenizer_config.json.
    """
    place = folder / "tokenizer_config.json"
    named = settings.get("chat_template") or []
    named = named if isinstance(named, list) else [{"name": "default", "template": named}]
    with reading_foreign(place, "a list of named chat templates"):
        templates = {str(entry["name"]): entry["template"] for entry in named}
    files = {file.stem: file for file in sorted((folder / OTHER_TEMPLATES).glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    if files:
        place = folder
        templates = {}
    for name, file in files.items():
        with reading_foreign(file, "a chat template"):
            templates[name] = file.read_text(encoding="utf-8")
    for template in templates.values():
        if not isinstance(template, str):
            raise ValueError(f"{place}: chat_template is {template!r:.60}; it must be a text.")
    if templates and "default" not in templates:
        raise ValueError(f"{place}: of the chat templates {sorted(templates)} none is 'default'.")
    return templates


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise ValueError if the tokenizer can return an id without an embedding in the model."""
    largest = max(tokenizer.backend.get_vocab(with_added_tokens=True).values())
    if largest >= config.vocab_size:
        raise ValueError(
            f"Wrong tokenizer: {tokenizer.origin} gives token ids up to {largest}, which is"
            f" {tokenizer.backend.id_to_token(largest)!r:.60}, but the model's vocabulary has"
            f" {config.vocab_size}."
        )
