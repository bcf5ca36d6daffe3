"""TRL's DPOTrainer as a worker of step.py: float32, CPU. Usage: trl_dpo_step.py SETTINGS.json"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer
from turns import Turns

asked = json.loads(Path(sys.argv[1]).read_text())
turns = Turns(("trl", "transformers", "torch"))


class Timed(TrainerCallback):
    """Each step is asked for."""

    def on_step_begin(self, args, state, control, **_):
        turns.begin()
        turns.note(tokens=2 * asked["prompts_per_step"] * asked["new_tokens"])


pairs = [json.loads(line) for line in Path(asked["prompts"]).read_text().splitlines()]
names = {"prompt": "rendered", "chosen": "chosen", "rejected": "rejected"}
config = DPOConfig(
    output_dir=str(Path(sys.argv[1]).parent / "trl"),
    max_steps=1000,
    use_cpu=True,
    bf16=False,
    save_strategy="no",
    logging_strategy="no",
    report_to=[],
    learning_rate=asked["learning_rate"],
    lr_scheduler_type="constant",
    per_device_train_batch_size=asked["prompts_per_step"],
    gradient_checkpointing=asked["checkpointed"],
    max_length=None,
)
trainer = DPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
    args=config,
    train_dataset=Dataset.from_list(
        [{own: row[name] for own, name in names.items()} for row in pairs]
    ),
    processing_class=AutoTokenizer.from_pretrained(asked["model"]),
    callbacks=[Timed()],
)
trainer.train()
