"""Write alignment_steps.safetensors: what steps of SGD make of tiny models, by a loop in torch.

    python tests/golden/make_alignment_steps.py        # with torch 2.13.0, transformers 5.24.0

Each sample goes through transformers' model alone, without padding, in float64. The file holds the
samples, and of each algorithm the losses of its steps and the change of each weight.
"""

from __future__ import annotations

import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

HERE = pathlib.Path(__file__).parent
STEPS = 4
PAIRS = 3  # of a step
RATES = {"sft": 0.3, "dpo": 0.1, "reward_model": 0.1}
BETA = 0.3
LONGEST = 20
FILE = "alignment_steps.safetensors"


def main() -> None:
    """Draw the samples, and train on them."""
    torch.manual_seed(0)
    found = {}
    samples = [[pair() for _ in range(PAIRS)] for _ in range(STEPS)]
    flat = [text for step in samples for pair_of in step for text in pair_of]
    found["tokens"] = torch.stack([F.pad(text, (0, LONGEST - len(text))) for text, _ in flat])
    found["ends"] = torch.tensor([[begin, len(text)] for text, begin in flat])
    for name, rate in RATES.items():
        kind = AutoModelForCausalLM
        folder = "llama_tied"
        if name == "reward_model":
            kind = AutoModelForSequenceClassification
            folder = "llama_reward"
        model = kind.from_pretrained(HERE / folder, dtype=torch.float64)
        frozen = kind.from_pretrained(HERE / folder, dtype=torch.float64)
        losses = []
        for step in samples:
            loss = LOSSES[name](model, frozen, step)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= rate * weight.grad
            losses.append(loss.detach())
        found[f"{name}/losses"] = torch.stack(losses)
        before = dict(frozen.named_parameters())
        for key, weight in model.named_parameters():
            found[f"{name}/{key}"] = (weight - before[key]).detach().float()
    save_file({key: value.contiguous() for key, value in found.items()}, HERE / FILE)


def pair() -> list[tuple[torch.Tensor, int]]:
    """Draw a chosen and a rejected text with one prompt: tokens, and where the answer begins."""
    begin = int(torch.randint(3, 8, ()))
    prompt = torch.randint(3, 250, (begin,))
    answers = (torch.randint(3, 250, (int(torch.randint(2, 12, ())),)) for _ in range(2))
    return [(torch.cat([prompt, answer]), begin) for answer in answers]


def logprobs(model, text: torch.Tensor, begin: int) -> torch.Tensor:
    """Return the log-probability of each token of the answer."""
    found = F.log_softmax(model(text[None]).logits[0], dim=-1)
    return found[begin - 1 : -1].gather(1, text[begin:, None])[:, 0]


def sft(model, frozen, step) -> torch.Tensor:
    """Compute the mean cost of a token of the chosen answers."""
    return -torch.cat([logprobs(model, *chosen) for chosen, _ in step]).mean()


def dpo(model, frozen, step) -> torch.Tensor:
    """Compute the mean loss of the pairs (Rafailov et al. 2023)."""
    losses = []
    for texts in step:
        gains = []
        for text in texts:
            with torch.no_grad():
                known = logprobs(frozen, *text).sum()
            gains.append(logprobs(model, *text).sum() - known)
        losses.append(-F.logsigmoid(BETA * (gains[0] - gains[1])))
    return torch.stack(losses).mean()


def reward_model(model, frozen, step) -> torch.Tensor:
    """Compute the mean loss of the pairs by the scores at their texts' last tokens."""
    del frozen
    scores = [[model(text[None]).logits[0, 0] for text, _ in texts] for texts in step]
    return torch.stack([-F.logsigmoid(chosen - rejected) for chosen, rejected in scores]).mean()


LOSSES = {"sft": sft, "dpo": dpo, "reward_model": reward_model}

if __name__ == "__main__":
    main()
