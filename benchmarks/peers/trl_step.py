"""TRL's GRPOTrainer as a worker of step.py: float32, CPU. Usage: trl_step.py SETTINGS.json"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from turns import Turns

options = json.loads(Path(sys.argv[1]).read_text())
turns = Turns(("trl", "transformers", "torch"))


class Timed(TrainerCallback):
    """Take each step on request."""

    def on_step_begin(self, args, state, control, **_):
        turns.begin()


def vowels(completions, completion_ids, **_):
    turns.note(tokens=sum(map(len, completion_ids)))
    return [float(sum(c in "aeiou" for c in text)) for text in completions]


prompts = [json.loads(line) for line in Path(options["prompts"]).read_text().splitlines()]
samples = options["prompts_per_step"] * options["samples"]
rows = samples if options["whole"] else min(8, samples)  # 8 is its default
config = GRPOConfig(
    output_dir=str(Path(sys.argv[1]).parent / "trl"),
    max_steps=1000,
    use_cpu=True,
    bf16=False,
    save_strategy="no",
    logging_strategy="no",
    report_to=[],
    learning_rate=options["learning_rate"],
    lr_scheduler_type="constant",
    beta=options["kl"],
    per_device_train_batch_size=rows,
    gradient_accumulation_steps=samples // rows,
    gradient_checkpointing=options["checkpointed"],
    num_generations=options["samples"],
    max_completion_length=options["new_tokens"],
)
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32),
    reward_funcs=vowels,
    args=config,
    train_dataset=Dataset.from_list([{"prompt": row["rendered"]} for row in prompts]),
    processing_class=AutoTokenizer.from_pretrained(options["model"]),
    callbacks=[Timed()],
)
trainer.train()
