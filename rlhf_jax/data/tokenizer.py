"""Text to token ids and back, and chat messages to text, without `transformers`."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from rlhf_jax.types import ModelConfig

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
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
    """A tokenizer with its chat template, and the special tokens the template may name."""

    backend: tokenizers.Tokenizer
    template: str | None  # jinja2
    special: Mapping[str, str]  # of SPECIAL_TOKENS, those the tokenizer has
    settings: Mapping[str, Any]  # tokenizer_config.json, written back on saving
    origin: Path  # where it was read, for messages

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text, with the special tokens that the tokenizer itself puts around
        one.
        """
        return self.backend.encode(text).ids

    def encode_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of the rendered chat; the template has already placed every special token."""
        text = self.render(messages, add_generation_prompt)
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids, special tokens left out unless asked for."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The chat template applied to messages, as transformers' `apply_chat_template` does.

        Raises ValueError when there is no template or the template refuses the messages.
        """
        if self.template is None:
            raise ValueError(f"{self.origin} has no chat template; give prompts as plain strings.")
        try:
            return _compile(self.template).render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(
                f"{self.origin}: the chat template failed on the messages: {error}."
            ) from error

    @functools.cached_property
    def largest_id(self) -> int:
        """The largest token id that `encode` can give."""
        return max(self.backend.get_vocab(with_added_tokens=True).values())

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, for AutoTokenizer to
        load.
        """
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        settings = {key: value for key, value in self.settings.items() if key != "chat_template"}
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
        if self.template is not None:
            (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder; FileNotFoundError or ValueError say what is wrong."""
    file = Path(folder) / "tokenizer.json"
    if not file.exists():
        hint = "; tokenizer.model alone is not read" if file.with_suffix(".model").exists() else ""
        raise FileNotFoundError(f"{file} is missing{hint}: copy the publisher's there.")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises plain Exception
        raise ValueError(f"{file} is not a tokenizer: {error}.") from error
    backend.no_padding()
    backend.no_truncation()
    settings = _read_if_there(file.with_name("tokenizer_config.json"))
    named = _read_if_there(file.with_name("special_tokens_map.json")) | settings
    special = {key: _content(named[key]) for key in SPECIAL_TOKENS if named.get(key)}
    template = _read_template(file.parent, settings)
    return Tokenizer(backend, template, special, _portable(settings, special), file.parent)


def _portable(settings: dict, special: dict) -> dict:
    """tokenizer_config.json without what points at files that are not saved with it."""
    if "auto_map" in settings or "tokenizer_class" not in settings:
        settings = settings | {"tokenizer_class": "PreTrainedTokenizerFast"}
    return special | {key: value for key, value in settings.items() if key != "auto_map"}


def _content(token: str | dict) -> str:
    return token if isinstance(token, str) else token["content"]


def _read_if_there(file: Path) -> dict:
    return read_json(file) if file.exists() else {}


def _read_template(folder: Path, settings: dict) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if not isinstance(template, list):
        return template
    named = {entry["name"]: entry["template"] for entry in template}
    if "default" not in named:
        raise ValueError(
            f"{folder}: of the chat templates {sorted(named)} in tokenizer_config.json none is"
            " 'default'."
        )
    return named["default"]


def read_json(file: Path) -> dict:
    """A JSON object from a file; FileNotFoundError or ValueError in one sentence."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing; {file.parent} is not a complete model folder.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); download it again.") from error
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


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, with which templates mark what the assistant says, is rendered as what it
    holds.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    """The template in the environment transformers gives it: sandboxed, blocks trimmed, loop
    controls.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """jinja2's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
