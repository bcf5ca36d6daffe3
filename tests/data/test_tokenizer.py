"""Tokenizers and chat templates: equal to a plain Python BPE and to transformers' rendering."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from offspring import ended
from places import GOLDEN

from rlhf_jax.data import rendering
from rlhf_jax.data.tokenizer import Tokenizer, check_vocabulary, read_tokenizer
from rlhf_jax.models.files import gguf, gguf_file
from rlhf_jax.types import ModelConfig

TOKENIZATION = json.loads((GOLDEN / "tokenization.json").read_text(encoding="utf-8"))
TEMPLATES = json.loads((GOLDEN / "templates.json").read_text(encoding="utf-8"))
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def smollm2_file(smollm2: Path) -> gguf_file.File:
    return gguf_file.open_file(smollm2)


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_file: gguf_file.File) -> Tokenizer:
    return gguf.read_tokenizer(smollm2_file)


def small(template: str | None = None, special: dict[str, str] | None = None) -> Tokenizer:
    """A tokenizer of three words."""
    words = tokenizers.models.WordLevel({"<unk>": 0, "Hi": 1, "</s>": 2}, unk_token="<unk>")
    backend = tokenizers.Tokenizer(words)
    return Tokenizer(backend, template, special or {}, {}, Path("here"))


@pytest.mark.parametrize("kind", sorted(TOKENIZATION["ids"]))
def test_encoding_equals_plain_bpe(kind: str, smollm2_file: gguf_file.File):
    metadata = {
        **smollm2_file.metadata,
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = gguf.read_tokenizer(dataclasses.replace(smollm2_file, metadata=metadata))
    for text, ids in zip(TOKENIZATION["texts"], TOKENIZATION["ids"][kind], strict=True):
        assert tokenizer.encode(text) == ids, text


def test_decoding_gives_the_text_back(smollm2_tokenizer: Tokenizer):
    alphabet = smollm2_tokenizer.backend.get_vocab()
    for text in TOKENIZATION["texts"]:
        if "\u0000" not in text:  # some control bytes have no token
            ids = smollm2_tokenizer.encode(text)
            assert smollm2_tokenizer.backend.decode(ids, skip_special_tokens=False) == text
    assert (
        smollm2_tokenizer.decode([alphabet["<|im_start|>"], *smollm2_tokenizer.encode("hi")])
        == "hi"
    )


@pytest.mark.parametrize("case", TEMPLATES, ids=range(len(TEMPLATES)))
def test_templates_render_as_in_transformers(case: dict):
    tokenizer = small(case["template"], case["special"])
    if case["text"] is None:
        with pytest.raises(
            ValueError, match="the chat template failed on the messages: no such role: stop"
        ):
            tokenizer.render(case["messages"], case["prompted"])
    else:
        given = case.get("arguments", {})
        assert tokenizer.render(case["messages"], case["prompted"], **given) == case["text"]


def test_arguments_of_a_template_may_have_any_name():
    names = ("chats", "template", "bos_token", "arguments", "tools")
    says = small("".join(f"{{{{ {name} }}}}" for name in names), {"bos_token": "<s>"})
    given = dict.fromkeys((*names, "self"), "x")
    assert says.render(CHAT, **given) == "x" * len(names)
    assert says.encode_chats([CHAT], **given) == [says.encode_chat(CHAT, **given)]


def test_a_template_is_told_the_day_and_no_time_of_it():
    asks = small("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}")
    told = dataclasses.replace(asks, day=datetime.date(2024, 2, 29)).render(CHAT)
    assert told == "2024-02-29 00:00:00"
    today = datetime.date.fromisoformat(asks.render(CHAT).removesuffix(" 00:00:00"))
    assert abs(today - datetime.date.today()) <= datetime.timedelta(days=1)


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (LOOP, "it takes longer than 1 s"),
        ("{{ 10 ** (10 ** 10) }}", "it takes longer than 1 s"),  # in C, and when it is compiled
        ("{{ (messages|length * 10) ** (10 ** 10) }}", "it takes longer than 1 s"),
        ("{{ 'a' * 10 ** 10 }}", "it needs more memory than there is"),
        ("{{ messages[0].content * 10 ** 10 }}", "it needs more memory than there is"),
        ("{{ messages[0].content * 3000000 }}", "it writes over 4,000,000 characters"),
        (LOOP.replace("99999) %}{% endfor", "99999) %}abc{% endfor"), "over 4,000,000 characters"),
    ],
    ids=range(7),
)
def test_a_template_has_limits_of_time_text_and_memory(template, words, monkeypatch):
    if words.startswith("it takes"):
        monkeypatch.setattr(rendering, "SECONDS", 1.0)
    tokenizer = small("{% if messages[0].content == 'Hi' %}" + template + "{% else %}ok{% endif %}")
    for _ in range(2):
        with pytest.raises(ValueError, match=f"here: the chat template failed .*{words}"):
            tokenizer.render(CHAT)
    if not template.startswith("{{ 10 "):  # a constant is computed when the template is compiled
        assert tokenizer.render([{"role": "user", "content": "Ho"}]) == "ok", "the next one goes on"


def test_many_conversations_are_rendered_in_order_and_the_first_failure_is_told():
    tokenizer = small("{{ 1 // (messages[0].content|int) }}")
    chats = [[{"role": "user", "content": str(number)}] for number in range(1, 3000)]
    assert tokenizer.render_all(chats) == ["1", *["0"] * 2998]
    chats[1500:1502] = [[{"role": "user", "content": "0"}]] * 2
    with pytest.raises(rendering.RenderingError, match="by zero") as caught:
        tokenizer.render_all(chats)
    assert caught.value.index == 1500
    assert tokenizer.render_all(chats[:3]) == ["1", "0", "0"], "no answer of the call before"
    assert tokenizer.render_all([]) == []


def test_a_long_conversation_and_any_character_come_through():
    text = "\ud800é\u0000\n" * 100_000
    said = small("{{ messages[0].content }}{{ messages[0].at }}")
    at = datetime.datetime(2024, 2, 29, 1, 2, 3)
    chat = [{"role": "user", "content": text, "at": at}]
    assert said.render_all([chat] * 3) == [text + str(at)] * 3


def test_threads_share_the_process_of_a_template():
    tokenizer = small("{{ messages[0].content }}")

    def render(number: int) -> list[str]:
        return tokenizer.render_all([[{"role": "user", "content": str(number)}]] * 300)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for number, found in enumerate(threads.map(render, range(40))):
            assert found == [str(number)] * 300


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ 10 ** (10 ** 10) }}"])
def test_a_templates_process_ends_with_a_parent_that_is_killed(template):
    """Idle at once, at work within its limit of time."""
    program = (
        "import sys, time, threading\nfrom pathlib import Path\n"
        "from rlhf_jax.data import rendering\nrendering.SECONDS = 3.0\n"
        "from rlhf_jax.data.tokenizer import Tokenizer\n"
        "one = Tokenizer(None, sys.argv[1], {}, {}, Path('here'))\n"
        "chat = [{'role': 'user', 'content': 'Hi'}]\n"
        "threading.Thread(target=one.render, args=(chat,)).start()\n"
        "while one._renderer is None or one._renderer._process is None: time.sleep(0.01)\n"
        "print(one._renderer._process.pid, flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, template]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not ended(pid, patience=0.1)
        parent.kill()
    assert ended(pid)


def test_a_template_stays_in_its_sandbox():
    with pytest.raises(ValueError, match="the chat template failed"):
        small("{{ messages.__class__.__base__.__subclasses__() }}").render(CHAT)
    with pytest.raises(ValueError, match="the chat template failed"):
        small("{{ messages.append(1) }}").render(CHAT)
    with pytest.raises(ValueError, match="the chat template failed"):
        small("{% for %}").render(CHAT)


HALVES = {  # what reaches a tokenizer or a template with half a character in it
    "a message": ("{{ messages[0].content }}", {"content": "a\ud800"}, {}, {}),
    "a message's name": ("{{ messages[0].name }}", {"name": "\udfff"}, {}, {}),
    "a call of a tool": ("{{ messages[0] | tojson }}", {"tool_calls": [{"f": "\ud800"}]}, {}, {}),
    "a template": ("Hi \ud800", {}, {}, {}),
    "a literal of a template": ('{{ "\\ud800" }}', {}, {}, {}),
    "a character that a template cuts": ("{{ '%c' % 55296 }}", {}, {}, {}),
    "an argument": ("{{ date }}", {}, {"date": "\ud800"}, {}),
    "a tool": ("{{ tools | tojson }}", {}, {"tools": [{"name": "\ud800"}]}, {}),
    "a document": ("{{ documents[0].text }}", {}, {"documents": [{"text": "\ud800"}]}, {}),
    "a special token": ("{{ bos_token }}", {}, {}, {"bos_token": "\ud800"}),
}


@pytest.mark.parametrize("what", HALVES)
def test_half_a_character_is_a_sentence_wherever_it_comes_from(what: str):
    template, message, arguments, special = HALVES[what]
    tokenizer = small(template, special)
    chats = [[CHAT[0] | message], CHAT, [CHAT[0] | message]]
    with pytest.raises(rendering.RenderingError, match=r"here: .*half a character") as caught:
        tokenizer.encode_chats(chats, **arguments)
    assert caught.value.index == 0
    with pytest.raises(ValueError, match=r"here: .*half a character"):
        tokenizer.encode("a\udfff")


def test_no_template_is_said_so():
    with pytest.raises(ValueError, match="here has no chat template"):
        small().render(CHAT)


def test_chat_is_encoded_without_a_second_first_token():
    tokenizer = small("{{ messages[0].content }}")
    tokenizer.backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 2)]
    )
    assert tokenizer.encode("Hi") == [2, 1]
    assert tokenizer.encode_chat(CHAT) == [1]


def test_a_larger_vocabulary_than_the_models_is_refused(tiny: ModelConfig):
    check_vocabulary(small(), dataclasses.replace(tiny, vocab_size=3))
    with pytest.raises(
        ValueError, match=r"Wrong tokenizer: here gives token ids up to 2, .* has 2"
    ):
        check_vocabulary(small(), dataclasses.replace(tiny, vocab_size=2))


def test_saved_tokenizer_is_the_same(smollm2_tokenizer: Tokenizer, tmp_path: Path):
    smollm2_tokenizer.save(tmp_path)
    again = read_tokenizer(tmp_path)
    assert again.special == smollm2_tokenizer.special
    assert again.render(CHAT) == smollm2_tokenizer.render(CHAT)
    assert [again.encode(text) for text in TOKENIZATION["texts"]] == TOKENIZATION["ids"]["smollm"]


def test_saved_tokenizer_loads_in_transformers(smollm2_tokenizer: Tokenizer, tmp_path: Path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    smollm2_tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert [theirs(text)["input_ids"] for text in TOKENIZATION["texts"]] == TOKENIZATION["ids"][
        "smollm"
    ]
    text = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == smollm2_tokenizer.render(CHAT)
    assert theirs.special_tokens_map == smollm2_tokenizer.special


def write_folder(folder: Path, settings: dict) -> Path:
    small().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_settings_are_read_in_every_form(tmp_path: Path):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = write_folder(
        tmp_path, {"eos_token": {"content": "</s>"}, "chat_template": named, "pad_token": None}
    )
    (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<unk>"}))
    tokenizer = read_tokenizer(folder)
    assert tokenizer.special == {"eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.render(CHAT) == "D"
    (folder / "chat_template.jinja").write_text("File")
    assert read_tokenizer(folder).render(CHAT) == "File"


def test_missing_and_broken_tokenizers_are_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model alone is not read"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        read_tokenizer(tmp_path)
