"""List all keys of a run and their defaults; `setup/validation.py` says what makes them valid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterable, Iterator, Mapping

    class Config:
        """Say to type checkers what of a ConfigDict is used; its keys have any value."""

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

# A key's comment says what its value is, with the unit where it is a quantity.
DEFAULTS: dict[str, Any] = {
    # the folder of the whole run: metrics, samples, checkpoints and the trained policy; or its URL,
    # as gs://bucket/run
    "workdir": "runs/default",
    # how many times the policy is rolled out and updated
    "steps": 100,
    # of prompts, sampling and training; the same seed gives the same run
    "seed": 0,
    # bit for bit: no decision by the clock (rewards have no time limit), sums in one order
    "deterministic": False,
    # make the checks with which a run begins, say what it would need, and stop; nothing is written
    "dry_run": False,
    # a number of a step or an evaluation at which the run ends, as in 'eval/reward >= 0.95'; '' for
    # none
    "stop_at": "",
    # steps of which a profile is written to WORKDIR/profile, as in '5:7'; '' for none
    "profile": "",
    # where numbers go besides metrics.jsonl and TensorBoard: wandb, mlflow, trackio, FILE.py:NAME;
    # they hear of a step when its checkpoint is on disk
    "sinks": (),
    # seconds after which a phase that stands still is named; 0 for never
    "watchdog_seconds": 300,
    # seconds of silence after which one of several processes is lost, and the others end; a process
    # may stand still for half of them
    "heartbeat_seconds": 30,
    # What the run learns; the algorithm's own options are keys beside its name.
    "algorithm": {
        # grpo: the policy learns to earn rewards, compared within a group; ppo: beside a critic;
        # distill: a student learns to draft for the policy; or FILE.py:NAME
        "name": "grpo"
    },
    "model": {
        # Hugging Face folder, .gguf file, or hub name org/name
        "path": "",
        # families of models of one's own, each FILE.py:NAME
        "families": (),
        # of matrix products; 'auto' is bfloat16 on accelerators and float32 on CPU
        "compute_dtype": "auto",
    },
    # The small model of the 'model-*' strategies. Under acceptance 'replayable' the text does not
    # depend on it.
    "drafter": {
        # a draft model, or a student that was made before, given as model.path is
        "path": "",
        # 0 takes what the path holds as it is; else a student has so many of the layers of the
        # path's model, or of the policy where the path is empty
        "layers": 0,
        # of a student's AdamW; 0 leaves the student as it is, above 0 keeps it current
        "learning_rate": 0.0,
        # samples of each step from which a student that is kept current learns
        "samples": 8,
    },
    # The model of values that the algorithm 'ppo' trains beside the policy; and each of an
    # algorithm's own roles.
    "critic": {
        # a reward model over the policy's vocabulary; '' for the policy's own trunk
        "path": "",
        # of the critic's AdamW
        "learning_rate": 1e-5,
        # optimizer steps in which the rate rises linearly
        "warmup_steps": 0,
        # updates of the critic alone, before the policy's first
        "steps_alone": 0,
        # a value moves at most so far from what it was before the update
        "clip": 0.2,
    },
    "data": {
        # the prompts to train on: a .jsonl or .parquet file or its URL (gs://, s3://), or a folder
        # or hub name org/name of a data set
        "train": "",
        # held-out prompts, given alike; '' for none
        "eval": "",
        # of a data set, '' for the only one
        "configuration": "",
        # of the data set to train on
        "train_split": "train",
        # of the data set that is held out
        "eval_split": "test",
        # old name -> new name of columns, such as {"answer": "solution"}
        "columns": {},
        # the field that holds a string or chat messages
        "prompt_key": "prompt",
        # a row that cannot be used: 'error' ends the run, 'skip' leaves it out and says how many
        "on_bad_row": "error",
        # system prompt before every prompt, '' for none
        "system": "",
        # a prompt that is a string goes to the policy as it is, without the chat template
        "raw": False,
        # name -> value that the chat template is given, such as {"enable_thinking": False}
        "template_arguments": {},
        # the day that chat templates are told, YYYY-MM-DD; '' for that on which the run begins
        "date": "",
        # tokens; longer prompts are dropped and counted
        "max_prompt_tokens": 256,
        # where samples are given and not generated: rows of a step
        "rows_per_step": 32,
        # tokens of a given sample, its end included; rows with longer ones are dropped and counted
        "max_response_tokens": 256,
    },
    # A sample's reward is the weighted sum of functions and models.
    "reward": {
        # each FILE.py:function or package.module:function, called by its parameters' names as
        # docs/how-to/reward.md says; or SCHEME://... of a registered source of rewards
        "functions": (),
        # each a Hugging Face sequence-classification folder, read at a conversation's last token
        "models": (),
        # weights of the functions, then of the models; () for 1 each
        "weights": (),
        # processes that each function runs in
        "workers": 2,
        # calls of an async function that are under way at one time
        "concurrency": 16,
        # the longest that a call may take, for each response that it has; and the reward's import,
        # which has 2 at least
        "seconds": 10.0,
        # a sample on which a call failed or took too long: 'drop' trains without it, 'value' gives
        # it the reward `failed`; both are counted
        "on_failure": "drop",
        # the reward of such a sample, where on_failure is 'value'
        "failed": 0.0,
        # the run ends where calls fail on more than this share of a roll-out's samples
        "max_failed": 0.5,
        # taken from the reward of a response that was cut off
        "missing_end": 0.0,
        # rewards are clipped to -clip .. clip; 0 for not
        "clip": 0.0,
        # whether the rewards of a step are divided by their standard deviation
        "whiten": False,
        # name -> function as above: measured in evaluation, never trained on
        "metrics": {},
    },
    "generation": {
        # different prompts of one roll-out
        "prompts_per_step": 8,
        # samples of each prompt: the group that advantages may be relative to
        "samples_per_prompt": 4,
        # more roll-outs, at most, to replace prompts whose samples all earned the same (DAPO)
        "resample": 0,
        # tokens of the longest response
        "max_new_tokens": 128,
        # texts that end a response, beside the model's own stop tokens; they are part of it
        "stop_strings": (),
        # of the distribution that is sampled from, which is also the one that is trained
        "temperature": 1.0,
        # sample among the k likeliest tokens, at most 64; 0 for all
        "top_k": 0,
        # refused unless 1: truncation by joint probability is for evaluation only
        "top_p": 1.0,
        # 'adaptive' is chosen every round; or plain, lookup-chain-4, replay-chain-8-packed-3 ...
        "strategy": "adaptive",
        # drafters of one's own, each FILE.py:NAME; strategies name them as they name themselves
        "drafters": (),
        # 'replayable' accepts drafts that equal the policy's own draw; or 'rejection'
        "acceptance": "replayable",
        # live rows of a slice at most
        "max_rows": 32,
        # rows down to which the batch halves as samples end; each halving compiles a program
        "min_rows": 8,
        # place samples on slices by their expected lengths, and move them while they run
        "reallocate": True,
        # slices with nothing left to decode score what is finished, with weights of their own
        "fuse_inference": False,
        # tokens of earlier roll-outs that lookup drafts from, of the same prompt and, where these
        # leave room, the latest of others; of all prompts 8 million are kept, and those that were
        # answered longest ago are forgotten
        "history_tokens": 256,
        # samples of a prompt that repeat an earlier noise: they replay its text, but are no fresh
        # draws (the weights were fitted to that noise) and explore less
        "repeated_noise": 0,
    },
    "evaluation": {
        # steps between evaluations on data.eval, and one at each end; 0 for none
        "every": 0,
        # samples of each held-out prompt, whose mean is reported
        "samples_per_prompt": 1,
        # 0 takes the likeliest token
        "temperature": 1.0,
        # sample among the likeliest tokens of this joint probability
        "top_p": 1.0,
        # sample among the k likeliest tokens; 0 for all
        "top_k": 0,
    },
    # The price of leaving the reference.
    "kl": {
        # reward for each nat; 0 keeps no reference, and KL is measured to the policy before the
        # update
        "coefficient": 0.04,
        # 'loss', or 'reward': taken from the reward token by token
        "place": "loss",
        # of Schulman 2020: k1 (in the reward only), k2 or k3
        "estimator": "k3",
        # nats a response: the coefficient adapts to stay there; 0 keeps it fixed
        "target": 0.0,
        # samples in which the coefficient adapts
        "horizon": 10_000,
    },
    "training": {
        # times that each roll-out is trained on
        "epochs": 1,
        # optimizer steps of an epoch
        "minibatches": 1,
        # how many of the longest samples a micro-batch has room for, over all devices: the same
        # number on each, rounded down, and at least one; shorter samples are more
        "microbatch_rows": 8,
        # the same in tokens, in place of it: as many of the longest samples as these hold; 0 for
        # microbatch_rows
        "microbatch_tokens": 0,
        # of the policy's AdamW; 0 takes one by the size of the model, which the run prints
        "learning_rate": 0.0,
        # optimizer steps in which the rate rises linearly
        "warmup_steps": 0,
        # how the rate goes on: 'constant', or to 0 over all steps by 'linear' or 'cosine'
        "schedule": "constant",
        # of the policy's AdamW; norms and biases are spared
        "weight_decay": 0.0,
        # the gradient is clipped to this global norm
        "max_grad_norm": 1.0,
        # the ratio is clipped below at 1 - clip_low
        "clip_low": 0.2,
        # the ratio is clipped above at 1 + clip_high
        "clip_high": 0.2,
        # how a minibatch's losses are summed: token_mean, sequence_mean or constant; 'auto' as the
        # algorithm's loss (gspo: sequence_mean) or estimator (dr_grpo: constant) bring it, else
        # token_mean
        "aggregate": "auto",
        # of the entropy, which is subtracted from the loss
        "entropy_coefficient": 0.0,
        # nats: the rest of an update is left out once KL(old || new) exceeds it; 0 for never
        "target_kl": 0.0,
        # 1 draws the samples of the next step while this one trains, from the weights before its
        # update, in a plan that gives generation devices of its own; 0 does one after the other
        "lag": 0,
        # with a lag each token weighs p_now / p_sampled, and at most this
        "lag_clip": 2.0,
        # whether responses that were cut off are left out of training
        "drop_overlong": False,
        # minibatches in a row that may be skipped, as a number is not finite, before the run ends
        "max_skipped": 5,
        # train policy and critic as pipelines that run at once, in opposite directions: each of
        # mesh.slices has some of their layers, and mesh.data is copies (RLHFuse); for GPUs that a
        # slow network joins. With a target_kl neither takes a step once it is exceeded
        "pipelined": False,
        # keep only each layer's input for the backward pass and compute the rest again: on, off, or
        # auto, which is on where memory does not suffice without; a run keeps what it began with
        "remat": "auto",
        # reward models read texts padded to a multiple of so many tokens: larger, for fewer
        # programs; smaller, for less padding
        "length_bucket": 64,
    },
    # The same command again goes on from the last checkpoint in the workdir.
    "checkpoint": {
        # steps between checkpoints, and one at the end; 0 for none
        "every": 50,
        # the latest so many stay
        "keep": 2,
        # measure of the evaluations whose highest policy is kept in WORKDIR/best, as 'eval/reward';
        # '' for none
        "best": "",
        # go on although other keys differ from the checkpoint's; model and data may not
        "allow_changes": False,
    },
    "mesh": {
        # parts that generate each on its own, and between which running samples may move
        "slices": 1,
        # copies of the weights; -1 for the devices that are left
        "data": 1,
        # devices of a slice over which the weights are split in training, as they are over slices
        "fsdp": -1,
        # devices over which heads, feed-forward and vocabulary are split
        "tensor": 1,
        # memory that a device may use, in 10^9 bytes; 0 asks the device
        "device_memory_gb": 0.0,
        # reference and reward models wait in the host's memory, and come to their devices to score
        "idle_on_host": False,
    },
    # which devices each call of a step has: '' for those of `mesh`, all alike; 'colocated',
    # 'interleaved' or 'disaggregated'; or a file NAME.json, as docs/how-to/plan.md says
    "plan": "",
    # 'auto' takes what was measured faster: the chip's own kernel ('pallas') or plain JAX
    # ('reference'). 'interpret' runs the TPU's kernel anywhere, slowly, to debug it.
    "kernels": {
        # attention of the drafts over the cache
        "tree_attention": "auto",
        # the draw at each draft, without all logits in memory; not with a top_k or 'rejection'
        "verify_head": "auto",
        # the write of accepted drafts into the cache
        "commit": "auto",
        # log-probabilities of training and inference, without logits; not with a top_k or a split
        # vocabulary
        "logprobs": "auto",
    },
    # folder that keeps compiled programs between runs; '' for none
    "compilation_cache": "~/.cache/rlhf_jax/compiled",
}


# Keys whose values are dicts, each one value with names of the user's own.
DICTS = ("reward.metrics", "data.columns", "data.template_arguments")


# Keys of earlier versions, with the defaults that they had; `earlier.py` reads them.
EARLIER = {
    "objective": "reward",
    "advantage.estimator": "grpo",
    "advantage.discount": 1.0,
    "advantage.gae_lambda": 0.95,
    "advantage.deviation": "sample",
    "training.loss": "ppo",
}


def flat(config: Config, prefix: str = "") -> dict[str, Any]:
    """Return the values by dotted name, without EARLIER's; each of DICTS is one value, a dict."""
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
