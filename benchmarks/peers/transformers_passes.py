"""transformers' forward and backward passes as a worker of gpu/passes.py: a random model, the loss
of next tokens, bfloat16 by autocast on a GPU. Usage: transformers_passes.py SETTINGS.json
"""

import json
import sys
from pathlib import Path

import torch
from protocol import Turns
from transformers import AutoConfig, AutoModelForCausalLM

options = json.loads(Path(sys.argv[1]).read_text())
turns = Turns(("torch", "transformers"))
on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
torch.manual_seed(0)
config = AutoConfig.from_pretrained(options["model"])
model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().to(device)
size = (options["rows"], options["tokens"])
tokens = torch.randint(config.vocab_size, size, device=device)
while True:
    turns.begin()
    model.zero_grad(set_to_none=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    turns.note(loss=loss.item())
    if on_gpu:
        torch.cuda.synchronize()
        turns.note(peak_device_bytes=torch.cuda.max_memory_allocated())
