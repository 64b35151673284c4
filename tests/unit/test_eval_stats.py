"""The statistics against published values, other implementations, enumeration and simulation."""

import itertools
from dataclasses import replace
from math import comb

import numpy as np
import pytest
import scipy.stats

from eval import power, samples, stats
from eval.record import Record
from eval.score import summarize
from kit.core.errors import BadInput


def test_the_interval_over_runs_is_students_t():
    values = [0.25, 0.35, 0.5]
    expected = scipy.stats.t.interval(0.95, 2, loc=np.mean(values), scale=scipy.stats.sem(values))
    assert stats.runs_interval(values) == pytest.approx(expected)
    with pytest.raises(BadInput, match="at least two, there are 1"):
        stats.runs_interval([0.3])


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (20, 20, 0.8389, 1.0000),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_values_newcombe_printed(successes, total, low, high):
    assert stats.wilson(successes, total) == pytest.approx((low, high), abs=5e-5)
    scipys = scipy.stats.binomtest(successes, total).proportion_ci(method="wilson")
    assert stats.wilson(successes, total) == pytest.approx(tuple(scipys), abs=1e-9)
    shares = np.repeat([1.0, 0.0], [successes, total - successes])
    assert stats.cluster_interval(shares, total) == stats.wilson(successes, total)


def test_what_has_no_problems_or_others_is_refused():
    for call in (lambda: stats.wilson(0, 0), lambda: stats.cluster_interval([], 0)):
        with pytest.raises(BadInput, match="at least one"):
            call()
    with pytest.raises(BadInput, match="3 and 2"):
        stats.paired_difference([1, 0, 1], [1, 0], 100, 0)
    with pytest.raises(BadInput, match="n >= 1"):
        power.minimum_detectable_effect(0, 0.2)
    for effect in (0.0, -0.1, 1.1):
        with pytest.raises(BadInput, match="an effect above 0"):
            power.problems_needed(effect, 0.2)


def test_completions_that_agree_within_their_problem_count_once():
    shares = np.repeat([1.0, 0.0], [30, 20])
    low, high = stats.cluster_interval(shares, 50 * 8)
    assert (low, high) == pytest.approx(stats.wilson(30, 50), abs=0.01)
    assert high - low > 2.5 * np.subtract(*stats.wilson(240, 400)[::-1])  # what counting 400 completions would say
    assert stats.cluster_interval(np.ones(20), 20 * 8)[0] == pytest.approx(stats.wilson(20, 20)[0], abs=0.03)
    assert stats.cluster_interval(np.zeros(20), 20 * 8)[1] > 0.15


def test_completions_that_vary_within_their_problem_narrow_the_interval_at_most_to_independent_ones():
    widths = [np.subtract(*stats.cluster_interval(np.full(100, 0.5), 100 * k)[::-1]) for k in (1, 4, 16)]
    assert widths == sorted(widths, reverse=True)
    assert widths[2] == pytest.approx(np.subtract(*stats.wilson(800, 1600)[::-1]), rel=0.02)


def test_cluster_interval_agrees_with_the_cluster_bootstrap_and_the_sandwich_where_those_hold():
    rng = np.random.default_rng(2)
    shares = rng.binomial(8, rng.beta(2, 2, 400)) / 8
    found = stats.cluster_interval(shares, 400 * 8)
    drawn = scipy.stats.bootstrap((shares,), np.mean, method="percentile", rng=rng, n_resamples=4000)
    assert found == pytest.approx(tuple(drawn.confidence_interval), abs=0.003)
    half = 1.96 * shares.std(ddof=1) / 20  # Liang and Zeger's, with the problems as clusters
    assert found == pytest.approx((shares.mean() - half, shares.mean() + half), abs=0.003)


@pytest.mark.parametrize(
    ("n", "k", "shape"), [(20, 4, (2, 2)), (20, 4, (5, 0.5)), (50, 8, (0.2, 4)), (300, 4, (2, 2))]
)
def test_cluster_interval_covers_the_truth_as_often_as_it_says_where_the_bootstrap_may_not(n, k, shape):
    rng, truth, hits = np.random.default_rng(5), shape[0] / sum(shape), 0
    for _ in range(1500):
        low, high = stats.cluster_interval(rng.binomial(k, rng.beta(*shape, n)) / k, n * k)
        hits += low <= truth <= high
    assert 0.92 <= hits / 1500 <= 0.975


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
    assert stats.discordant([0.75, 0.5, 0.25], [0.5, 0.5, 1.0]) == (1, 1)


