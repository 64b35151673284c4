"""The statistics against published values and against simulation."""

import numpy as np
import pytest

from eval import power, stats
from recipes.parts.errors import BadInput


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_values_newcombe_printed(successes, total, low, high):
    assert stats.wilson(successes, total) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_wilson_of_no_problems_is_bad_input():
    with pytest.raises(BadInput, match="at least one"):
        stats.wilson(0, 0)


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [
        (0, 0, 1.0),
        (5, 0, 2 / 2**5),
        (6, 0, 2 / 2**6),
        (2, 8, 2 * (1 + 10 + 45) / 2**10),
        (12, 2, 0.0129),  # Armitage and Berry 1994, p. 127, as computed by StatsDirect
        (2, 12, 0.0129),
    ],
)
def test_mcnemar_is_the_exact_binomial_test(gained, lost, p):
    assert stats.mcnemar(gained, lost) == pytest.approx(p, rel=5e-3)


def test_discordant_counts_each_direction_once():
    assert stats.discordant([1, 1, 0, 0, 1], [0, 1, 1, 0, 0]) == (2, 1)


def test_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(7)
    for n, gain, loss in [(300, 0.15, 0.05), (300, 0.02, 0.0), (50, 0.05, 0.02), (50, 0.3, 0.1)]:
        hits, trials = 0, 600
        for trial in range(trials):
            gained, lost, same = rng.multinomial(n, [gain, loss, 1 - gain - loss])
            low, high = stats.bootstrap_mean(np.repeat([1.0, -1.0, 0.0], [gained, lost, same]), 800, trial)
            hits += low <= gain - loss <= high
        assert hits / trials > 0.92, (n, gain, loss, hits / trials)
        assert n < 100 or hits / trials < 0.98, (n, gain, loss, hits / trials)


def test_bootstrap_agrees_with_resampling_problems_one_by_one():
    change = np.repeat([1.0, -1.0, 0.0], [40, 15, 245])
    padded = np.append(change, [1.0, -1.0])
    rng = np.random.default_rng(0)
    means = rng.choice(padded, size=(10_000, len(padded))).mean(axis=1)
    expected = np.quantile(means, [0.025, 0.975])
    assert stats.bootstrap_mean(change, 10_000, 1) == pytest.approx(tuple(expected), abs=0.004)


def test_no_disagreement_is_not_an_interval_of_width_zero():
    low, high = stats.bootstrap_mean(np.zeros(300), 10_000, 0)
    assert low < 0 < high
    assert 0.005 < high < 0.015  # the rule of three says 3/300


def test_bootstrap_repeats_with_its_seed_and_moves_with_another():
    values = np.repeat([1.0, -1.0, 0.0], [30, 11, 60])
    first, again, other = (stats.bootstrap_mean(values, 500, seed) for seed in (0, 0, 1))
    assert first == again != other


def test_paired_difference_refuses_lists_of_different_problems():
    with pytest.raises(BadInput, match="3 and 2"):
        stats.paired_difference([1, 0, 1], [1, 0], 100, 0)


def test_pairing_narrows_the_interval_when_the_two_agree_on_most_problems():
    before = np.repeat([1, 0], [150, 150])
    after = np.repeat([1, 0], [160, 140])
    low, high = stats.paired_difference(after, before, 5_000, 0)["interval"]
    unpaired = 2 * 1.96 * np.sqrt(0.25 * 2 / 300)
    assert high - low < 0.4 * unpaired


def test_gain_survival_is_the_difference_of_the_two_gains():
    base, grpo = np.array([0, 0, 1, 0]), np.array([1, 0, 1, 0])
    base_bf16, grpo_bf16 = np.array([0, 0, 0, 0]), np.array([1, 1, 1, 0])
    result = stats.gain_survival(base, grpo, base_bf16, grpo_bf16, 1_000, 0)
    assert result["difference"] == pytest.approx(0.25 - 0.75)
    assert result["interval"][0] < -0.5 < result["interval"][1]


def test_a_policy_with_the_minimum_detectable_effect_is_detected_four_times_in_five():
    n, rate = 400, 0.2
    effect = power.minimum_detectable_effect(n, rate)
    rng = np.random.default_rng(3)
    gained, lost = (rate + effect) / 2, (rate - effect) / 2
    draws = rng.multinomial(n, [gained, lost, 1 - rate], size=4_000)
    z = (draws[:, 0] - draws[:, 1]) / np.sqrt(np.maximum(draws[:, 0] + draws[:, 1], 1))  # McNemar's test statistic
    assert (np.abs(z) > 1.96).mean() == pytest.approx(0.8, abs=0.02)


def test_minimum_detectable_effect_needs_that_much_disagreement():
    assert power.minimum_detectable_effect(300, 0.0) == pytest.approx(7.85 / 300, rel=0.02)
    assert power.minimum_detectable_effect(300, 0.0) == stats.minimum_detectable_effect(300, 0.01)
    assert power.minimum_detectable_effect(1, 0.5) == 1.0
    with pytest.raises(BadInput, match="n >= 1"):
        power.minimum_detectable_effect(0, 0.2)
