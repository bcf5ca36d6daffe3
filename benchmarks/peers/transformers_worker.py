"""transformers' generate as a worker of compare.py: float32, CPU. Usage: transformers_worker.py
FOLDER
"""

import sys

import torch
from protocol import cores, serve
from transformers import AutoModelForCausalLM, GenerationConfig

torch.set_num_threads(cores())
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
# A folder's own generation config may name stop tokens and truncation; top_k is 50 by default.
model.generation_config = GenerationConfig(
    do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0
)


def sample(prompts: list[list[int]], new_tokens: int, seed: int) -> list[list[int]]:
    torch.manual_seed(seed)
    ids = torch.tensor(prompts)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens)
    return out[:, ids.shape[1] :].tolist()


serve(("torch", "transformers"), torch.get_num_threads(), sample)