@pytest.mark.parametrize("seed", range(8))
def test_sign_flip_is_the_share_of_all_signs_as_far_from_zero(seed):
    rng = np.random.default_rng(seed)
    k = [1, 4, 8, 6][seed % 4]
    differences = rng.integers(-k, k + 1, rng.integers(3, 11)) / k
    signs = np.array(list(itertools.product([1, -1], repeat=len(differences))))
    expected = (np.abs(signs @ differences) >= abs(differences.sum()) - 1e-12).mean()
    assert stats.sign_flip(differences) == pytest.approx(expected, abs=1e-12)


def test_sign_flip_is_scipys_permutation_test_and_mcnemars_for_one_completion():
    rng = np.random.default_rng(4)
    differences = (rng.binomial(4, 0.6, 12) - rng.binomial(4, 0.4, 12)) / 4
    other = scipy.stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=2**13)
    assert stats.sign_flip(differences) == pytest.approx(other.pvalue, abs=1e-12)
    for gained, lost in [(0, 0), (6, 0), (2, 8), (40, 15), (200, 180)]:
        single = np.repeat([1.0, -1.0, 0.0], [gained, lost, 50])
        assert stats.sign_flip(single) == pytest.approx(stats.mcnemar(gained, lost), abs=1e-12)


def test_sign_flip_draws_signs_where_differences_have_no_common_step():
    rng = np.random.default_rng(0)
    exact = rng.integers(-4, 6, 60) / 8
    uneven = exact * np.pi / 4
    assert stats._on_grid(exact) is not None and stats._on_grid(uneven) is None
    assert stats.sign_flip(uneven, seed=1) == pytest.approx(stats.sign_flip(exact), abs=0.012)  # scale-free
    assert stats.sign_flip(uneven, seed=1) == stats.sign_flip(uneven, seed=1) != stats.sign_flip(uneven, seed=2)
    assert stats.sign_flip(uneven + 3) == 1 / 20_001  # never zero


@pytest.mark.parametrize(("n", "k"), [(20, 4), (100, 4), (300, 1)])
def test_sign_flip_rejects_no_effect_at_most_as_often_as_it_says_and_finds_the_detectable_one(n, k):
    rng, rejected, found, disagreement, studies = np.random.default_rng(n + k), 0, 0, [], 600
    chance = rng.beta(1, 1, (studies, n)) * 0.8
    for row in chance:
        differences = (rng.binomial(k, row) - rng.binomial(k, row)) / k
        rejected += stats.sign_flip(differences) <= 0.05
        disagreement.append(np.square(differences).mean())
    assert rejected / studies <= 0.05 + 2.5 * np.sqrt(0.05 * 0.95 / studies)
    assert rejected / studies >= 0.02
    effect, spread = 0.0, float(np.mean(disagreement))
    for _ in range(9):  # the disagreement that is meant holds the effect
        effect = power.minimum_detectable_effect(n, spread + effect**2, samples=k)
    for row in chance:
        raised = np.clip(row + effect, 0, 1)
        found += stats.sign_flip((rng.binomial(k, raised) - rng.binomial(k, row)) / k) <= 0.05
    assert 0.7 < found / studies < 0.9


def test_holm_is_the_step_down_procedure():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # statsmodels' example
    assert stats.holm([0.3]) == [0.3] and stats.holm([]) == [] and stats.holm([0.9, 0.8]) == [1.0, 1.0]
    for p_values in np.random.default_rng(0).random((50, 5)) ** 3:
        adjusted = stats.holm(list(p_values))
        for alpha in (0.01, 0.05, 0.2):
            rejected = set()
            for rank, place in enumerate(np.argsort(p_values)):  # reject while p <= alpha/(m - rank)
                if p_values[place] > alpha / (5 - rank):
                    break
                rejected.add(int(place))
            assert {place for place, value in enumerate(adjusted) if value <= alpha} == rejected


@pytest.mark.parametrize(("n", "k"), [(20, 4), (50, 4), (50, 8), (300, 4)])
def test_bootstrap_interval_over_several_completions_covers_the_truth(n, k):
    rng, hits, trials = np.random.default_rng(n * k), 0, 500
    for trial in range(trials):
        before = rng.beta(2, 2, n) * 0.9
        raised = rng.random(n) < 0.5
        differences = rng.binomial(k, before + 0.1 * raised) / k - rng.binomial(k, before) / k
        low, high = stats.bootstrap_mean(differences, 800, trial)
        hits += low <= 0.05 <= high
    assert 0.92 <= hits / trials <= 0.98


