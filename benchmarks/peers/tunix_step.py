"""tunix's GRPO or PPO as a worker of step.py: float32. Usage: tunix_step.py SETTINGS.json"""

import dataclasses
import json
import sys
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from llama_of_tunix import read_config
from protocol import Turns
from transformers import AutoTokenizer
from tunix.models.llama3 import params
from tunix.models.llama3.model import Llama3
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

options = json.loads(Path(sys.argv[1]).read_text())
turns = Turns(("google-tunix", "jax", "jaxlib", "flax"))
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 1), ("fsdp", "tp"))
folder = options["model"]
ppo = options["algorithm"] == "ppo"


# Its PPO passes the segments of packed rows to models, which its Llama does not support.
call = Llama3.__call__
Llama3.__call__ = lambda self, *arguments, segment_ids=None, **options: call(
    self, *arguments, **options
)


def load() -> Llama3:
    config = read_config(Path(folder))
    return params.create_model_from_safe_tensors(folder, config, mesh, dtype=jnp.float32)


def critic() -> Llama3:
    """A model with a head of one output; tunix makes none of a model with a tied head."""
    model = load()
    width = model.config.embed_dim
    model.config = dataclasses.replace(model.config, weight_tying=False)
    model.lm_head = nnx.Linear(width, 1, use_bias=False, rngs=nnx.Rngs(0))
    return model


def prompts():
    """Yield each batch on request, once the update before it has ended."""
    rows = [json.loads(line) for line in Path(options["prompts"]).read_text().splitlines()]
    texts = iter([row["rendered"] for row in rows] * 1000)
    while batch := list(islice(texts, options["prompts_per_step"])):
        trainers = [cluster.actor_trainer, *([cluster.critic_trainer] if ppo else [])]
        jax.block_until_ready([nnx.state(trainer.model) for trainer in trainers])
        turns.begin()
        # its PPO does not support several samples of a prompt
        yield {"prompts": np.repeat(batch, options["samples"] if ppo else 1)}


def vowels(prompts, completions, **_):
    turns.note(tokens=sum(len(tokenizer.encode(text)) for text in completions))
    return [float(sum(c in "aeiou" for c in text)) for text in completions]


tokenizer = AutoTokenizer.from_pretrained(folder)
cluster = RLCluster(
    actor=load(),
    critic=critic() if ppo else None,
    reference=load() if options["kl"] else None,
    tokenizer=tokenizer,
    cluster_config=ClusterConfig(
        role_to_mesh=dict.fromkeys(Role, mesh),
        training_config=RLTrainingConfig(
            actor_optimizer=optax.adamw(options["learning_rate"]),
            critic_optimizer=optax.adamw(options["learning_rate"]) if ppo else None,
            eval_every_n_steps=10_000,
            max_steps=1000,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=options["new_tokens"],
            max_prompt_length=options["prompt_tokens"],
            kv_cache_size=options["prompt_tokens"] + options["new_tokens"],
            temperature=1.0,
            eos_tokens=[options["stop"]],
        ),
    ),
)
if ppo:
    learner = PPOLearner(cluster, PPOConfig(beta=options["kl"]), reward_fns=vowels)
else:
    settings = GRPOConfig(num_generations=options["samples"], beta=options["kl"])
    learner = GRPOLearner(cluster, settings, reward_fns=vowels)
learner.train(prompts())
