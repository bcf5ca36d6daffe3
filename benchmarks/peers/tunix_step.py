"""tunix's GRPO learner as a worker of step.py: float32, CPU. Usage: tunix_step.py SETTINGS.json"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer
from tunix.models.llama3 import params
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix_model import read_config
from turns import Turns

jax.config.update("jax_platforms", "cpu")
asked = json.loads(Path(sys.argv[1]).read_text())
turns = Turns(("google-tunix", "jax", "jaxlib", "flax"))


class Words:
    """The folder's tokenizer as tunix wants it; no id ends a sample."""

    def __init__(self):
        self.words = Tokenizer.from_file(str(Path(asked["model"]) / "tokenizer.json"))

    def encode(self, text, **_):
        return self.words.encode(text).ids

    def decode(self, ids, **_):
        return self.words.decode([int(one) for one in ids])

    def bos_id(self):
        return None

    def eos_id(self):
        return asked["stop"]

    def pad_id(self):
        return asked["stop"] - 1


def vowels(prompts, completions, **_):
    return [float(sum(c in "aeiou" for c in text)) for text in completions]


def batches():
    """Batches of prompts, each of which is asked for."""
    rows = [json.loads(line) for line in Path(asked["prompts"]).read_text().splitlines()]
    size = asked["prompts_per_step"]
    for start in range(0, 1000 * size, size):
        turns.begin()
        chosen = [rows[(start + i) % len(rows)]["rendered"] for i in range(size)]
        yield {"prompts": np.array(chosen)}


folder = asked["model"]
config = read_config(Path(folder))
mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
load = lambda: params.create_model_from_safe_tensors(folder, config, mesh, dtype=jnp.float32)
roles = rl_cluster.Role
cluster = rl_cluster.RLCluster(
    actor=load(),
    reference=load() if asked["kl"] else None,
    tokenizer=Words(),
    cluster_config=rl_cluster.ClusterConfig(
        role_to_mesh={roles.ACTOR: mesh, roles.REFERENCE: mesh, roles.ROLLOUT: mesh},
        rollout_engine="vanilla",
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(asked["learning_rate"]),
            eval_every_n_steps=10_000,
            max_steps=1000,
            mini_batch_size=asked["prompts_per_step"],
            train_micro_batch_size=asked["prompts_per_step"],
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=asked["new_tokens"],
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            max_prompt_length=asked["prompt_tokens"],
            kv_cache_size=asked["prompt_tokens"] + asked["new_tokens"],
        ),
    ),
)
learner = GRPOLearner(
    rl_cluster=cluster,
    algo_config=GRPOConfig(num_generations=asked["samples"], beta=asked["kl"]),
    reward_fns=[vowels],
)
with mesh:
    learner.train(batches())
