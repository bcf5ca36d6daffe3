"""TRL's GRPOTrainer or DPOTrainer as a worker of step.py: float32, CPU. Usage: trl_step.py
SETTINGS.json
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from protocol import Turns
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

options = json.loads(Path(sys.argv[1]).read_text())
turns = Turns(("trl", "transformers", "torch"))
dpo = options["algorithm"] == "dpo"


class Timed(TrainerCallback):
    """Take each step on request."""

    def on_step_begin(self, args, state, control, **_):
        turns.begin()
        if dpo:
            turns.note(tokens=2 * options["prompts_per_step"] * options["new_tokens"])


def vowels(completions, completion_ids, **_):
    turns.note(tokens=sum(map(len, completion_ids)))
    return [float(sum(c in "aeiou" for c in text)) for text in completions]


common = dict(
    output_dir=str(Path(sys.argv[1]).parent / "trl"),
    max_steps=1000,
    use_cpu=True,
    bf16=False,
    save_strategy="no",
    logging_strategy="no",
    report_to=[],
    learning_rate=options["learning_rate"],
    lr_scheduler_type="constant",
    gradient_checkpointing=options["checkpointed"],
)
if dpo:
    names = {"prompt": "rendered", "chosen": "chosen", "rejected": "rejected"}
    rewards = {}
    rows = options["prompts_per_step"]
    config = DPOConfig(**common, per_device_train_batch_size=rows, max_length=None)
else:
    names = {"prompt": "rendered"}
    rewards = {"reward_funcs": vowels}
    samples = options["prompts_per_step"] * options["samples"]
    rows = samples if options["whole"] else min(8, samples)  # 8 is its default
    config = GRPOConfig(
        **common,
        beta=options["kl"],
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=samples // rows,
        num_generations=options["samples"],
        max_completion_length=options["new_tokens"],
    )
given = [json.loads(line) for line in Path(options["prompts"]).read_text().splitlines()]
trainer = (DPOTrainer if dpo else GRPOTrainer)(
    model=AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32),
    args=config,
    train_dataset=Dataset.from_list(
        [{own: row[name] for own, name in names.items()} for row in given]
    ),
    processing_class=AutoTokenizer.from_pretrained(options["model"]),
    callbacks=[Timed()],
    **rewards,
)
trainer.train()
