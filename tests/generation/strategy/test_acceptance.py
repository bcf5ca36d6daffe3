"""Rates from observed drafts: how they lean on each other, sudden changes, calibration."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.strategy import acceptance, candidates, predict
from rlhf_jax.generation.strategy.acceptance import BANDS, CLASSES, DEPTHS, RANKS, Observations
from rlhf_jax.generation.strategy.settings import ACCEPTANCE_SETTINGS


def drafted(
    rng,
    drafts: int,
    first: float,
    second: float = 0.0,
    seen_prompt: bool = False,
    confidence: int = 1,
    band: int = 0,
) -> Observations:
    """Drafts whose rank 0 is right with chance `first` at each depth, rank 1 with `second`."""
    uniform = rng.random((drafts, DEPTHS))
    ranks = np.where(uniform < first, 0, np.where(uniform < first + second, 1, -1))
    before = np.cumprod(np.pad(ranks[:, :-1] == 0, ((0, 0), (1, 0)), constant_values=True), axis=1)
    shape = np.full(drafts, seen_prompt), np.full(drafts, confidence)
    at = np.full(drafts, band)
    return Observations(*shape, np.where(before, ranks, -1), RANKS * before, at)


def learned(*pieces: Observations, used: bool = False) -> acceptance.Acceptance:
    known = acceptance.unknown()
    for piece in pieces:
        known = acceptance.observe(known, piece, used)
    return known


def test_counts_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    ranks = rng.integers(-1, RANKS, (20, DEPTHS))
    offered = rng.integers(0, RANKS + 1, (20, DEPTHS))
    piece = Observations(
        rng.random(20) < 0.5,
        rng.integers(0, CLASSES, 20),
        np.minimum(ranks, offered - 1),
        offered,
        band=np.zeros(20, int),
    )
    seen, hits = np.zeros((2, 2, CLASSES, DEPTHS, RANKS))
    for i, depth, rank in np.ndindex(20, DEPTHS, RANKS):
        cell = int(piece.seen_prompt[i]), piece.confidence[i], depth, rank
        seen[cell] += rank < offered[i, depth]
        hits[cell] += rank < offered[i, depth] and piece.ranks[i, depth] == rank
    known = learned(piece, used=True)
    np.testing.assert_array_equal(known.seen[0], seen)
    np.testing.assert_array_equal(known.hits[0], hits)


def looped_rates(seen: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Rates [2, 4, 8, 4] of counts, number by number: each cell leans with a weight of 4 drafts on
    its class, that on the whole drafter, and a depth of the whole on the one above.
    """
    above = [0.3, 0.09, 0.027, 0.0081]
    general = np.zeros((8, 4))
    for depth, rank in np.ndindex(8, 4):
        count, right = (x[:, :, depth, rank].sum() for x in (seen, hits))
        above[rank] = general[depth, rank] = (right + 4 * above[rank]) / (count + 4)

    def leaning(seen, hits, general):
        found = np.zeros((8, 4))
        for depth, rank in np.ndindex(8, 4):
            expected = sum(seen[d, rank] * general[d, rank] for d in range(8))
            scale = (sum(hits[:, rank]) + 1) / (expected + 1)
            target = min(general[depth, rank] * scale, 0.99)
            found[depth, rank] = (hits[depth, rank] + 4 * target) / (seen[depth, rank] + 4)
        return found

    rates = np.zeros((2, 4, 8, 4))
    for kind in range(4):
        of_class = leaning(seen[:, kind].sum(axis=0), hits[:, kind].sum(axis=0), general)
        for prompt in range(2):
            own = leaning(seen[prompt, kind], hits[prompt, kind], of_class)
            for depth in range(8):
                total = 0.0
                least = 1.0
                for rank in range(4):
                    least = min(least, own[depth, rank])
                    rates[prompt, kind, depth, rank] = min(total + least, 0.99) - min(total, 0.99)
                    total += least
    return rates


