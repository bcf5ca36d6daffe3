"""Warnings about a run: one sentence each, with its number."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from rlhf_jax.monitoring.callbacks import StopAt
from rlhf_jax.monitoring.diversity import commonest_form, commonest_start
from rlhf_jax.monitoring.metrics import is_measure
from rlhf_jax.report.run import RunRecord, series
from rlhf_jax.report.scales import reading, share

RECENT = 5  # steps whose mean is "at the end"
KL_NATS = 10.0  # of a response
KL_GROWTH = 10.0
KL_SMALL = 1.0  # nats of a response, below which growth does not matter
UNLIKELIER = 1.2  # factor on the nats of a token by the reference
MISMATCH_NATS = 0.02  # of a token
SHOWN_LETTERS = 60  # of what answers begin with
ALIKE = 0.25  # share of answers that begin alike
OF_ONE_FORM = 0.5  # share of answers that begin alike except for words of the prompt
FEWEST_STEPS = 3  # of a run that should have learned something
HARDLY = 0.05  # nats of a response, below which a policy has hardly moved
CERTAIN = 2.0  # least standard errors of a rising reward
SATURATED = 0.02  # of the reward's range
FEW_PAIRS = 0.25  # share of steps without a pair
# Factor by which the sides of pairs may differ, by what is measured of them.
UNLIKE_SIDES = {"tokens": 1.25, "temperature": 1.05}
FALLEN = 0.02  # of a held-out measure
RISEN = 1.02  # times its minimum, from which a held-out loss is reported
# Options that affect a policy's loss only through the ratio of probabilities, and their defaults.
OF_RATIO = {
    "algorithm.loss": "ppo",
    "training.clip_low": 0.2,
    "training.clip_high": 0.2,
    "training.target_kl": 0.0,
}
OWN_RULES = ("eval/reward", "eval/distinct_pairs")  # keys whose fall is not reported


def warnings(run: RunRecord) -> list[str]:
    """Return the problems of a run, present or likely, the gravest first."""
    return [sentence for check in CHECKS for sentence in check(run)]


def _kl(run: RunRecord) -> Iterator[str]:
    line = series(run.metrics, "kl/response")
    if not line:
        return
    now = _recent(run, "kl/response")
    # At the first step nothing has been learned, and KL is 0.
    early = float(line.values[1 : 1 + max(1, len(line) // 4)].max(initial=0.0))
    if now > KL_NATS:
        yield (
            f"An answer is {reading(now)} nats from the reference: the policy has left the language"
            " it began with; raise kl.coefficient, or stop earlier."
        )
    elif now > KL_SMALL and now > KL_GROWTH * early > 0:
        yield (
            f"KL has grown from {reading(early)} to {reading(now)} nats an answer: look at the"
            " samples before you train on."
        )


def _unlikely(run: RunRecord) -> Iterator[str]:
    """Yield a warning of answers that are unlikely for the reference, even if their KL is small."""
    line = series(run.metrics, "reference/nats")
    if len(line) < FEWEST_STEPS:
        return
    first = float(line.values[: max(1, len(line) // 4)].mean())
    now = _recent(run, "reference/nats")
    if now > UNLIKELIER * first:
        yield (
            f"A token of an answer costs the reference {reading(now)} nats, and cost it"
            f" {reading(first)} at first: the answers become unlikely language, so look at the"
            " samples; the reward may not require sense."
        )


def _learning(run: RunRecord) -> Iterator[str]:
    """Yield a warning of a policy that has hardly moved, or else of a reward that has not risen."""
    judged = ("reward.functions", "reward.models", "reward.preference_models")
    if [bool(run.config.get(key)) for key in judged] == [False, False, True]:
        return  # such rewards compare answers to one prompt, and are one half on average
    reward = series(run.metrics, "reward/mean")
    held_out = series(run.evaluations, "eval/reward").values
    risen = certain_change(run) > 0 or (
        len(held_out) > 1 and held_out[-1] > held_out[0] + FALLEN * max(1.0, abs(held_out[0]))
    )
    if len(reward) < FEWEST_STEPS or risen or any(_saturated(run)):
        return
    part = max(1, len(reward) // 4)
    first = reading(float(reward.values[:part].mean()))
    last = reading(float(reward.values[-part:].mean()))
    rate = run.config.get("training.learning_rate", 0.0)
    moved = _recent(run, "kl/response")
    measured = len(series(run.metrics, "kl/response"))
    if run.config.get("kl.coefficient") and measured and moved < HARDLY:
        yield (
            f"The policy has hardly moved: after {len(reward)} steps an answer is {reading(moved)}"
            f" nats from the reference, and the reward, on average {first} in the first quarter and"
            f" {last} in the last, may have changed by chance; raise training.learning_rate, which"
            f" is {rate:.2g}, or take more steps."
        )
    else:
        change = (
            f"an answer is {reading(moved)} nats from the reference all the same, so look at the"
            f" samples, then try a lower training.learning_rate, which is {rate:.2g}"
            if moved > KL_SMALL
            else "look whether some samples earn more than others, then take more steps, more"
            f" samples, or a higher training.learning_rate, which is {rate:.2g}"
        )
        yield (
            f"The reward has not risen in {len(reward)} steps, but for chance: on average it was"
            f" {first} in the first quarter and is {last} in the last; {change}."
        )


def certain_change(run: RunRecord) -> float:
    """Return how much higher the reward is in the last quarter; 0 if that may be chance."""
    reward = series(run.metrics, "reward/mean").values
    part = max(1, len(reward) // 4)
    spread = series(run.metrics, "reward/std").values
    # Samples of a prompt are correlated, so prompts are counted, each once in both parts.
    prompts = max(1, run.config.get("generation.prompts_per_step", 1)) * part
    error = float(spread.mean()) * (2 / prompts) ** 0.5 if len(spread) else 0.0
    change = float(reward[-part:].mean() - reward[:part].mean()) if len(reward) else 0.0
    return change if abs(change) > CERTAIN * error else 0.0


def _without_effect(run: RunRecord) -> Iterator[str]:
    """Yield a warning of options that depend on the ratio of probabilities if that is always 1."""
    config = run.config
    updates = config.get("training.epochs", 2) * config.get("training.minibatches", 2)
    if updates > 1 or config.get("training.lag") or series(run.metrics, "preference/margin"):
        return
    changed = [key for key, usual in OF_RATIO.items() if config.get(key, usual) != usual]
    if changed:
        settings = " and ".join(f"{key}={config[key]}" for key in changed)
        yield (
            f"{settings} reads a ratio of probabilities that is 1 in every update with one epoch,"
            " one minibatch and no lag: only its other inputs have an effect; for ratios raise"
            " training.minibatches or training.epochs."
        )


def _overfitted(run: RunRecord) -> Iterator[str]:
    """Yield a warning of losses on held-out rows that have risen since their minimum."""
    for key in run.evaluations[0] if run.evaluations else ():
        line = series(run.evaluations, key)
        if key.startswith("eval/loss/") and line.values[-1] > RISEN * line.values.min():
            best = int(line.values.argmin())
            yield (
                f"Held-out {key.removeprefix('eval/')} is {reading(line.values[-1])}, and was"
                f" {reading(line.values[best])} after {int(line.steps[best])} updates: the rows are"
                " learned by heart; end there, or give more of them."
            )


def _pairs(run: RunRecord) -> Iterator[str]:
    """Yield warnings of pairs of own answers that are missing, or differ in more than reward.

    Labels of such pairs are missing, too, if the two answers always score alike.
    """
    labels = series(run.metrics, "labels/learned").values
    if len(labels) and labels[-1] == 0:
        yield (
            "The reward model has learned from no label: the two answers to a prompt always score"
            " alike by reward.labels; look whether that function tells answers apart."
        )
    pairs = series(run.metrics, "preference/pairs").values
    if len(pairs) and (pairs == 0).mean() > FEW_PAIRS:
        yield (
            f"{share((pairs == 0).sum(), len(pairs))} of the steps had no two answers of different"
            " reward to a prompt, and trained nothing: look whether the reward differs at all, then"
            " raise generation.samples_per_prompt or the temperature."
        )
    for name, most in UNLIKE_SIDES.items():
        sides = [_recent(run, f"{side}/{name}") for side in ("chosen", "rejected")]
        if min(sides) > 0 and max(sides) > most * min(sides):
            yield (
                f"Chosen and rejected answers differ in {name}: {reading(sides[0])} and"
                f" {reading(sides[1])} on average; the policy learns that, too. See"
                " algorithm.length_penalty and algorithm.across_temperatures."
            )


def _falling(run: RunRecord) -> Iterator[str]:
    if not series(run.metrics, "reward/mean"):
        return
    for key in run.evaluations[0] if len(run.evaluations) > 1 else ():
        line = series(run.evaluations, key)
        if is_measure(key) and key not in OWN_RULES and len(line) > 1:
            first, last = line.values[[0, -1]]
            if last < first - FALLEN * max(1.0, abs(first)):
                yield (
                    f"Held-out {key.removeprefix('eval/')} fell from {reading(first)} to"
                    f" {reading(last)} while the policy learned: the reward does not measure it."
                )


def _alike(run: RunRecord) -> Iterator[str]:
    if not series(run.metrics, "reward/mean"):  # the answers are given
        return
    line = series(run.evaluations, "eval/distinct_pairs")
    if len(line) > 1 and line.values[-1] < line.values[0] / 2:
        first, last = line.values[[0, -1]]
        yield (
            f"Answers have become alike: of their word pairs {share(last, 1)} are distinct, and"
            f" {share(first, 1)} were."
        )
    texts = [str(one["response"]) for one in run.samples[-1][1]] if run.evaluations else []
    if len(texts) >= 2 / ALIKE:
        start, part = commonest_start(texts)
        if part > ALIKE:
            yield f"{share(part, 1)} of the answers begin with “{start[:SHOWN_LETTERS]}”."
            return
    # the first answer to each prompt
    batches = [
        [*{str(row["prompt"]): str(row["response"]) for row in reversed(rows)}.items()]
        for _, rows in run.samples
    ]
    if len(batches) > 1 and len(batches[-1]) >= 2 / ALIKE:
        before, now = (commonest_form(batch) for batch in (batches[0], batches[-1]))
        if now[1] > max(OF_ONE_FORM, 2 * before[1]):
            yield (
                f"{share(now[1], 1)} of the answers have one form, “{now[0][:SHOWN_LETTERS]}” with"
                f" words of the prompt for “…”; {share(before[1], 1)} began alike before."
            )


def _cut_off(run: RunRecord) -> Iterator[str]:
    part = _recent(run, "response/unfinished")
    if part > 0.5:
        many = "All responses" if part == 1 else f"{share(part, 1)} of the responses"
        yield (
            f"{many} are cut off: see whether one of the tokens that the run printed as “ends” as"
            " it began is the model's own, then raise generation.max_new_tokens, or set"
            " reward.missing_end."
        )


def _saturated(run: RunRecord) -> Iterator[str]:
    batches = [
        [one["reward"] for one in rows if one.get("reward") is not None] for _, rows in run.samples
    ]
    if not batches or not all(batches):
        return
    every = np.concatenate(batches)
    mean = float(np.mean(batches[-1]))
    if every.max() - mean <= SATURATED * np.ptp(every) and np.ptp(every) > 0:
        yield (
            f"The reward is at its end: {reading(mean)} on average, {reading(every.max())} at"
            " most; more training can only find ways around it."
        )


def _without_signal(run: RunRecord) -> Iterator[str]:
    part = _recent(run, "generation/groups_without_signal")
    if part > 0.5:
        yield (
            f"{share(part, 1)} of the prompts teach nothing, as all their samples"
            " earn the same: set generation.resample, or take harder or easier prompts."
        )


def _mismatch(run: RunRecord) -> Iterator[str]:
    apart = _recent(run, "mismatch/mean")
    if apart > MISMATCH_NATS:
        yield (
            f"Generation and training differ by {reading(apart)} nats a token:"
            " updates are off-policy by as much; look at model.compute_dtype and kernels."
        )


def _failed(run: RunRecord) -> Iterator[str]:
    terms = {key for row in run.metrics for key in row if key.endswith("/failed")}
    for key in sorted(terms - {"reward/failed"}):
        if failed := float(series(run.metrics, key).values.sum()):
            name = key.removeprefix("reward/").removesuffix("/failed")
            yield f"The reward {name} failed on {failed:,.0f} responses: samples.jsonl has them."


def _skipped(run: RunRecord) -> Iterator[str]:
    if skipped := float(series(run.metrics, "training/skipped").values.sum()):
        yield (
            f"{skipped:,.0f} minibatches were skipped, as a number was not finite: look for a"
            " reward out of scale, or lower the learning rate."
        )


def _never_measured(run: RunRecord) -> Iterator[str]:
    """Yield a warning of a number that a setting waits for, and that was never measured."""
    stop_at = run.config.get("stop_at")
    waited = {"stop_at": StopAt(stop_at).key} if stop_at else {}
    waited["checkpoint.best"] = run.config.get("checkpoint.best", "")
    for setting, key in waited.items():
        rows = run.evaluations if key.startswith("eval/") else run.metrics
        if key and rows and not any(key in row for row in rows):
            yield f"{setting} waits for {key}, which was never measured: correct the name."


def _recent(run: RunRecord, key: str) -> float:
    """Return the mean of a number's last steps; 0 if the run has none."""
    values = series(run.metrics, key).values[-RECENT:]
    return float(np.mean(values)) if len(values) else 0.0


CHECKS: tuple[Callable[[RunRecord], Iterator[str]], ...] = (
    _kl,
    _unlikely,
    _learning,
    _falling,
    _overfitted,
    _pairs,
    _alike,
    _cut_off,
    _saturated,
    _without_signal,
    _mismatch,
    _failed,
    _skipped,
    _without_effect,
    _never_measured,
)
