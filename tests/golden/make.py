"""Make the golden files of the tests, with PyTorch and transformers.

    pip install torch transformers accelerate safetensors gguf
    python tests/golden/make.py SmolLM2-135M-Instruct.Q4_1.gguf

Writes beside itself a folder for each tiny random model (weights, configuration, token ids, logits)
and for each tiny reward model (weights, configuration, tokenizer, scores), and tokenization.json,
templates.json, folders.json and greedy.json.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import unicodedata
from pathlib import Path

import gguf
import regex
import tokenizers
import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))
import folders  # noqa: E402

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CASES = {  # name: (configuration, what differs from SHAPE, dtype of the file)
    "llama": (transformers.LlamaConfig, {"num_key_value_heads": 4}, torch.float32),
    "llama_tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}, torch.bfloat16),
    "llama3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}, torch.bfloat16),
    "llama3_tied": (
        transformers.LlamaConfig,
        {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "eos_token_id": [2, 5]},
        torch.float32,
    ),
    "linear": (
        transformers.LlamaConfig,
        {"rope_parameters": LINEAR_ROPE, "head_dim": 16},
        torch.float32,
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": 32}, torch.float32),
    "mistral_tied": (
        transformers.MistralConfig,
        {"sliding_window": None, "tie_word_embeddings": True},
        torch.bfloat16,
    ),
    "qwen2": (transformers.Qwen2Config, {"num_hidden_layers": 3}, torch.float32),
    "qwen2_tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}, torch.bfloat16),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}, torch.float32),
    "qwen3_tied": (
        transformers.Qwen3Config,
        {"head_dim": 16, "tie_word_embeddings": True},
        torch.bfloat16,
    ),
}
CLASSIFIERS = {  # name: (configuration, padding token)
    "llama_reward": (transformers.LlamaConfig, "<|pad|>"),
    # what ends every message, too: then it is not read
    "qwen2_reward": (transformers.Qwen2Config, "<|end|>"),
}
CLASSIFIER_SHAPE = {
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "num_labels": 1,
}
CLASSIFIER_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CLASSIFIER_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 日本?"},
        {"role": "assistant", "content": "Japan."},
    ],
    [{"role": "user", "content": "Speak"}, {"role": "assistant", "content": ""}],
    [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "It is four, I think."}],
]
TEXTS = [
    "Hello, world!",
    "  leading and trailing  ",
    "In 1984, 3.14159 and 1,000,000 were 42.",
    "naïve café Ünïcödé ﬁ ½ ² Ⅷ",
    "e\u0301 is not \u00e9 until it is composed",
    "日本語のテキスト、中文字符，한국어 텍스트",
    "مرحبا بالعالم नमस्ते שלום",
    "👩‍👩‍👧‍👦 🏳️‍🌈 😀😀 ✊🏿",
    "def f(x):\n    return x**2  # square\n\n\n\tif x:\r\n\t\tpass\n",
    "It's we'll I'D they'Re don't ''quotes''",
    "tabs\t\tand\u00a0nbsp\u2003em\u200bzero",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|> <|im_endx|>",
    "https://example.org/a_b?c=d&e=%20#f",
    "\n\n   \n",
    "a" * 40 + " " * 17 + "b",
    "ſtraße ΑΒΓ αβγ Ελληνικά ЖУК жук",
    "\u0000\u0001\ufeff\ufffd",
    "",
]
NOUNS = [
    "sea",
    "clock",
    "garden",
    "piano",
    "winter",
    "bridge",
    "teacher",
    "mountain",
    "river",
    "lamp",
    "market",
    "forest",
    "train",
    "kitchen",
    "letter",
    "island",
    "desert",
    "bicycle",
    "library",
    "storm",
]


def tiny_model(name: str) -> None:
    """A folder with a random model and its logits for two rows of tokens."""
    kind, changes, dtype = CASES[name]
    config = kind(**(SHAPE | changes))
    torch.manual_seed(sum(name.encode()))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, dtype)
    with torch.no_grad():
        tokens = torch.randint(0, config.vocab_size, (2, 16))
        logits = model(tokens).logits
    model.to(dtype).save_pretrained(HERE / name)
    golden = {"tokens": tokens.int(), "logits": logits.float()}
    save_file(golden, HERE / name / "golden.safetensors")


def randomize(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Weights large enough that nothing in them can be forgotten, exact in `dtype`."""
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            weight.copy_((1 + 0.2 * noise if "norm" in key else 0.3 * noise).to(dtype))