@pytest.mark.parametrize("seed", range(3))
def test_rates_are_those_of_loops(seed):
    rng = np.random.default_rng(seed)
    seen = np.where(rng.random((2, 4, 8, 4)) < 0.7, rng.integers(0, 60, (2, 4, 8, 4)), 0.0)
    hits = np.floor(seen * rng.random(seen.shape) * [0.9, 0.3, 0.2, 0.1])
    counts = np.zeros((2, 3, 2, 4, 8, 4))
    counts[:, 0] = seen, hits
    realised = np.array([[30.0, 40.0], [0, 0], [0, 0]])
    known = acceptance.Acceptance(counts[0], counts[1], realised, np.zeros(2))
    np.testing.assert_allclose(known.rates, looped_rates(seen, hits), atol=1e-12)
    drafts = seen[:, :, 0, 0]
    assert known.drafts == drafts.sum()
    np.testing.assert_allclose(
        acceptance.pooled_rates(known),
        (known.rates * drafts[..., None, None]).sum(axis=(0, 1)) / drafts.sum(),
        rtol=1e-6,
    )
    for prompt, kind in np.ndindex(2, 4):
        tried, right = (x[prompt, kind, :, 0].sum() for x in (seen, hits))
        wanted = (right + 4 * 0.99) / (tried + 4)
        assert acceptance.likeliest_rate(known, prompt, kind) == pytest.approx(wanted)
    assert acceptance.calibration(known) == pytest.approx(31 / 41)


class Drift:
    """CUSUM (Page 1954) of a fall and of a rise of the odds by 8, in plain numbers."""

    def __init__(self) -> None:
        self.fall = self.rise = 0.0

    def test(self, rate: float, hits: float, trials: float) -> None:
        rate = min(max(rate, 0.01), 0.99)
        fell = rate / 8 / (rate / 8 + 1 - rate)
        rose = rate * 8 / (rate * 8 + 1 - rate)

        def ratio(other: float) -> float:
            missed = trials - hits
            return hits * math.log(other / rate) + missed * math.log((1 - other) / (1 - rate))

        self.fall += ratio(fell)
        self.rise += ratio(rose)

    def kept(self) -> list[float]:
        self.fall = max(0.0, self.fall)
        self.rise = max(0.0, self.rise)
        return [self.fall, self.rise]


