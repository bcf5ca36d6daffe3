"""What each number of a run means, and where it is healthy: for the reference and its readers."""

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
    Meaning("step", "the step, counted from 0; of an evaluation, the updates before it"),
    Meaning("step/seconds", "the whole step", "s"),
    Meaning("memory/host", "most memory that the first process has held", "GB"),
    Meaning("memory/device", "most memory that its first device has held", "GB", "below all of it"),
    Meaning("plan/changed", "1 where the run went on with another plan; else absent"),
    Meaning("weights/NAME", "what all devices receive as trained weights come to a call", "MB"),
    # what was generated, and what it earned
    Meaning("reward/mean", "mean reward of the samples", "", "rises, and stays below its largest"),
    Meaning("reward/std", "standard deviation of the rewards", "", "above 0"),
    Meaning("reward/failed", "samples that have no reward, as a term failed", "", "0"),
    Meaning("reward/NAME/mean", "mean of one term of the reward, over what it could score"),
    Meaning("reward/NAME/failed", "responses that one term gave no number for", "", "0"),
    Meaning("reward/NAME/NAME", "mean of a number that a reward gives beside its value"),
    Meaning(
        "reward/NAME/NAME/failed", "responses of which that number was not finite", "", "absent"
    ),
    Meaning("response/length_mean", "tokens of a response", "tokens", "below max_new_tokens"),
    Meaning("response/unfinished", "share of the responses that are cut off", "", "below 0.1"),
    # distances
    Meaning("kl/mean", "KL of the policy to the reference, a token (k3)", "nats", "below 0.2"),
    Meaning("kl/response", "KL to the reference, a response (k1)", "nats", "below 10"),
    Meaning(
        "reference/nats",
        "how unlikely the reference finds a sampled token: -log p, which rises where the language"
        " goes",
        "nats",
        "does not rise",
    ),
    Meaning("kl/old", "KL of the policy before the update to now, a token", "nats", "below 0.02"),
    Meaning("kl/coefficient", "price of a nat, in reward"),
    Meaning(
        "mismatch/kl", "KL of generation's law to training's, a token (k3)", "nats", "below 0.001"
    ),
    Meaning(
        "mismatch/mean",
        "how far log-probs of generation and training are apart, a token",
        "nats",
        "below 0.02",
    ),
    Meaning("mismatch/max", "the same of the token that is farthest apart", "nats", "below 1"),
    # samples that were drawn ahead, with training.lag
    Meaning("lag/updates", "updates since the samples were drawn", "", "0, then 1"),
    Meaning("lag/kl", "KL of the weights that drew to those now, a token", "nats", "below 0.02"),
    Meaning("lag/weight", "mean importance weight of a token", "", "near 1"),
    Meaning("lag/truncated", "share of the tokens whose weight is at lag_clip", "", "below 0.05"),
    Meaning("lag/waited_seconds", "waiting for the next samples, once trained", "s"),
    # training
    Meaning("loss/policy", "the policy's loss, a token, without KL and entropy"),
    Meaning("loss/value", "the critic's loss, a token", "", "falls"),
    Meaning("ratio/mean", "probability now over before the update, a token", "", "near 1"),
    Meaning("ratio/max", "the largest of these ratios", "", "below 10"),
    Meaning("ratio/clipped", "share of the tokens whose ratio is clipped", "", "below 0.2"),
    Meaning("entropy/estimate", "entropy of the policy, from its samples", "nats", "falls slowly"),
    Meaning("entropy/mean", "entropy of the policy over all tokens", "nats", "falls slowly"),
    Meaning("gradient/norm", "norm of the policy's gradient, before clipping", "", "no jumps"),
    Meaning("training/learning_rate", "learning rate of the policy's last optimizer step"),
    Meaning("critic/learning_rate", "learning rate of the critic's last optimizer step"),
    Meaning("critic/gradient_norm", "norm of the critic's gradient, before clipping"),
    Meaning("critic/mean", "mean value that the critic gives"),
    Meaning("critic/clipped", "share of the values that moved as far as they may", "", "below 0.2"),
    Meaning(
        "critic/explained_variance", "share of the returns that the critic knows", "", "towards 1"
    ),
    Meaning("training/seconds", "policy and critic being updated", "s"),
    Meaning("training/minibatches_done", "optimizer steps taken", "", "all, but for target_kl"),
    Meaning(
        "training/skipped",
        "minibatches skipped, as a number was not finite; losses and KL are absent where all were",
        "",
        "0",
    ),
    Meaning("training/skipped_in_row", "of them, the last ones without one between", "", "0"),
    Meaning("training/padding", "share of its tokens that pad, or repeat a prompt", "", "< 0.2"),
    Meaning("training/padding_flops", "share of its products that these take", "", "< 0.2"),
    Meaning("inference/seconds", "rewards, log-probs and values being computed", "s"),
    Meaning("inference/padding", "share of its tokens that pad, or repeat a prompt", "", "< 0.2"),
    Meaning("data/epoch", "times that the rows were gone through, where samples are given"),
    # generation
    Meaning("generation/seconds", "the policy writing responses", "s"),
    Meaning("generation/tokens", "tokens of the responses", "tokens"),
    Meaning("generation/tokens_so_far", "the same since the run began", "tokens"),
    Meaning("generation/rounds", "rounds: one forward pass of the policy each"),
    Meaning("generation/tokens_per_second", "over all rows and slices", "tokens/s"),
    Meaning("generation/tokens_per_round", "of a row; 1 without drafts", "tokens", "at least 1"),
    Meaning("generation/acceptance", "share of the drafted tokens that were accepted"),
    Meaning("generation/occupancy", "share of the rows that were live", "", "above 0.7"),
    Meaning("generation/moves", "samples that moved between slices"),
    Meaning("generation/moved_bytes", "of their caches", "bytes"),
    Meaning(
        "lengths/NAME_within_50",
        "responses whose length is in the middle half of what was forecast for it: of all samples,"
        " by earlier responses to the prompt, by siblings that had ended",
        "",
        "about 0.5",
    ),
    Meaning("lengths/NAME_within_90", "the same of the middle 90 %", "", "about 0.9"),
    Meaning("generation/idle_share", "share of the slices' time without work", "", "below 0.2"),
    Meaning("generation/attempts", "roll-outs, with those of `resample`"),
    Meaning(
        "generation/groups_without_signal",
        "share of the prompts whose samples all earned the same",
        "",
        "below 0.5",
    ),
    # the choice of strategies
    Meaning("strategy/share_NAME", "share of the rounds that a drafter drafted for; none: plain"),
    Meaning("strategy/acceptance_NAME", "chance that a drafter's first draft is accepted"),
    Meaning("strategy/draft_length", "tokens drafted for a row and round", "tokens"),
    Meaning("strategy/predicted_tokens_per_second", "as the cost model foresaw", "tokens/s"),
    Meaning(
        "strategy/tokens_per_second",
        "of the same rounds, as measured",
        "tokens/s",
        "near the prediction",
    ),
    Meaning("strategy/switches", "how often the strategy changed"),
    Meaning("strategy/probe_share", "share of the time that went into trying", "", "below 0.05"),
    # a draft model
    Meaning("drafter/loss", "KL of the policy to the student, a token", "nats", "falls"),
    Meaning("drafter/acceptance", "share of the tokens that the student draws, too", "", "rises"),
    Meaning(
        "drafter/acceptance_frozen",
        "the same of a student that never learns",
        "",
        "below drafter/acceptance",
    ),
    Meaning("drafter/gradient_norm", "norm of the student's gradient, before clipping"),
    Meaning("drafter/seconds", "the student learning", "s"),
    Meaning("drafter/version", "updates of the student"),
    Meaning("drafter/policy_step", "update of the policy that the student last learned from"),
    Meaning("drafter/behind", "updates of the policy since then", "", "small"),
    Meaning("drafter/not_finite", "1 where the student's step was not taken", "", "absent"),
    # evaluations
    Meaning("eval/reward", "mean reward on held-out prompts", "", "rises as reward/mean does"),
    Meaning("eval/finished", "share of held-out answers with an end of their own", "", "above 0.9"),
    Meaning(
        "eval/distinct_pairs",
        "distinct word pairs over all pairs of the answers",
        "",
        "above half of before",
    ),
    Meaning("eval/generation/tokens_per_round", "as generation/tokens_per_round", "tokens"),
    Meaning("eval/NAME/failed", "answers that a measure gave no number for", "", "absent"),
    Meaning("eval/NAME/NAME", "mean of a number that a measure gives beside its value"),
    Meaning("eval/NAME", "mean of a measure of reward.metrics", "", "does not fall"),
)


def meaning_of(key: str) -> Meaning | None:
    """Return what a key means; None where it is not a number of this package."""
    for meaning in MEANINGS:
        if re.fullmatch(re.escape(meaning.key).replace("NAME", r"[^/]+"), key):
            return meaning
    return None