def tiny_reward_model(name: str) -> None:
    """A folder with a random sequence classifier, a tokenizer of bytes, and its scores of some
    conversations.
    """
    kind, padding = CLASSIFIERS[name]
    tokenizer = byte_tokenizer(padding)
    config = kind(
        **CLASSIFIER_SHAPE, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id
    )
    torch.manual_seed(sum(name.encode()))
    model = transformers.AutoModelForSequenceClassification.from_config(
        config, dtype=torch.float32
    ).eval()
    randomize(model, torch.bfloat16)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in CONVERSATIONS]
    batch = tokenizer(
        texts, padding=True, padding_side="right", return_tensors="pt", add_special_tokens=False
    )
    with torch.no_grad():
        scores = model(**batch).logits[:, 0].tolist()
    model.to(torch.bfloat16).save_pretrained(HERE / name)
    tokenizer.save_pretrained(HERE / name)
    rows = zip(CONVERSATIONS, scores, strict=True)
    write(
        f"{name}/scores.json",
        [{"messages": chat, "score": round(score, 6)} for chat, score in rows],
    )


def byte_tokenizer(padding: str) -> transformers.PreTrainedTokenizerFast:
    """One token a byte, and those of the template."""
    letters = {letter: byte for byte, letter in byte_letters().items()}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(CLASSIFIER_TOKENS)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        pad_token=padding,
        chat_template=CLASSIFIER_TEMPLATE,
    )


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


def words(text: str, kind: str) -> list[str]:
    """A text split as each pre-tokenizer does."""
    if kind == "smollm":
        pieces = regex.findall(r"\p{N}|[^\p{N}]+", text)
        return [word for piece in pieces for word in regex.findall(GPT2, piece)]
    return regex.findall({"gpt-2": GPT2, "llama-bpe": LLAMA3, "qwen2": QWEN2}[kind], text)


def byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte."""
    plain = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


class PlainBPE:
    """Byte-level BPE in the plainest Python, to check a fast one against."""

    def __init__(self, reader: gguf.GGUFReader):
        self.tokens = reader.fields["tokenizer.ggml.tokens"].contents()
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        merges = reader.fields["tokenizer.ggml.merges"].contents()
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        kinds = reader.fields["tokenizer.ggml.token_type"].contents()
        self.special = [token for token, kind in zip(self.tokens, kinds, strict=True) if kind == 3]
        self.letters = byte_letters()

    def merge(self, word: str) -> list[str]:
        parts = list(word)
        while len(parts) > 1:
            rank, at = min(
                (self.ranks.get(pair, 1 << 30), i)
                for i, pair in enumerate(itertools.pairwise(parts))
            )
            if rank == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts

    def encode(self, text: str, kind: str = "smollm") -> list[int]:
        ids = []
        for piece in regex.split("(" + "|".join(map(regex.escape, self.special)) + ")", text):
            if piece in self.special:
                ids.append(self.ids[piece])
                continue
            piece = unicodedata.normalize("NFC", piece) if kind == "qwen2" else piece
            for word in words(piece, kind):
                spelled = "".join(self.letters[byte] for byte in word.encode())
                whole = kind == "llama-bpe" and spelled in self.ids
                # A byte without a token of its own is left out, as the tokenizers library does.
                parts = [spelled] if whole else self.merge(spelled)
                ids += [self.ids[part] for part in parts if part in self.ids]
        return ids


def tokenization(bpe: PlainBPE) -> dict:
    """Token ids of every text under every pre-tokenizer."""
    kinds = ("smollm", "gpt-2", "llama-bpe", "qwen2")
    return {
        "texts": TEXTS,
        "ids": {kind: [bpe.encode(text, kind) for text in TEXTS] for kind in kinds},
    }


LLAMA_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {%- set system = messages[0]['content']|trim %}\n"
    "    {%- set messages = messages[1:] %}\n"
    "{%- else %}\n"
    "    {%- set system = '' %}\n"
    "{%- endif %}\n"
    "{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' + system"
    " + '<|eot_id|>' }}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role not in ['user', 'assistant', 'tool'] %}\n"
    "        {{- raise_exception('no such role: ' + message.role) }}\n"
    "    {%- endif %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}\n"
    "    {{- message['content'] | trim + '<|eot_id|>' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n"
    "{%- endif %}\n"
)
CONTROL_TEMPLATE = (
    "{% set seen = namespace(count=0, last=none) %}\n"
    "  {% if tools %}TOOLS{% endif %}\n"
    "{% for message in messages %}\n"
    "    {% if message.role == 'stop' %}\n"
    "        {% break %}\n"
    "    {% endif %}\n"
    "    {% if not message.content %}{% continue %}{% endif %}\n"
    "    {% set seen.count = seen.count + 1 %}\n"
    "[{{ message.role }}] {{ message | tojson }} {{ message.content | tojson(indent=2) }}\n"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}\n"
    "{% endfor %}\n"
    "{{ seen.count }} {{ unk_token }} {{ pad_token is defined }}\n"
)
TOOL_TEMPLATE = (
    "{%- if tools is not none %}<tools>\n"
    "{%- for tool in tools %}{{ tool | tojson(indent=2) }}{{ tool.function.name }}\n{% endfor %}\n"
    "{%- endif %}\n"
    "{%- if documents %}{% for d in documents %}[{{ loop.index }}] {{ d.title }}: {{ d.text }}\n"
    "{% endfor %}{% endif %}\n"
    "{{- messages[0].content }} {{ enable_thinking is defined and enable_thinking }}\n"
)
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find <b>pages</b> & 'more' in 日本語.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["query"],
        },
    },
}
ARGUMENTS = [
    {"tools": [SEARCH], "enable_thinking": True},
    {"tools": []},
    {"tools": None, "documents": [{"title": "One", "text": "<1>"}, {"title": "Two"}]},
    {"tools": [SEARCH, SEARCH], "documents": []},
]
CHATS = [
    [{"role": "user", "content": "  Hi <b>there</b> & 'you'  "}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": '日本 "quotes" \\n {{ not code }}'},
        {"role": "assistant", "content": "Fine 😀"},
        {"role": "user", "content": "More\n\n"},
    ],
    [
        {"role": "user", "content": ""},
        {"role": "stop", "content": "x"},
        {"role": "user", "content": "never"},
    ],
]


def templates(smollm: str) -> list[dict]:
    """Chats rendered by transformers, or null where the template refuses them."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    cases = []
    for template in (smollm, LLAMA_TEMPLATE, CONTROL_TEMPLATE):
        renderer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend, chat_template=template, **special
        )
        for chat in CHATS:
            for prompted in (False, True):
                try:
                    text = renderer.apply_chat_template(
                        chat, tokenize=False, add_generation_prompt=prompted
                    )
                except Exception as error:
                    print("refused:", error)
                    text = None
                case = {
                    "template": template,
                    "special": special,
                    "messages": chat,
                    "prompted": prompted,
                }
                cases.append(case | {"text": text})
    renderer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=TOOL_TEMPLATE, **special
    )
    for arguments in ARGUMENTS:
        text = renderer.apply_chat_template(CHATS[0], tokenize=False, **arguments)
        case = {"template": TOOL_TEMPLATE, "special": special, "messages": CHATS[0]}
        cases.append(case | {"prompted": False, "arguments": arguments, "text": text})
    return cases