def test_the_pseudo_problems_are_as_large_as_the_changes_seen():
    assert stats.pseudo_change(np.array([1.0, -1.0, 0.0, 1.0])) == stats.pseudo_change(np.zeros(9)) == 1.0
    assert stats.pseudo_change(np.full(100, 0.25)) == pytest.approx((100 / 16 + 1) / 26)
    assert stats.pseudo_change(np.array([2.0, -2.0])) == 1.0  # differences of differences are not made larger


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


def test_bootstrap_repeats_with_its_seed_and_a_difference_is_after_minus_before():
    assert stats.paired_difference([1, 1, 0, 1], [0, 0, 0, 1], 500, 0)["difference"] == 0.5
    values = np.repeat([1.0, -1.0, 0.0], [30, 11, 60])
    first, again, other = (stats.bootstrap_mean(values, 500, seed) for seed in (0, 0, 1))
    assert first == again != other


def test_minimum_detectable_effect_is_connors_formula():
    assert power.problems_needed(0.04, 0.21) == pytest.approx(1030, abs=20)
    assert power.minimum_detectable_effect(300, 0.0) == power.minimum_detectable_effect(300, 0.01)
    assert power.minimum_detectable_effect(300, 0.0) == pytest.approx(7.85 / 300, rel=0.02)
    assert power.minimum_detectable_effect(300, 0.0, samples=4) < power.minimum_detectable_effect(300, 0.0) / 3
    assert power.minimum_detectable_effect(1, 0.5) == 1.0
    za, zb, q, n = 1.959964, 0.841621, 0.2, 400
    effect = power.minimum_detectable_effect(n, q)
    assert n == pytest.approx((za * q**0.5 + zb * (q - effect**2) ** 0.5) ** 2 / effect**2, rel=1e-5)
    # With as many completions as one likes it is the test of a mean (Miller 2024, equation 9).
    effect = power.minimum_detectable_effect(n, 0.02, samples=1000)
    assert n == pytest.approx(0.02 * (za + zb) ** 2 / effect**2, rel=0.02)


@pytest.mark.parametrize(("effect", "q", "k"), [(0.04, 0.21, 1), (0.01, 0.0, 1), (0.1, 0.05, 4), (0.02, 0.05, 8)])
def test_problems_needed_inverts_the_minimum_detectable_effect(effect, q, k):
    n = power.problems_needed(effect, q, samples=k)
    assert power.minimum_detectable_effect(n, q, samples=k) <= effect * (1 + 1e-9)
    assert power.minimum_detectable_effect(n - 1, q, samples=k) > effect
    assert power.problems_needed(effect, q, alpha=0.01, samples=k) > n


def test_the_disagreement_seen_counts_the_pseudo_problems_of_the_interval():
    assert power.seen_disagreement(np.zeros(298)) == pytest.approx(2 / 300)
    assert power.seen_disagreement(np.repeat([1.0, -1.0, 0.0], [40, 20, 238])) == pytest.approx(62 / 300)
    assert power.seen_disagreement(np.repeat([0.25, 0.0], [100, 98])) == pytest.approx(
        (6.25 + 2 * (7.25 / 26) ** 2) / 200
    )


def test_the_disagreement_of_more_completions_is_foreseen_from_few():
    rng, n = np.random.default_rng(0), 4000
    before, after = rng.beta(1, 1, n), rng.beta(1, 1, n)

    def draw(chance: np.ndarray, k: int) -> np.ndarray:
        return (rng.random((n, k)) < chance[:, None]).astype(float)

    between, within = power.split_disagreement(draw(after, 3), draw(before, 3))
    assert between == pytest.approx(np.square(after - before).mean(), abs=0.012)
    assert within == pytest.approx((after * (1 - after) + before * (1 - before)).mean(), abs=0.012)
    for k in (1, 16):
        seen = np.square(draw(after, k).mean(axis=1) - draw(before, k).mean(axis=1)).mean()
        assert between + within / k == pytest.approx(seen, abs=0.015)
    half = draw(after, 2)
    half[:, 1] = np.nan
    assert power.split_disagreement(half, draw(before, 2)) is None


@pytest.mark.parametrize(("total", "right", "k"), [(5, 2, 1), (5, 2, 3), (5, 2, 4), (8, 0, 4), (8, 8, 1), (6, 1, 6)])
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_right_one(total, right, k):
    draws = list(itertools.combinations([True] * right + [False] * (total - right), k))
    assert samples.pass_at_k(right, total, k) == pytest.approx(sum(map(any, draws)) / comb(total, k))