@pytest.mark.parametrize("given", [0.0, 0.1, 0.5, 0.6, 2.5])
def test_own_rounds_are_those_of_plain_python(given):
    """Tokens that each of 48 rows accepts, where 0.5 are predicted, and a calibration corrects it.

    It begins with 64 tokens as predicted, remembers 256, and lies between 0.1 and 1.5. A row's
    drafts are geometric. Where a change is believed, what came since it began is all that is left.
    """
    known = acceptance.unknown()
    drift = Drift()
    windows = [[64.0, 64.0], [0.0, 0.0], [0.0, 0.0]]
    for _ in range(12):
        accepted, predicted = windows[0]
        mean = 0.5 * min(max((accepted + 1) / (predicted + 1), 0.1), 1.5)
        lasting = (True, drift.fall > 0, drift.rise > 0)
        drift.test(mean / (1 + mean), 48 * given, 48 * given + 48)
        for window, lasts in enumerate(lasting):
            accepted, predicted = windows[window] if lasts else (0.0, 0.0)
            kept = min(1.0, 256 / (predicted + 24))
            windows[window] = [kept * (accepted + 48 * given), kept * (predicted + 24)]
        found = drift.kept()
        if max(found) >= 9.0:
            windows = [windows[1 + found.index(max(found))] for _ in windows]
            drift = Drift()
            found = [0.0, 0.0]
        known = acceptance.calibrate(known, 48 * given, 24.0, rows=48)
        np.testing.assert_allclose(known.realised, windows, rtol=1e-9)
        np.testing.assert_allclose(known.drift, found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize(("rate", "changed"), [(0.3, False), (0.95, True)])
def test_what_is_scored_alone_tests_for_a_change_and_loosens_the_calibration(rate, changed, used):
    """Number by number, where the rates are those of the prior; 64 drafts leave 1/e of it.

    A change leaves these drafts alone, and nothing of the calibration.
    """
    piece = drafted(np.random.default_rng(3), 24, rate)
    piece.offered[::2] = np.minimum(piece.offered[::2], 1)  # no second best ones of half of them
    known = acceptance.observe(
        acceptance.unknown(), drafted(np.random.default_rng(4), 1, 0.0), True
    )
    rounds = np.array([[30.0, 40.0], [0, 0], [0, 0]])
    known = dataclasses.replace(known, realised=known.realised + rounds)
    after = acceptance.observe(known, piece, used)
    drift = Drift()
    for row, depth in np.ndindex(24, DEPTHS):
        if piece.offered[row, depth]:
            right = float(piece.ranks[row, depth] == 0)
            drift.test(known.rates[0, 1, depth, 0], right, 1.0)
    changed = changed and not used
    assert (max(drift.kept()) >= 9.0) == (rate > 0.9)
    np.testing.assert_allclose(after.drift, [0.0, 0.0] if used or changed else drift.kept())
    assert after.drafts == (24 if changed else 25)
    kept = 1.0 if used else math.exp(-24 / 64)
    wanted = [0.0, 0.0] if changed else [64 + kept * 30, 64 + kept * 40]
    np.testing.assert_allclose(after.realised[0], wanted)


@pytest.mark.parametrize(("accepted", "predicted", "rows"), [(0.0, 0.0, 4), (3.0, 2.0, 0)])
def test_a_round_that_nothing_was_expected_of_teaches_nothing(accepted, predicted, rows):
    known = acceptance.unknown()
    assert acceptance.calibrate(known, accepted, predicted, rows) is known
    assert acceptance.calibrate(known, 1.0, 0.5, 1).realised[0].tolist() == [65.0, 64.5]


def test_a_policy_that_moved_leaves_a_share_of_all_that_is_counted():
    known = acceptance.calibrate(learned(drafted(np.random.default_rng(1), 40, 0.5)), 30.0, 40.0, 8)
    faded = acceptance.forget(known, 0.25)
    np.testing.assert_allclose(faded.seen, known.seen / 4)
    np.testing.assert_allclose(faded.hits, known.hits / 4)
    np.testing.assert_allclose(faded.realised[0], 64 + (known.realised[0] - 64) / 4)
    np.testing.assert_allclose(faded.realised[1:], known.realised[1:] / 4)
    assert not faded.drift.any()


def test_rates_are_found_by_rank_depth_and_class():
    rng = np.random.default_rng(1)
    high = [drafted(rng, 64, 0.8, 0.1, confidence=3) for _ in range(10)]
    low = [drafted(rng, 64, 0.2, 0.15, seen_prompt=True) for _ in range(10)]
    rates = learned(*high, *low, used=True).rates
    np.testing.assert_allclose(rates[0, 3, :4, :2], np.tile([0.8, 0.1], (4, 1)), atol=0.08)
    np.testing.assert_allclose(rates[1, 1, 0, :2], [0.2, 0.15], atol=0.06)


def test_a_cell_without_observations_leans_on_its_class_and_a_class_on_all():
    rng = np.random.default_rng(2)
    pieces = [drafted(rng, 200, 0.9, confidence=3), drafted(rng, 200, 0.3)]
    rates = learned(*pieces, used=True).rates
    assert rates[1, 3, 0, 0] == pytest.approx(0.9, abs=0.06)  # seen prompts, without observations
    assert 0.3 < rates[0, 2, 0, 0] < 0.9  # a class never seen


def test_a_depth_without_observations_leans_on_the_one_above():
    rng = np.random.default_rng(3)
    piece = drafted(rng, 300, 0.7)
    piece.offered[:, 3:] = 0
    rates = learned(piece, used=True).rates
    np.testing.assert_allclose(rates[0, 1, 3:, 0], rates[0, 1, 2, 0], rtol=0.1)


def test_nothing_known_is_the_prior():
    """At each of 8 depths, of 4 ranks, in each of 4 classes; of prompts that were seen or not."""
    known = acceptance.unknown()
    assert known.seen.shape == known.hits.shape == (3, 2, 4, 8, 4)
    wanted = np.broadcast_to([0.3, 0.09, 0.027, 0.0081], (2, 4, 8, 4))
    np.testing.assert_allclose(known.rates, wanted)


def test_ranks_fall_and_sum_to_less_than_one():
    rng = np.random.default_rng(4)
    for share in (0.0, 0.1, 0.5, 0.99):
        rates = learned(drafted(rng, 50, share, 1 - share), used=True).rates
        assert (np.diff(rates, axis=-1) <= 1e-12).all()
        assert (rates.sum(axis=-1) < 1).all() and (rates >= 0).all()


@pytest.mark.parametrize("rows", [1, 64])
def test_old_observations_fades_and_counts_are_bounded(rows):
    rng = np.random.default_rng(5)
    known = learned(
        *[drafted(rng, rows, 0.7) for _ in range(int(2 * ACCEPTANCE_SETTINGS.window) // rows)]
    )
    assert known.seen[0].max() == pytest.approx(ACCEPTANCE_SETTINGS.window)
    for _ in range(2000 // rows):
        known = acceptance.observe(known, drafted(rng, rows, 0.55))
    assert known.rates[0, 1, 0, 0] == pytest.approx(0.55, abs=0.06)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("before, after", [(0.7, 0.0), (0.05, 0.8)])
def test_after_a_sudden_change_the_new_rates_rule_within_twenty_rounds(rows, before, after):
    rng = np.random.default_rng(6)
    known = learned(*[drafted(rng, rows, before) for _ in range(600 // rows)])
    for _ in range(20):
        known = acceptance.observe(known, drafted(rng, rows, after))
    assert known.rates[0, 1, 0, 0] == pytest.approx(after, abs=0.2)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("before, after", [(0.7, 0.0), (0.05, 0.8)])
def test_what_was_seen_before_a_sudden_change_hardly_counts_after_it(rows, before, after):
    rng = np.random.default_rng(6)
    known = learned(*[drafted(rng, rows, before) for _ in range(600 // rows)])
    changed = False
    drafts = 0
    while not changed:
        drafts += rows
        known = acceptance.observe(known, drafted(rng, rows, after))
        changed = known.drafts < 500
    assert known.drafts <= drafts + 64  # of 600


def test_few_lucky_rounds_are_no_calibration():
    known = acceptance.calibrate(acceptance.unknown(), accepted=4.0, predicted=2.0, rows=4)
    assert 1.0 < acceptance.calibration(known) < 1.05


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.95])
def test_without_a_change_no_alarm_is_raised(rows, share):
    """An alarm would leave the few counts since; the long window stays full."""
    rng = np.random.default_rng(7)
    known = learned(*[drafted(rng, rows, share) for _ in range(1500 // rows)])
    for _ in range(1500 // rows):
        known = acceptance.observe(known, drafted(rng, rows, share))
        assert known.drafts > 0.9 * ACCEPTANCE_SETTINGS.window


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_own_rounds_raise_the_alarm_before_other_observations_comes(rows):
    known = learned(drafted(np.random.default_rng(8), 1000, 0.7))
    for _ in range(30):
        known = acceptance.calibrate(known, accepted=1.8 * rows, predicted=1.8 * rows, rows=rows)
    assert acceptance.calibration(known) == pytest.approx(1.0)
    for _ in range(12):
        known = acceptance.calibrate(known, accepted=0, predicted=1.8 * rows, rows=rows)
    assert acceptance.calibration(known) < 0.3


def test_calibration_follows_what_rounds_gave_and_is_bounded():
    known = acceptance.unknown()
    for _ in range(200):
        known = acceptance.calibrate(known, accepted=8.0, predicted=10.0, rows=8)
    assert acceptance.calibration(known) == pytest.approx(0.8, abs=0.01)
    for _ in range(200):
        known = acceptance.calibrate(known, accepted=40.0, predicted=10.0, rows=8)
    assert acceptance.calibration(known) == ACCEPTANCE_SETTINGS.calibration_bounds[1]


def test_a_calibration_loses_its_hold_once_the_drafter_is_only_scored():
    known = acceptance.unknown()
    for _ in range(50):
        known = acceptance.calibrate(known, accepted=1.0, predicted=10.0, rows=8)
    low = acceptance.calibration(known)
    for _ in range(20):
        known = acceptance.observe(known, drafted(np.random.default_rng(9), 64, 0.7))
    assert low < 0.2 and acceptance.calibration(known) > 0.9


def test_forgetting_makes_new_observations_weigh_more():
    rng = np.random.default_rng(10)
    old = drafted(rng, 400, 0.5)
    new = drafted(rng, 50, 0.6)
    faded = acceptance.forget(learned(old, used=True), 0.1)
    assert faded.drafts == pytest.approx(40)
    kept = [
        acceptance.observe(known, new, True).rates[0, 1, 0, 0]
        for known in (learned(old, used=True), faded)
    ]
    assert abs(kept[1] - 0.6) < abs(kept[0] - 0.6)


def test_pooled_rates_weigh_cells_by_their_drafts():
    rng = np.random.default_rng(11)
    known = learned(*[drafted(rng, 300, 0.9, confidence=3), drafted(rng, 100, 0.1)], used=True)
    assert acceptance.pooled_rates(known)[0, 0] == pytest.approx(0.7, abs=0.05)


def test_rates_that_fall_with_the_position_are_foretold_at_each():
    """Drafts of early tokens are right at 0.8, of late ones at 0.4, as many of each.

    Deep drafts are mostly of early ones, so the rates of depths lean to these: the factors of bands
    take away half of the error at least, not all of it.
    """
    rng = np.random.default_rng(0)
    truth = {1: 0.8, 5: 0.4}
    both = [drafted(rng, 40, rate, band=at) for _ in range(20) for at, rate in truth.items()]
    known = learned(*both, used=True)
    choices = candidates.build([tree.PLAIN, tree.parse("lookup-chain-4")], 4)
    expectations = predict.expect(choices, {"lookup": known})

    def foretold(*bands: int) -> float:
        """Drafts accepted of a row, as likely in each of these bands."""
        at = np.bincount(bands, minlength=BANDS) if bands else np.zeros(BANDS)
        situation = predict.Situation(1, 1, 0.0, 0, {}, lambda strategy: True, bands=at)
        return float(predict.tokens_of_rows(choices, expectations, situation)[1, 1]) - 1

    for at, rate in truth.items():
        right = sum(rate**k for k in range(1, 5))
        assert abs(foretold(at) - right) < 0.5 * abs(foretold() - right), (foretold(at), right)
    assert foretold(0) == foretold()
    assert foretold(1, 5) == pytest.approx((foretold(1) + foretold(5)) / 2)
    forgotten = acceptance.forget(known, 0.0)
    np.testing.assert_array_equal(forgotten.of_bands, 1.0)
    earlier = acceptance.state(known)
    del earlier["by_band"]  # of a checkpoint from before there were bands
    np.testing.assert_array_equal(acceptance.restore(earlier).of_bands, 1.0)


def test_tokens_ahead_are_counted_by_band():
    found = acceptance.bands_ahead(np.array([0.0, 100.0, 5000.0]), np.array([100.0, 300.0, 5001.0]))
    np.testing.assert_array_equal(found, [64, 64, 128, 44, 0, 0, 0, 1])
    np.testing.assert_array_equal(acceptance.bands(np.array([0, 63, 64, 9999])), [0, 0, 1, 7])


def test_a_saved_acceptance_is_restored_whole():
    known = acceptance.calibrate(learned(drafted(np.random.default_rng(12), 30, 0.5)), 3.0, 4.0, 2)
    again = acceptance.restore(acceptance.state(known))
    for name, value in acceptance.state(known).items():
        np.testing.assert_array_equal(getattr(again, name), value)
