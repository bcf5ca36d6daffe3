"""All keys of a run, and their defaults; `checks.py` says what makes them valid."""

from __future__ import annotations

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from rlhf_jax.types import ModelConfig

# An ml_collections.ConfigDict; type checkers cannot know its keys.
Config = Any


class ModelConfigs(NamedTuple):
    """The shapes of a run's models."""

    policy: ModelConfig
    drafter: ModelConfig | None = None
    critic: ModelConfig | None = None
    rewards: tuple[ModelConfig, ...] = ()


def default() -> Config:
    """Every key of a run with its default, locked: a config file changes values and adds no
    keys.
    """
    config = ConfigDict(
        {
            # all of a run lives here: metrics, samples, checkpoints, the trained policy
            "workdir": "runs/default",
            # what the policy learns to earn; or 'distill': a student learns to draft for it
            "objective": "reward",
            # roll-out and update, that many times
            "steps": 100,
            # of prompts, sampling and training; the same seed gives the same run
            "seed": 0,
            # bit for bit: no decision by the clock (rewards have no time limit), ordered sums
            "deterministic": False,
            # say what the run would need, and stop
            "dry_run": False,
            # say which phase stands still after so long; 0 for never
            "watchdog_seconds": 300,
            "model": _model(),
            "drafter": _drafter(),
            "critic": _critic(),
            "data": _data(),
            "reward": _reward(),
            "generation": _generation(),
            "evaluation": _evaluation(),
            "advantage": _advantage(),
            "kl": _kl(),
            "training": _training(),
            "checkpoint": _checkpoint(),
            "mesh": _mesh(),
            "kernels": _kernels(),
            # of programs, between runs; '' for none
            "compilation_cache": "~/.cache/rlhf_jax/compiled",
        }
    )
    return config.lock()


def _model() -> dict:
    return {
        # Hugging Face folder, .gguf file, or hub name org/name
        "path": "",
        # of matrix products: bfloat16 on accelerators and float32 on CPU, or named
        "compute_dtype": "auto",
    }


def _drafter() -> dict:
    """The small model of the 'model-*' strategies; text does not depend on it under acceptance
    'replayable'.
    """
    return {
        # of a draft model, or of a student made before, given as model.path is
        "path": "",
        # 0: what the path holds; else a student of so many of the policy's layers, or of the path's
        "layers": 0,
        # of a student's AdamW; 0 leaves it as it is, above 0 keeps it current
        "learning_rate": 0.0,
        # of each step, from which a student that is kept current learns
        "samples": 8,
    }


def _critic() -> dict:
    """The model of values that the advantage estimator 'gae' trains beside the policy."""
    return {
        # a reward model over the policy's vocabulary; '' for the policy's own trunk
        "path": "",
        # of AdamW
        "learning_rate": 1e-5,
        # optimizer steps in which the rate rises linearly
        "warmup_steps": 0,
        # a value moves at most so far from what it was before the update
        "clip": 0.2,
    }


def _data() -> dict:
    return {
        # .jsonl or .parquet file of prompts
        "train": "",
        # held-out prompts, '' for none
        "eval": "",
        # the field that holds a string or chat messages
        "prompt_key": "prompt",
        # system prompt before every prompt, '' for none
        "system": "",
        # longer prompts are dropped and counted
        "max_prompt_tokens": 256,
    }


def _reward() -> dict:
    """A sample's reward is the weighted sum of functions and models."""
    return {
        # each FILE.py:function or package.module:function of (prompt, response, row) -> float
        "functions": (),
        # each a Hugging Face sequence-classification folder, read at a conversation's last token
        "models": (),
        # of the functions, then of the models; () for 1 each
        "weights": (),
        # processes that each function runs in
        "workers": 2,
        # the longest a call may take
        "seconds": 10.0,
        # the reward where a call failed or took too long; such samples are counted
        "failed": 0.0,
        # taken from the reward of a response that was cut off
        "missing_end": 0.0,
        # rewards are clipped to -clip .. clip; 0 for not
        "clip": 0.0,
        # rewards of a step are divided by their standard deviation
        "whiten": False,
        # name -> function as above: measured in evaluation, never trained on
        "metrics": ConfigDict(),
    }


def _generation() -> dict:
    return {
        # different prompts of one roll-out
        "prompts_per_step": 8,
        # the group that advantages may be relative to
        "samples_per_prompt": 4,
        # more roll-outs, at most, to replace prompts whose samples all earned the same (DAPO)
        "resample": 0,
        # the longest response
        "max_new_tokens": 128,
        # of the sampled law, and of the one that is trained
        "temperature": 1.0,
        # sample among the k likeliest, at most 64; 0 for all
        "top_k": 0,
        # for evaluation only: refused here unless 1
        "top_p": 1.0,
        # chosen every round; or plain, lookup-chain-4, replay-chain-8-packed-3 ...
        "strategy": "adaptive",
        # drafts equal to the target's own draw, or 'rejection'
        "acceptance": "replayable",
        # live rows of a slice at most
        "max_rows": 32,
        # in the tail the batch halves down to this; each halving is a program to compile
        "min_rows": 8,
        # place samples on slices by their expected lengths, and move them while they run
        "reallocate": True,
        # slices with nothing left to decode score what is finished, with weights of their own
        "fuse_inference": False,
        # of earlier roll-outs of the same prompt, for lookup
        "history_tokens": 256,
        # samples of a prompt with an earlier noise: they replay its text, but are no fresh draws
        "repeated_noise": 0,
        # (the weights were fitted to that noise) and explore less
    }


