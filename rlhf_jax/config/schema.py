"""List all keys of a run and their defaults; `setup/validation.py` validates them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterable, Iterator, Mapping

    class Config:
        """Declare the used part of ConfigDict to type checkers; a key has any value."""

        def __init__(self, values: Mapping[str, Any] = ..., /) -> None: ...
        def __getattr__(self, attribute: str) -> Any: ...
        def __setattr__(self, attribute: str, value: Any) -> None: ...
        def __getitem__(self, key: str) -> Any: ...
        def __setitem__(self, key: str, value: Any) -> None: ...
        def __delitem__(self, key: str) -> None: ...
        def __iter__(self) -> Iterator[str]: ...
        def __contains__(self, key: str) -> bool: ...
        def items(self) -> Iterable[tuple[str, Any]]: ...
        def update(self, *other: Any, **values: Any) -> None: ...
        def update_from_flattened_dict(self, values: Mapping[str, Any]) -> None: ...
        def to_dict(self) -> dict[str, Any]: ...
        def to_json_best_effort(self) -> str: ...
        def lock(self) -> None: ...
        def unlocked(self) -> contextlib.AbstractContextManager[None]: ...

else:
    from ml_collections import ConfigDict as Config

# A key's comment describes its value, with the unit of a quantity.
DEFAULTS: dict[str, Any] = {
    # folder of the run: metrics, samples, checkpoints and the trained policy; or a URL such as
    # gs://bucket/run
    "workdir": "runs/default",
    # number of steps: a rollout and an update of the policy each
    "steps": 100,
    # random seed of prompts, sampling and training; the same seed gives the same run
    "seed": 0,
    # bit-for-bit reproducible: no decision depends on the clock (so rewards have no time limit),
    # and sums have a fixed order
    "deterministic": False,
    # run the checks at the start of a run, print its memory, and stop; nothing is written
    "dry_run": False,
    # condition on a metric that stops the run early, such as 'eval/reward >= 0.95'; '' for none
    "stop_at": "",
    # range of steps to profile, such as '5:7', written to WORKDIR/profile; '' for none
    "profile": "",
    # trackers, in addition to metrics.jsonl and TensorBoard: wandb, mlflow, trackio, FILE.py:NAME;
    # they receive a step when its checkpoint is on disk
    "sinks": (),
    # seconds without progress after which the run warns and names the phase; 0 for never
    "watchdog_seconds": 300,
    # seconds of silence after which a process counts as lost and the others stop; a process may
    # stall for half of them
    "heartbeat_seconds": 30,
    # The algorithm of the run; its options are further keys of this section.
    "algorithm": {
        # grpo: rewards are compared within a group; ppo: with a critic; distill: trains a student
        # to draft for the policy; or FILE.py:NAME
        "name": "grpo"
    },
    "model": {
        # Hugging Face folder, .gguf file, or hub name org/name
        "path": "",
        # your own model families, each FILE.py:NAME
        "families": (),
        # dtype of matrix products; 'auto' is bfloat16 on accelerators and float32 on CPU
        "compute_dtype": "auto",
    },
    # The draft model of the 'model-*' strategies. With acceptance 'replayable' the text does not
    # depend on it.
    "drafter": {
        # a draft model or an earlier student, in the format of model.path
        "path": "",
        # 0 uses the model of the path unchanged; else the number of layers of a student, taken from
        # the path's model, or from the policy if the path is empty
        "layers": 0,
        # learning rate of the student's AdamW; 0 freezes the student, above 0 distills it during
        # the run
        "learning_rate": 0.0,
        # samples of each step for the distillation of the student
        "samples": 8,
    },
    # The value model of the algorithm 'ppo', and of each further role of an algorithm.
    "critic": {
        # reward model to start from, with the policy's vocabulary; '' for the policy's trunk
        "path": "",
        # learning rate of the critic's AdamW
        "learning_rate": 1e-5,
        # optimizer steps of linear warm-up
        "warmup_steps": 0,
        # updates of the critic alone before the policy's first (critic warm-up)
        "steps_alone": 0,
        # value clip: largest change of a value from its value before the update
        "clip": 0.2,
    },
    "data": {
        # training prompts: a .jsonl or .parquet file or its URL (gs://, s3://), a folder or hub
        # name org/name of a data set, or FILE.py:NAME, your own function that returns rows
        "train": "",
        # further training sources, named as data.train
        "mixture": (),
        # shares of the rows of data.train, then of data.mixture, as (2, 1), whatever the sizes of
        # the sources; () for as many as each has
        "shares": (),
        # held-out prompts, in the same format; '' for none
        "eval": "",
        # configuration of a data set; '' if it has only one
        "configuration": "",
        # split of the training data set
        "train_split": "train",
        # split of the held-out data set
        "eval_split": "test",
        # columns to rename, old name -> new name, such as {"answer": "solution"}
        "columns": {},
        # field of the prompt, a string or chat messages
        "prompt_key": "prompt",
        # handling of an invalid row: 'error' stops the run, 'skip' drops and counts it
        "on_bad_row": "error",
        # system prompt before every prompt, '' for none
        "system": "",
        # pass prompts that are strings to the policy unchanged, without the chat template
        "raw": False,
        # arguments of the chat template, name -> value, such as {"enable_thinking": False}
        "template_arguments": {},
        # date for chat templates, YYYY-MM-DD; '' for the day on which the run begins
        "date": "",
        # longest prompt, in tokens; longer prompts are dropped and counted
        "max_prompt_tokens": 256,
        # rows of a step, if the samples are given in the data
        "rows_per_step": 32,
        # longest given sample, in tokens with its end token; rows with longer ones are dropped and
        # counted
        "max_response_tokens": 256,
    },
    # A sample's reward is the weighted sum of functions and models.
    "reward": {
        # each FILE.py:function or package.module:function, with parameters as in
        # docs/how-to/reward.md; or SCHEME://... of a registered source of rewards
        "functions": (),
        # reward models: Hugging Face sequence-classification folders, read at the last token
        "models": (),
        # a reward function whose order of two responses to a prompt labels them: the head of the
        # one model of reward.models learns from each label once; '' for a fixed model
        "labels": "",
        # the responses to a prompt that are labelled: 'active', the pair of the least certain
        # difference, 'deployment', the best and one that may be better, or 'random'
        "label_choice": "active",
        # preference models: language models that compare the responses to a prompt by pairs and
        # name the better one; a reward is the mean probability of being better than another
        "preference_models": (),
        # weights of the functions, then of both kinds of models; () for 1 each
        "weights": (),
        # worker processes of each function
        "workers": 2,
        # concurrent calls of an async function
        "concurrency": 16,
        # time limit of a call in seconds, for each of its responses; and of the import, which has
        # at least 2 s
        "seconds": 10.0,
        # handling of a sample whose call failed or timed out: 'drop' excludes it from training,
        # 'value' gives it the reward `failed`; both are counted
        "on_failure": "drop",
        # reward of such a sample, if on_failure is 'value'
        "failed": 0.0,
        # share of a rollout's samples; if calls fail on more, the run stops
        "max_failed": 0.5,
        # penalty, subtracted from the reward of a response that was cut off
        "missing_end": 0.0,
        # rewards are clipped to -clip .. clip; 0 for no clipping
        "clip": 0.0,
        # divide the rewards of a step by their standard deviation
        "whiten": False,
        # evaluation metrics, name -> function as above; never trained on
        "metrics": {},
    },
    "generation": {
        # prompts of one rollout
        "prompts_per_step": 8,
        # samples of each prompt (the group size)
        "samples_per_prompt": 4,
        # most additional rollouts to replace prompts whose samples all have the same reward (DAPO's
        # dynamic sampling)
        "resample": 0,
        # samples of a prompt that the policy has mastered, in place of samples_per_prompt; 0 for
        # the same number of each prompt. It needs prompts that repeat
        "fewest_samples": 0,
        # temperature of a prompt that the policy has mastered, in place of temperature; 0 for the
        # same of each prompt
        "hottest": 0.0,
        # longest response, in tokens
        "max_new_tokens": 128,
        # texts that end a response, in addition to the model's stop tokens; they stay in the
        # response
        "stop_strings": (),
        # sampling temperature; the distribution that is sampled from is also the one that is
        # trained
        "temperature": 1.0,
        # sample among the k likeliest tokens, at most 64; 0 for all
        "top_k": 0,
        # must be 1: top-p is only supported in evaluation
        "top_p": 1.0,
        # drafting strategy: 'adaptive' chooses one in every round; or plain, lookup-chain-4,
        # replay-chain-8-packed-3 ...
        "strategy": "adaptive",
        # your own drafters, each FILE.py:NAME; strategies use the `name` of a drafter
        "drafters": (),
        # 'replayable' accepts drafts that equal the policy's own draw; or 'rejection'
        "acceptance": "replayable",
        # most live rows of a slice
        "max_rows": 32,
        # smallest batch, down to which it halves as samples end; each halving compiles a program
        "min_rows": 8,
        # place samples on slices by expected length, and move them while they run
        "reallocate": True,
        # slices with no samples left to decode score finished samples, with their own copy of the
        # weights
        "fuse_inference": False,
        # tokens of earlier rollouts that lookup drafts from: those of the same prompt first, then
        # the latest of other prompts; the run keeps 8 million tokens for all prompts and drops the
        # oldest
        "history_tokens": 256,
        # samples of a prompt that repeat an earlier noise: they can be replayed, but are not
        # independent draws (the weights were fitted to that noise) and explore less
        "repeated_noise": 0,
    },
    "evaluation": {
        # steps between evaluations on data.eval, with one at the start and the end; 0 for none
        "every": 0,
        # samples of each held-out prompt; metrics are means over them
        "samples_per_prompt": 1,
        # sampling temperature; 0 is greedy
        "temperature": 1.0,
        # sample among the likeliest tokens with this total probability
        "top_p": 1.0,
        # sample among the k likeliest tokens; 0 for all
        "top_k": 0,
    },
    # The KL penalty to the reference.
    "kl": {
        # penalty per nat, in reward; 0 loads no reference, and KL is measured to the policy before
        # the update
        "coefficient": 0.04,
        # folder of the reference, a model of the policy's tokenizer; '' for the policy as the run
        # begins
        "reference": "",
        # 'loss', or 'reward' (subtracted from the reward per token)
        "place": "loss",
        # KL estimator of Schulman 2020: k1 (in the reward only), k2 or k3
        "estimator": "k3",
        # target KL in nats per response, to which the coefficient adapts; 0 keeps the coefficient
        # fixed
        "target": 0.0,
        # time scale of this adaptation, in samples
        "horizon": 10_000,
    },
    "training": {
        # passes over each rollout
        "epochs": 1,
        # optimizer steps per epoch
        "minibatches": 1,
        # size of a micro-batch, in samples of the longest length, over all devices (equal on each,
        # rounded down, at least one); of shorter samples it holds more
        "microbatch_rows": 8,
        # the same size in tokens, rounded down to whole samples of the longest length; 0 uses
        # microbatch_rows
        "microbatch_tokens": 0,
        # learning rate of the policy's AdamW; 0 derives it from the size of the model, and the run
        # prints it
        "learning_rate": 0.0,
        # optimizer steps of linear warm-up
        "warmup_steps": 0,
        # schedule after the warm-up: 'constant', or to 0 over all steps by 'linear' or 'cosine'
        "schedule": "constant",
        # weight decay of the policy's AdamW; norms and biases are excluded
        "weight_decay": 0.0,
        # global norm to which the gradient is clipped
        "max_grad_norm": 1.0,
        # the ratio is clipped below at 1 - clip_low
        "clip_low": 0.2,
        # the ratio is clipped above at 1 + clip_high
        "clip_high": 0.2,
        # aggregation of a minibatch's token losses: token_mean, sequence_mean or constant; 'auto'
        # is the default of the loss (gspo: sequence_mean) or estimator (dr_grpo: constant), else
        # token_mean
        "aggregate": "auto",
        # entropy bonus: coefficient of the entropy, which is subtracted from the loss
        "entropy_coefficient": 0.0,
        # KL(old || new) in nats above which the rest of an update is skipped; 0 for never
        "target_kl": 0.0,
        # off-policy steps: 1 generates the samples of the next step during training, with the
        # weights before the update, if the plan gives generation separate devices; 0 is on-policy
        "lag": 0,
        # with a lag, upper limit of the importance weight p_now / p_sampled of a token
        "lag_clip": 2.0,
        # exclude responses that were cut off from training (DAPO's overlong filtering)
        "drop_overlong": False,
        # most minibatches in a row that are skipped for non-finite values before the run stops
        "max_skipped": 5,
        # train policy and critic as two concurrent pipelines in opposite directions (RLHFuse): each
        # of mesh.slices has some of their layers, and mesh.data is the number of copies; for GPU
        # nodes on a slow network. Once target_kl is exceeded, both stop updating
        "pipelined": False,
        # rematerialisation: keep only each layer's input for the backward pass: on, off, or auto
        # (on if memory does not suffice without it); a resumed run keeps its setting
        "remat": "auto",
        # reward models read texts padded to a multiple of this number of tokens: a larger value
        # means fewer programs, a smaller value less padding
        "length_bucket": 64,
    },
    # The same command resumes from the last checkpoint in the workdir.
    "checkpoint": {
        # steps between checkpoints, with one at the end; 0 for none
        "every": 50,
        # number of latest checkpoints to keep
        "keep": 2,
        # evaluation metric, such as 'eval/reward', whose best policy is kept in WORKDIR/best; ''
        # for none
        "best": "",
        # resume even if keys differ from the checkpoint's; model and data must be the same
        "allow_changes": False,
    },
    "mesh": {
        # parts of the mesh that generate independently; running samples can move between them
        "slices": 1,
        # data-parallel copies of the weights; -1 for the remaining devices
        "data": 1,
        # devices of a slice that shard the weights in training, in addition to slices; -1 for the
        # rest
        "fsdp": -1,
        # tensor parallelism: devices that split heads, feed-forward and vocabulary
        "tensor": 1,
        # usable memory of a device, in 10^9 bytes; 0 reads it from the device
        "device_memory_gb": 0.0,
        # offload reference and reward models to host memory except while they score
        "idle_on_host": False,
    },
    # devices of each model call of a step: '' uses `mesh` for all; 'colocated', 'interleaved' or
    # 'disaggregated'; or a file NAME.json, see docs/how-to/plan.md
    "plan": "",
    # 'auto' uses the faster one by measurement: the chip's kernel ('pallas') or plain JAX
    # ('reference'). 'interpret' runs the TPU kernel on any device, slowly, for debugging.
    "kernels": {
        # attention of the drafts over the cache
        "tree_attention": "auto",
        # the draw at each draft, without all logits in memory; not with top_k or 'rejection'
        "verify_head": "auto",
        # the write of accepted drafts into the cache
        "commit": "auto",
        # log-probabilities of training and inference, without logits; not with top_k or a split
        # vocabulary
        "logprobs": "auto",
    },
    # compilation cache: folder that keeps compiled programs between runs; '' for none
    "compilation_cache": "~/.cache/rlhf_jax/compiled",
}


# Keys whose values are dicts with names of the user; each dict is one value.
DICTS = ("reward.metrics", "data.columns", "data.template_arguments")


# Keys of earlier versions with their defaults then; `earlier.py` reads them.
EARLIER = {
    "objective": "reward",
    "advantage.estimator": "grpo",
    "advantage.discount": 1.0,
    "advantage.gae_lambda": 0.95,
    "advantage.deviation": "sample",
    "training.loss": "ppo",
}


def flat(config: Config, prefix: str = "") -> dict[str, Any]:
    """Return the values by dotted name, without EARLIER's; each of DICTS is one value."""
    values = {}
    for key, value in config.items():
        name = prefix + key
        if name in EARLIER:
            continue
        if not isinstance(value, Config):
            values[name] = value
        elif name in DICTS:
            values[name] = value.to_dict()
        else:
            values |= flat(value, f"{name}.")
    return values