def test_pass_at_k_needs_k_completions():
    for right, total, k in [(1, 3, 4), (4, 3, 1), (-1, 3, 1), (0, 3, 0)]:
        with pytest.raises(BadInput, match=f"pass@{k} needs"):
            samples.pass_at_k(right, total, k)
    assert [samples.powers(k) for k in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def votes(*answers: str | None, gold: str = "7", undecided: str = "u") -> list[Record]:
    """The completions of one problem, by their answers."""
    numbers = {"7": True, "7.0": True, "14/2": True, undecided: None}
    return [
        Record("p", "", 1, True, False, a is not None, a, gold, numbers.get(a, False), False, False, place)
        for place, a in enumerate(answers)
    ]


@pytest.mark.parametrize(
    ("answers", "share"),
    [
        (("7", "7", "8", "9"), 1.0),
        (("8", "8", "7", "9"), 0.0),
        (("7", "7.0", "14/2", "8"), 1.0),  # one answer in three forms outvotes
        (("8", "8.0", "16/2", "7"), 0.0),
        (("8", "7", "8.0", "7"), 0.5),  # a tie is split, whatever its order
        (("7", "8", "7", "8"), 0.5),
        (("7", "8", "9"), 1 / 3),
        ((None, None, "7"), 1.0),  # what has no answer does not vote
        ((None, None, None), 0.0),
        (("u", "u", "7"), float("nan")),  # what wins was not decided
        (("u", "7", "7"), 1.0),
        (("7",), 1.0),
    ],
)
def test_the_majority_of_equal_answers_is_what_counts(answers, share):
    assert samples.majority_scores(votes(*answers)) == pytest.approx([share], nan_ok=True)


def test_a_long_answer_is_compared_as_text():
    program = "def f(x):\n    return 2 * x\n" * 20
    assert not samples._same(program, program + " ") and samples._same(program, program)


def test_a_cell_of_several_completions_is_summarized_by_problem():
    right = [[True, True, True, False], [False, False, False, False], [None, True, False, None]]
    records = [
        replace(one, problem_id=f"p{place}", correct=verdict, correct_strict=verdict)
        for place, row in enumerate(right)
        for one, verdict in zip(votes("7", "7", "7", "8"), row, strict=True)
    ]
    cell = summarize(records)
    assert (cell["n"], cell["samples"], cell["correct"], cell["undecided"]) == (3, 4, 4, 2)
    assert cell["accuracy"] == pytest.approx((0.75 + 0 + 0.5) / 3)
    assert cell["interval"] == list(stats.cluster_interval([0.75, 0, 0.5], 10)) != [*stats.wilson(1.25, 3)]
    assert cell["undecided_rate"] == 2 / 12 and cell["parse_rate"] == 1.0 and cell["max_token_hit_rate"] == 0.0
    assert cell["pass_at_k"]["1"]["value"] == pytest.approx(cell["accuracy"])
    assert cell["pass_at_k"]["2"]["value"] == pytest.approx((1 + 0 + 1) / 3)
    assert (cell["pass_at_k"]["4"]["value"], cell["pass_at_k"]["4"]["n"]) == (0.5, 2)
    assert set(cell["maj_at_k"]) == {"4"} and cell["maj_at_k"]["4"]["n"] == 3
    single = summarize(records[::4])
    assert "pass_at_k" not in single and single["samples"] == 1 and single["interval"] == list(stats.wilson(1, 2))


@pytest.mark.parametrize(
    ("order", "message"),
    [([0, 1, 3], "completion 3 of problem p is out of place"), ([1], "out of place"), ([0, 1, 0], "others 2")],
)
def test_records_out_of_order_are_refused(order, message):
    with pytest.raises(BadInput, match=message):
        samples.by_problem([replace(votes("7")[0], sample=place) for place in order])


def test_pass_at_all_completions_has_one_independent_draw_a_problem():
    fine = Record("", "", 1, True, False, True, "1", "1", True, True, False)
    right = [[True] * 8] * 12 + [[False] * 8] * 8
    records = [
        replace(fine, problem_id=str(place), sample=number, correct=verdict)
        for place, verdicts in enumerate(right)
        for number, verdict in enumerate(verdicts)
    ]
    found = summarize(records)
    assert found["pass_at_k"]["8"]["interval"] == pytest.approx(list(stats.wilson(12, 20)))
    assert found["maj_at_k"]["8"]["interval"] == pytest.approx(list(stats.wilson(12, 20)))


def test_a_cell_of_few_problems_is_widened_by_students_t():
    shares = np.array([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])  # completions agree: 6 effective ones
    t, z = scipy.stats.t.ppf(0.975, 5), scipy.stats.norm.ppf(0.975)
    effective = 6 * (z / t) ** 2
    assert stats.cluster_interval(shares, 48) == pytest.approx(stats.wilson(effective / 2, effective))