def folder_facts() -> dict[str, dict]:
    """What transformers makes of each folder whose sources disagree."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for number, (name, fact) in enumerate(folders.FACTS.items()):
            if not fact.refused:
                folder = folders.write_folder(Path(place, str(number)), fact)
                found[name] = read_by_transformers(folder)
    return found


def read_by_transformers(folder: Path) -> dict:
    """The last position's logits, ids and decoded texts, special tokens, rendered chats."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([folders.TOKENS])).logits[0, -1]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in folders.TEXTS]
    found = {
        "logits": [round(logit, 5) for logit in logits.tolist()],
        "ids": ids,
        "texts": [tokenizer.decode(one, skip_special_tokens=True) for one in ids],
        "special": tokenizer.special_tokens_map,
    }
    if tokenizer.chat_template:
        found["rendered"] = [
            tokenizer.apply_chat_template(folders.CHAT, tokenize=False, tools=tools)
            for tools in (None, folders.TOOLS)
        ]
    return found


def greedy(file: Path, bpe: PlainBPE, template: str) -> list[dict]:
    """Greedy continuations of twenty prompts by the real weights, which transformers reads
    itself.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    samples = []
    for noun in NOUNS:
        chat = [{"role": "user", "content": f"Write one sentence about the {noun}."}]
        rendered = transformers.utils.chat_template_utils.render_jinja_template(
            [chat], chat_template=template, add_generation_prompt=True
        )[0][0]
        prompt = bpe.encode(rendered)
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=2,
            pad_token_id=2,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack([step[0].topk(2).values for step in out.logits])
        sample = {"chat": chat, "prompt": prompt, "text": out.sequences[0, len(prompt) :].tolist()}
        samples.append(
            sample | {"gaps": [round(gap, 5) for gap in (best[:, 0] - best[:, 1]).tolist()]}
        )
    return samples


def write(name: str, content) -> None:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (HERE / name).write_text(text + "\n", encoding="utf-8")


def main(file: Path) -> None:
    for name in CASES:
        tiny_model(name)
    for name in CLASSIFIERS:
        tiny_reward_model(name)
    reader = gguf.GGUFReader(file)
    template = reader.fields["tokenizer.chat_template"].contents()
    bpe = PlainBPE(reader)
    write("tokenization.json", tokenization(bpe))
    write("templates.json", templates(template))
    write("folders.json", folder_facts())
    write("greedy.json", greedy(file, bpe, template))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