def _evaluation() -> dict:
    return {
        # steps between evaluations on data.eval, and one at each end; 0 for none
        "every": 0,
        # their mean is reported
        "samples_per_prompt": 1,
        # 0 is the likeliest token
        "temperature": 1.0,
        # sample among the likeliest tokens of this joint probability
        "top_p": 1.0,
        # sample among the k likeliest; 0 for all
        "top_k": 0,
    }


def _advantage() -> dict:
    return {
        # dr_grpo (wants aggregate 'constant'), rloo, reinforce++, reinforce++-baseline, gae (PPO)
        "estimator": "grpo",
        # of later rewards, for gae and reinforce++
        "discount": 1.0,
        # how far gae looks past the critic
        "gae_lambda": 0.95,
    }


def _kl() -> dict:
    """The price of leaving the reference."""
    return {
        # nats to reward; 0 keeps no reference, and KL is measured to the policy before the update
        "coefficient": 0.04,
        # or 'reward': taken from the reward token by token
        "place": "loss",
        # of Schulman 2020: k1 (in the reward only), k2 or k3
        "estimator": "k3",
        # nats a response: the coefficient adapts to stay there; 0 keeps it fixed
        "target": 0.0,
        # samples in which it adapts
        "horizon": 10_000,
    }


def _training() -> dict:
    return {
        # times that each roll-out is trained on
        "epochs": 1,
        # optimizer steps an epoch
        "minibatches": 1,
        # rows over all devices whose activations exist at one time
        "microbatch_rows": 8,
        # of AdamW
        "learning_rate": 1e-6,
        # optimizer steps in which the rate rises linearly
        "warmup_steps": 0,
        # of AdamW; norms and biases are spared
        "weight_decay": 0.0,
        # the gradient is clipped to this global norm
        "max_grad_norm": 1.0,
        # the ratio is clipped at 1 - clip_low
        "clip_low": 0.2,
        # and at 1 + clip_high
        "clip_high": 0.2,
        # of a minibatch's losses: or sequence_mean, or constant (Dr. GRPO)
        "aggregate": "token_mean",
        # of the entropy, which is added to the objective
        "entropy_coefficient": 0.0,
        # the rest of an update is left out once KL(old || new) exceeds it; 0 for never
        "target_kl": 0.0,
        # responses that were cut off are not trained on
        "drop_overlong": False,
        # keep only each layer's input for the backward pass
        "remat": True,
        # token slots of a micro-batch are a multiple of this
        "length_bucket": 64,
    }


def _checkpoint() -> dict:
    """The same command again goes on from the last checkpoint in the workdir."""
    return {
        # steps between checkpoints, and one at the end; 0 for none
        "every": 50,
        # the latest so many stay
        "keep": 2,
        # go on although other keys differ from the checkpoint's; model and data may not
        "allow_changes": False,
    }


def _mesh() -> dict:
    return {
        # parts that generate each on its own, and between which running samples may move
        "slices": 1,
        # copies of the weights; -1 for the devices that are left
        "data": 1,
        # devices of a slice over which the weights are split in training, as they are over slices
        "fsdp": -1,
        # devices over which heads, feed-forward and vocabulary are split
        "tensor": 1,
        # 10^9 bytes; 0 asks the device
        "device_memory_gb": 0.0,
    }


def _kernels() -> dict:
    """'auto' takes what was measured faster: the chip's own kernel ('pallas') or plain JAX
    ('reference').

    'interpret' runs the TPU's kernel anywhere, slowly, to debug it.
    """
    return {
        # of the drafts over the cache
        "tree_attention": "auto",
        # the draw at each draft, without all logits in memory; not with a top_k or 'rejection'
        "verify_head": "auto",
        # accepted drafts into the cache
        "commit": "auto",
        # of training and inference, without logits; not with a top_k or a split vocabulary
        "logprobs": "auto",
    }


def keys(config: Config) -> set[str]:
    """Dotted names of all values; `reward.metrics` is one value."""
    return set(flat(config))


def flat(config: Config, prefix: str = "") -> dict[str, Any]:
    """Values by dotted name; `reward.metrics` is one value, a dict."""
    values = {}
    for key, value in config.items():
        name = prefix + key
        if not isinstance(value, ConfigDict):
            values[name] = value
        else:
            values |= (
                {name: value.to_dict()} if name == "reward.metrics" else flat(value, f"{name}.")
            )
    return values
