"""Meanings, units and healthy ranges of all metrics, for the reference page and the report."""

from __future__ import annotations

import re
from typing import NamedTuple


class Meaning(NamedTuple):
    """Describe a key of metrics.jsonl or evaluations.jsonl; NAME in it stands for any name."""

    key: str
    text: str
    unit: str = ""
    healthy: str = ""


MEANINGS = (
    Meaning("step", "step, from 0; in evaluations, the number of updates so far"),
    Meaning("step/seconds", "duration of the step", "s"),
    Meaning("memory/host", "peak host memory of the first process", "GB"),
    Meaning("memory/device", "peak memory of its first device", "GB", "below its memory"),
    Meaning("plan/changed", "1 if the run was resumed with another plan; else absent"),
    Meaning("weights/NAME", "bytes that all devices receive when weights move to a call", "MB"),
    # samples and their rewards
    Meaning("reward/mean", "mean reward of the samples", "", "rises, stays below its maximum"),
    Meaning("reward/std", "standard deviation of the rewards", "", "above 0"),
    Meaning("reward/failed", "samples without a reward, because a term failed", "", "0"),
    Meaning("reward/NAME/mean", "mean of one term of the reward, over the samples that it scored"),
    Meaning("labels/learned", "labels that the reward model has learned from so far"),
    Meaning(
        "labels/predicted",
        "share of a step's labels that it predicted before it learned from them",
        "",
        "rises above 0.5",
    ),
    Meaning("labels/failed", "pairs of responses that could not be labelled", "", "0"),
    Meaning("capability/mean", "mean capability of the step's prompts, 0 to 1", "", "rises"),
    Meaning("reward/NAME/failed", "responses for which one term failed", "", "0"),
    Meaning("reward/NAME/NAME", "mean of an extra number that a reward returns"),
    Meaning(
        "reward/NAME/NAME/failed", "responses for which that number was not finite", "", "absent"
    ),
    Meaning("response/length_mean", "mean length of a response", "tokens", "below max_new_tokens"),
    Meaning("response/unfinished", "share of responses that are cut off", "", "below 0.1"),
    # distances
    Meaning("kl/mean", "KL of the policy to the reference, per token (k3)", "nats", "below 0.2"),
    Meaning("kl/response", "KL to the reference, per response (k1)", "nats", "below 10"),
    Meaning(
        "reference/nats",
        "mean -log p of sampled tokens under the reference; it rises if the text becomes unnatural",
        "nats",
        "does not rise",
    ),
    Meaning("kl/old", "KL(old || new) of the update, per token", "nats", "below 0.02"),
    Meaning("kl/coefficient", "current penalty per nat, in reward"),
    Meaning("mismatch/kl", "KL of generation to training, per token (k3)", "nats", "below 0.001"),
    Meaning(
        "mismatch/mean",
        "mean absolute difference of log-probs between generation and training",
        "nats",
        "below 0.02",
    ),
    Meaning("mismatch/max", "largest such difference", "nats", "below 1"),
    # off-policy samples, with training.lag
    Meaning("lag/updates", "updates since the samples were generated", "", "0, then 1"),
    Meaning(
        "lag/kl", "KL of the sampling weights to the current ones, per token", "nats", "below 0.02"
    ),
    Meaning("lag/weight", "mean importance weight of a token", "", "near 1"),
    Meaning(
        "lag/truncated", "share of tokens whose weight is truncated at lag_clip", "", "below 0.05"
    ),
    Meaning("lag/waited_seconds", "wait for the next samples after training", "s"),
    # training
    Meaning("loss/policy", "policy loss per token, without KL and entropy"),
    Meaning("loss/value", "value loss per token", "", "falls"),
    Meaning("loss/reward", "loss of a reward model, per pair", "", "falls below 0.69"),
    Meaning(
        "preference/accuracy", "share of pairs whose chosen answer leads; ties half", "", "rises"
    ),
    Meaning("preference/margin", "its lead: nats of gain, or reward", "", "rises"),
    Meaning("preference/baseline", "mean gain of answers to other prompts, 0 at least", "nats"),
    Meaning("preference/pairs", "pairs of own answers that differ in reward", "", "above 0"),
    Meaning("chosen/tokens", "mean length of the chosen answers of these pairs", "tokens"),
    Meaning("rejected/tokens", "mean length of the rejected ones", "tokens", "near the chosen's"),
    Meaning("chosen/temperature", "mean sampling temperature of the chosen answers"),
    Meaning("rejected/temperature", "of the rejected ones", "", "near the chosen's"),
    Meaning("chosen/reward", "mean reward of the chosen answers"),
    Meaning("rejected/reward", "mean reward of the rejected answers"),
    Meaning("best/reward", "mean reward of the best answer to each prompt", "", "rises"),
    Meaning(
        "best/kl", "bound on the KL of best-of-n answers to the policy, log n - (n-1)/n", "nats"
    ),
    Meaning("confidence/mean", "mean probability of a sampled token, over all prompts"),
    Meaning("confidence/kept", "the same of the prompts that are trained on"),
    Meaning("chosen/logprob", "log-probability of a chosen answer", "nats"),
    Meaning("rejected/logprob", "log-probability of a rejected answer", "nats"),
    Meaning("reward/chosen", "mean reward of chosen answers, by a reward model in training"),
    Meaning("reward/rejected", "mean reward of rejected answers, likewise"),
    Meaning("ratio/mean", "mean ratio of new to old probability of a token", "", "near 1"),
    Meaning("ratio/max", "largest of these ratios", "", "below 10"),
    Meaning("ratio/clipped", "share of tokens whose ratio is clipped", "", "below 0.2"),
    Meaning(
        "entropy/estimate",
        "entropy of the policy, estimated from its samples",
        "nats",
        "falls slowly",
    ),
    Meaning(
        "entropy/mean", "exact entropy of the policy over the vocabulary", "nats", "falls slowly"
    ),
    Meaning("gradient/norm", "gradient norm of the policy, before clipping", "", "no jumps"),
    Meaning("training/learning_rate", "learning rate of the policy's last optimizer step"),
    Meaning("critic/learning_rate", "learning rate of the critic's last optimizer step"),
    Meaning("critic/gradient_norm", "gradient norm of the critic, before clipping"),
    Meaning("critic/mean", "mean value of the critic"),
    Meaning("critic/clipped", "share of values whose change is clipped", "", "below 0.2"),
    Meaning(
        "critic/explained_variance",
        "share of the variance of returns that the critic explains",
        "",
        "near 1",
    ),
    Meaning("training/seconds", "update of policy and critic", "s"),
    Meaning(
        "training/minibatches_done", "optimizer steps taken", "", "all, unless target_kl stops"
    ),
    Meaning(
        "training/skipped",
        "minibatches skipped for non-finite values; losses and KL are absent if all were",
        "",
        "0",
    ),
    Meaning("training/skipped_in_row", "consecutive skipped minibatches up to now", "", "0"),
    Meaning("training/tokens", "tokens learned from, counted in each epoch", "tokens"),
    Meaning("training/padding", "share of its tokens that pad, or repeat a prompt", "", "< 0.2"),
    Meaning("training/padding_flops", "share of its products that these take", "", "< 0.2"),
    Meaning("inference/seconds", "rewards, log-probs and values", "s"),
    Meaning("inference/padding", "share of its tokens that pad, or repeat a prompt", "", "< 0.2"),
    Meaning("data/epoch", "passes over the rows, if samples are given"),
    # generation
    Meaning("generation/seconds", "generation of the responses", "s"),
    Meaning("generation/tokens", "generated tokens", "tokens"),
    Meaning("generation/tokens_so_far", "generated tokens since the start of the run", "tokens"),
    Meaning("generation/rounds", "decoding rounds: one forward pass of the policy each"),
    Meaning(
        "generation/tokens_per_second",
        "generated tokens per second, over all rows and slices",
        "tokens/s",
    ),
    Meaning(
        "generation/tokens_per_round",
        "tokens per round of a row; 1 without drafts",
        "tokens",
        "at least 1",
    ),
    Meaning("generation/acceptance", "share of drafted tokens that were accepted"),
    Meaning("generation/occupancy", "share of rows that were live", "", "above 0.7"),
    Meaning("generation/moves", "samples that moved between slices"),
    Meaning("generation/moved_bytes", "bytes of their caches", "bytes"),
    Meaning(
        "lengths/NAME_within_50",
        "share of responses whose length was in the middle 50 % of its forecast; NAME: all"
        " samples, forecasts from earlier responses to the prompt, from its finished samples",
        "",
        "about 0.5",
    ),
    Meaning("lengths/NAME_within_90", "the same for the middle 90 %", "", "about 0.9"),
    Meaning("generation/idle_share", "share of time in which slices were idle", "", "below 0.2"),
    Meaning("generation/attempts", "rollouts, including those of `resample`"),
    Meaning(
        "generation/groups_without_signal",
        "share of prompts whose samples all have the same reward",
        "",
        "below 0.5",
    ),
    # the choice of strategies
    Meaning("strategy/share_NAME", "share of rounds with this drafter; none: plain"),
    Meaning("strategy/acceptance_NAME", "acceptance rate of a drafter's first draft"),
    Meaning("strategy/draft_length", "drafted tokens per row and round", "tokens"),
    Meaning("strategy/predicted_tokens_per_second", "predicted speed of generation", "tokens/s"),
    Meaning(
        "strategy/tokens_per_second",
        "measured speed of the same rounds",
        "tokens/s",
        "near the prediction",
    ),
    Meaning("strategy/switches", "changes of the strategy"),
    Meaning(
        "strategy/probe_share", "share of time for probes of other strategies", "", "below 0.05"
    ),
    # a draft model
    Meaning("drafter/loss", "KL of the policy to the student, per token", "nats", "falls"),
    Meaning("drafter/acceptance", "share of the tokens that the student draws, too", "", "rises"),
    Meaning(
        "drafter/acceptance_frozen", "the same for a frozen student", "", "below drafter/acceptance"
    ),
    Meaning("drafter/gradient_norm", "gradient norm of the student, before clipping"),
    Meaning("drafter/seconds", "distillation of the student", "s"),
    Meaning("drafter/version", "updates of the student"),
    Meaning("drafter/policy_step", "policy update at the last distillation"),
    Meaning("drafter/behind", "policy updates since then", "", "small"),
    Meaning("drafter/not_finite", "1 if the student's step was skipped", "", "absent"),
    # evaluations
    Meaning("eval/reward", "mean reward on held-out prompts", "", "rises as reward/mean does"),
    Meaning("eval/finished", "share of held-out answers that are not cut off", "", "above 0.9"),
    Meaning(
        "eval/distinct_pairs",
        "distinct word pairs over all word pairs of the answers",
        "",
        "above half of the first",
    ),
    Meaning("eval/generation/tokens_per_round", "as generation/tokens_per_round", "tokens"),
    Meaning("eval/NAME/failed", "answers for which a function failed", "", "absent"),
    Meaning("eval/NAME/NAME", "mean of an extra number that a function returns"),
    Meaning("eval/NAME", "mean of a function of reward.metrics", "", "does not fall"),
)


def meaning_of(key: str) -> Meaning | None:
    """Return the meaning of a key; None if the package has no such metric."""
    for meaning in MEANINGS:
        if re.fullmatch(re.escape(meaning.key).replace("NAME", r"[^/]+"), key):
            return meaning
    return None
