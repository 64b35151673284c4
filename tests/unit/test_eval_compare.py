"""Comparisons and the sentences drawn from them, on records whose truth is known."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from eval import compare, stats
from eval.compare import GAIN, LARGER, LOSS, NO_GAIN, NOT_SHOWN, PARTLY_LOST, REFUSED, SURVIVES
from eval.hygiene import Limits, limits_of, well_formed
from eval.record import Record
from kit.core.config.load import config_from_dict
from kit.core.errors import BadInput, CheckFailed

FINE = Record("", "", 1, True, False, True, "1", "1", True, True, False)


def cell(*problems: Sequence[bool | None]) -> list[Record]:
    """Records of `problems`, each the verdicts on its completions; a right answer is 1, a wrong one 2."""
    return [
        replace(FINE, problem_id=str(place), sample=number, correct=right, answer="1" if right else "2")
        for place, verdicts in enumerate(problems)
        for number, right in enumerate(verdicts)
    ]


def several(right: int, wrong: int, k: int = 1) -> list[Record]:
    """`right` problems answered right in all `k` completions, then `wrong` in none."""
    return cell(*[[True] * k] * right, *[[False] * k] * wrong)


def paired(both: int, gained: int, lost: int, neither: int) -> tuple[list[Record], list[Record]]:
    """(base, GRPO) with so many problems right in both, only in GRPO, only in the base, and in neither."""
    base = [[True]] * both + [[False]] * gained + [[True]] * lost + [[False]] * neither
    grpo = [[True]] * (both + gained) + [[False]] * (lost + neither)
    return cell(*base), cell(*grpo)


def spoilt(records: list[Record], share: float, **fields: object) -> list[Record]:
    """The first `share` of the records with other fields."""
    count = round(share * len(records))
    return [replace(one, **fields) for one in records[:count]] + records[count:]


def changed(records: list[Record], lost: int, won: int = 0) -> list[Record]:
    """Wrong in the first `lost` problems that were right, right in the first `won` that were wrong."""
    found = list(records)
    for count, before in ((lost, True), (won, False)):
        for place in [place for place, one in enumerate(records) if one.correct is before][:count]:
            found[place] = replace(found[place], correct=not before)
    return found


def repeated(records: list[Record], times: int) -> list[Record]:
    return [replace(one, problem_id=f"{one.problem_id}-{turn}") for turn in range(times) for one in records]


def judged(formats: dict, trained: str = "GRPO", samples: int = 2000, **options: object) -> tuple[dict, str]:
    """The comparison of {format: (base, GRPO)} and its conclusion."""
    names = list(formats)
    records = {(policy, name): formats[name][side] for name in names for side, policy in enumerate(("base", "grpo"))}
    found = compare.compare(records, names, names[0], samples, **options)
    return found, compare.conclude(found, names, trained)


def verdicts(cells: dict, **options: object) -> tuple[str, str | None]:
    """(verdict on the gain in fp8, on its survival there)."""
    found = judged(cells, **options)[0]
    return found["gain"]["fp8"]["verdict"], found["gain_survival"].get("fp8", {}).get("verdict")


SHOWN = paired(100, 80, 5, 115)  # +25 points on 300 problems
UNCLEAR = paired(50, 13, 9, 28)  # +4 points on 100
CLAIMS = ("points more", "points fewer", "The gain survives")


@pytest.mark.parametrize(
    ("cells", "verdict", "says"),
    [
        (SHOWN, GAIN, ["In bf16, GRPO answers 25.0 points more of the 300 held-out problems"]),
        (SHOWN[::-1], LOSS, ["25.0 points fewer of the 300", "McNemar p = "]),
        (UNCLEAR, NOT_SHOWN, ["No evidence of a gain in bf16", "n = 100", "+4.0 points", "would detect 4.0 points"]),
        (UNCLEAR[::-1], NOT_SHOWN, ["No evidence of a gain or a loss in bf16 at n = 100 problems: -4.0 points"]),
        ((several(10, 10, 4), several(10, 10, 4)), NOT_SHOWN, ["n = 20", "+0.0", "p = 1)"]),
        ((several(0, 20, 4), several(0, 20, 4)), NOT_SHOWN, ["No evidence of a gain"]),
        ((several(20, 0, 4), several(20, 0, 4)), NOT_SHOWN, ["No evidence of a gain"]),
        (
            (cell(*[[True, False, False, False]] * 20), several(20, 0, 4)),
            GAIN,
            ["75.0 points more of the 20", "pass@4 in bf16: 100.0 % base, 100.0 % GRPO"],
        ),
        # Six problems of one completion each that all changed one way: p = 0.031.
        (paired(7, 6, 0, 7), GAIN, ["p = 0.0312"]),
        (paired(7, 5, 0, 8), NOT_SHOWN, ["p = 0.0625"]),
    ],
)
def test_a_gain_is_said_where_interval_and_test_show_it_and_nowhere_else(cells, verdict, says):
    found, text = judged({"bf16": cells})
    assert found["gain"]["bf16"]["verdict"] == verdict, text
    assert all(part in text for part in says), text
    claim = {GAIN: CLAIMS[0], LOSS: CLAIMS[1], NOT_SHOWN: "No evidence"}[verdict]
    assert [part for part in (*CLAIMS, "No evidence") if part in text] == [claim], text


def test_a_distilled_policy_is_named_in_the_conclusion():
    text = judged({"bf16": SHOWN}, "distilled")[1]
    assert "In bf16, the distilled policy answers" in text and "GRPO" not in text


def test_the_problems_said_to_be_needed_would_detect_the_effect_four_times_in_five():
    found, text = judged({"bf16": UNCLEAR})
    gain = found["gain"]["bf16"]
    needed, q = gain["needed_problems"], gain["disagreement"]
    said = int(re.search(r"About ([\d,]+) problems", text)[1].replace(",", ""))
    assert said == pytest.approx(needed["problems"], rel=0.01) and needed["effect"] == pytest.approx(0.04)
    assert f"; 100 detect {100 * gain['minimum_detectable_effect']:.1f}." in text
    rng = np.random.default_rng(0)
    draws = rng.multinomial(needed["problems"], [(q + 0.04) / 2, (q - 0.04) / 2, 1 - q], size=4000)
    z = (draws[:, 0] - draws[:, 1]) / np.sqrt(draws[:, 0] + draws[:, 1])
    assert (z > 1.96).mean() == pytest.approx(0.8, abs=0.025)


@pytest.mark.parametrize(
    ("side", "fields", "share", "figures"),
    [
        ("grpo", {"parsed": False}, 0.2, ["80.0 %", "at least 90 %"]),
        ("grpo", {"prompt_leak": True}, 0.02, ["2.0 %", "at most 1 %"]),
        ("grpo", {"ended": False}, 0.5, ["50.0 %", "at least 90 %"]),
        ("grpo", {"hit_max_tokens": True}, 0.2, ["20.0 %", "at most 10 %"]),
        ("grpo", {"correct": None}, 0.1, ["10.0 %", "at most 2 %"]),
        ("base", {"correct": None}, 0.1, ["10.0 %", "at most 2 %"]),
    ],
)
def test_a_cell_out_of_range_refuses_what_would_be_concluded_from_it_and_nothing_else(side, fields, share, figures):
    base, grpo = SHOWN
    spoil = {"base": (spoilt(base, share, **fields), grpo), "grpo": (base, spoilt(grpo, share, **fields))}[side]
    cells = {"bf16": SHOWN, "fp8": spoil, "w4a16": SHOWN}
    found, text = judged(cells)
    assert verdicts(cells) == (REFUSED, REFUSED)
    refusal = next(line for line in text.splitlines() if f"No conclusion on the gain in fp8: {side} in fp8" in line)
    assert all(figure in refusal for figure in figures), refusal
    assert "The gain survives w4a16" in text and "In fp8, GRPO" not in text and "survives fp8" not in text
    assert found["hygiene"]["refused"]["gain"].keys() == {"fp8"}
    cells = {"bf16": spoil, "fp8": SHOWN}
    assert verdicts(cells) == (GAIN, REFUSED) and "survives" not in judged(cells)[1]


def test_limits_of_hygiene_come_from_the_configuration():
    base, grpo = SHOWN
    cut = {"fp8": (base, spoilt(grpo, 0.2, hit_max_tokens=True))}
    assert verdicts(cut, limits=Limits(max_token_hit_rate=0.2))[0] == GAIN
    assert verdicts(cut, limits=Limits(max_token_hit_rate=0.19))[0] == REFUSED


def test_a_gain_over_a_base_that_was_cut_off_is_said_to_be_one_in_stopping():
    grpo = several(200, 100)
    # Where the base stopped it is as good as GRPO; where it was cut, it was wrong.
    cut = [
        replace(one, correct=False, ended=False, hit_max_tokens=True, parsed=False) if place % 2 else one
        for place, one in enumerate(grpo)
    ]
    found, text = judged({"bf16": (cut, grpo)})
    gain = found["gain"]["bf16"]
    form = gain["base_form"]
    assert gain["verdict"] == GAIN and (form["share"], form["elsewhere"]["difference"]) == (0.5, 0.0)
    assert form["gain_there"] == pytest.approx(100 / 300) == pytest.approx(gain["difference"])
    caution = next(line for line in text.splitlines() if line.startswith("Caution: the bf16 base"))
    for part in ("at least 90 %", "at most 10 %", "+33.3 points", "the others +0.0", "no gain beyond form is shown"):
        assert part in caution, caution


def test_the_parts_of_a_gain_add_up_and_a_gain_elsewhere_is_not_denied():
    base = cell(*[[True, False, False, None], [False, False, False, False]] * 40)
    base = [replace(one, parsed=False) if one.sample == 1 else one for one in base]
    grpo = cell(*[[True, True, False, True], [True, False, True, True]] * 40)
    found, text = judged({"bf16": (base, grpo)}, limits=Limits(max_undecided=0.2))
    form, gain = found["gain"]["bf16"]["base_form"], found["gain"]["bf16"]
    # By hand, a pair of problems: there (.75 - 0)/3 and (.75 - 0)/4; elsewhere (.75 - 1 + .75)/3 and 3 · .75/4.
    assert form["gain_there"] == pytest.approx((0.25 + 0.1875) / 2)
    assert form["elsewhere"]["difference"] == pytest.approx((0.5 / 3 + 0.5625) / 2)
    assert form["gain_there"] + form["elsewhere"]["difference"] == pytest.approx(gain["difference"])
    assert form["share"] == 0.25 and "no gain beyond" not in text and "Caution: the bf16 base" in text


@pytest.mark.parametrize(
    ("bf16", "lost", "won", "verdict", "says"),
    [
        (SHOWN, 0, 0, SURVIVES, ["survives fp8 to within 5 points", "+0.0 points"]),
        (SHOWN, 6, 5, SURVIVES, ["survives fp8 to within 5 points", "-0.3 points"]),
        (SHOWN, 30, 28, NOT_SHOWN, ["survives fp8 is not shown either way"]),
        (SHOWN, 30, 0, PARTLY_LOST, ["Part of the gain is lost in fp8", "-10.0 points"]),
        (SHOWN, 7, 0, PARTLY_LOST, ["Part of the gain is lost in fp8", "no more than 5 points are lost"]),
        (SHOWN, 75, 0, PARTLY_LOST, ["Part of the gain is lost in fp8", "no gain over the base is shown in fp8"]),
        (SHOWN, 0, 40, LARGER, ["larger in fp8 than in bf16: by +13.3 points"]),
        (UNCLEAR, 0, 0, NO_GAIN, ["No gain is shown in bf16"]),
        (SHOWN[::-1], 0, 0, NO_GAIN, ["No gain is shown in bf16"]),
        (paired(4, 12, 0, 4), 0, 0, NOT_SHOWN, ["not shown either way", "can be more than 5 points"]),
    ],
)
def test_a_gain_survives_only_above_the_margin(bf16, lost, won, verdict, says):
    found, text = judged({"bf16": bf16, "fp8": (bf16[0], changed(bf16[1], lost, won))})
    survival = found["gain_survival"]["fp8"]
    assert survival["verdict"] == verdict and all(part in text for part in says), text
    assert survival["difference"] == pytest.approx((won - lost) / len(bf16[0]))
    assert found["quantization_loss"]["fp8"]["difference"] == pytest.approx((lost - won) / len(bf16[0]))
    for said, kinds in {
        "The gain survives": (SURVIVES,),
        "is lost in": (PARTLY_LOST,),
        "either way": (NOT_SHOWN,),
    }.items():
        assert (said in text) == (verdict in kinds), text
    assert ("The gain survives" in text) <= (survival["interval"][0] > -0.05)


def test_a_gain_that_the_margin_could_swallow_is_not_called_surviving():
    bf16 = paired(1000, 70, 20, 910)  # +2.5 points on 2,000 problems
    cells = {"bf16": bf16, "fp8": (bf16[0], changed(bf16[1], 60, 50))}
    found, text = judged(cells)
    assert verdicts(cells) == (GAIN, NOT_SHOWN) and found["gain_survival"]["fp8"]["interval"][0] > -0.02
    assert re.search(r"no more than 1\.\d are lost, but the margin of 5 points is no smaller .* 2\.5", text)
    assert verdicts(cells, limits=Limits(margin=0.02)) == (GAIN, SURVIVES)


def test_a_gain_that_is_not_shown_in_the_format_is_not_called_surviving():
    bf16 = paired(40, 16, 4, 40)  # +12 points, p = 0.012
    cells = {"bf16": bf16, "fp8": (bf16[0], cell(*[[True]] * 52, *[[False]] * 48))}
    found, text = judged(cells, limits=Limits(margin=0.1))
    assert found["gain"]["bf16"]["verdict"] == GAIN and found["gain_survival"]["fp8"]["interval"][0] > -0.1
    assert verdicts(cells, limits=Limits(margin=0.1)) == (NOT_SHOWN, NOT_SHOWN) and "is shown there" in text


def test_the_margin_is_the_gates_and_more_problems_are_named():
    cells = {"bf16": SHOWN, "fp8": (SHOWN[0], changed(SHOWN[1], 60, 58))}

    def survives_with(times: int) -> bool:
        more = {name: tuple(repeated(side, times) for side in pair) for name, pair in cells.items()}
        return verdicts(more)[1] == SURVIVES

    found, text = judged(cells)
    needed = found["gain_survival"]["fp8"]["needed_problems"]
    least = next(times for times in range(1, 40) if survives_with(times))
    assert "problems would decide" in text and needed == pytest.approx(300 * least, rel=0.25)
    assert survives_with(-(-needed // 300))
    assert verdicts(cells, limits=Limits(margin=0.15))[1] == SURVIVES


def test_an_estimate_at_the_margin_names_no_number_of_problems():
    cells = {"bf16": SHOWN, "fp8": (SHOWN[0], changed(SHOWN[1], 60, 58))}
    found = judged(cells, limits=Limits(margin=2 / 300))[0]["gain_survival"]["fp8"]
    assert (found["verdict"], found["needed_problems"]) == (NOT_SHOWN, None)


def test_what_one_comparison_shows_four_may_not():
    barely = paired(40, 14, 4, 42)  # p = 0.031
    found, text = judged({"bf16": barely})
    alone = found["gain"]["bf16"]
    assert alone["verdict"] == GAIN and "adjusted" not in text
    null = paired(40, 9, 9, 42)
    found, text = judged({"bf16": barely, "fp8": null, "awq": null, "nvfp4": null})
    gain = found["gain"]["bf16"]
    assert gain["verdict"] == NOT_SHOWN and gain["interval"][0] > 0
    assert gain["holm_p"] == pytest.approx(4 * gain["p"])
    assert gain["minimum_detectable_effect"] > 1.1 * alone["minimum_detectable_effect"]
    assert gain["needed_problems"]["problems"] > 1.3 * alone["needed_problems"]["problems"]
    assert "0.124 adjusted for 4" in text and "4 formats are compared" in text and "points more" not in text


@pytest.mark.parametrize(
    ("interval", "holm_p", "way"),
    [
        ((0.01, 0.1), 0.05, 1),
        ((-0.1, -0.01), 0.05, -1),
        ((0.01, 0.1), 0.051, 0),
        ((0.0, 0.1), 0.01, 0),
        ((-0.1, 0.0), 0.01, 0),
    ],
)
def test_a_difference_is_shown_by_interval_and_test_together(interval, holm_p, way):
    assert compare.direction({"interval": interval, "holm_p": holm_p}) == way


def test_without_an_effect_no_difference_is_said_in_95_of_100_studies():
    rng, claims, studies = np.random.default_rng(1), 0, 100
    for _ in range(studies):
        chance = rng.beta(1, 1, 30)
        draws = [cell(*(rng.random((30, 4)) < chance[:, None]).tolist()) for _ in range(6)]
        text = judged(
            dict(zip(("bf16", "fp8", "awq"), zip(draws[::2], draws[1::2], strict=True), strict=True)), samples=300
        )[1]
        claims += any(claim in text for claim in CLAIMS[:2])
    assert claims / studies < 0.05 + 2 * np.sqrt(0.05 * 0.95 / studies)


def test_the_tests_of_one_completion_are_mcnemars_and_of_several_sign_flips():
    one = judged({"bf16": SHOWN})[0]["gain"]["bf16"]
    assert one["test"] == "McNemar" and one["mcnemar_p"] == pytest.approx(one["p"]) and one["discordant"] == [80, 5]
    assert "pass_at_k" not in one
    base = cell(*[[True, False, False, False], [False] * 4] * 10)
    grpo = cell(*[[True, True, False, True], [False] * 3 + [True]] * 10)
    found = judged({"bf16": (base, grpo)})[0]
    gain = found["gain"]["bf16"]
    assert found["samples_per_problem"] == 4 and gain["test"] == "sign-flip" and gain["mcnemar_p"] is None
    assert gain["n"] == 20 and gain["difference"] == pytest.approx((0.5 + 0.25) / 2)
    passed = gain["pass_at_k"]
    assert list(passed) == ["1", "2", "4"] and passed["1"]["difference"] == pytest.approx(gain["difference"])
    assert (passed["4"]["grpo"], passed["4"]["base"]) == (1.0, 0.5)
    assert passed["2"]["base"] == pytest.approx(0.5 / 2)  # one right of four: 1 - C(3,2)/C(4,2) = 1/2
    assert [gain["maj_at_k"][key] for key in ("k", "grpo", "base")] == [4, 0.5, 0.0]
    assert set(gain["variance"]) == {"between_problems", "within_problems"}


def test_a_problem_undecided_in_one_cell_leaves_every_comparison_with_it():
    cells = {
        "bf16": (cell([False], [True], [False], [False]), cell([True], [True], [None], [True])),
        "fp8": (cell([False], [True], [False], [None]), cell([True], [False], [True], [True])),
    }
    found, text = judged(cells, limits=Limits(max_undecided=0.5))
    assert (found["gain"]["bf16"]["n"], found["gain"]["bf16"]["difference"]) == (3, pytest.approx(2 / 3))
    assert (found["gain"]["fp8"]["n"], found["gain"]["fp8"]["discordant"]) == (3, [2, 1])
    assert found["gain_survival"]["fp8"]["n"] == 2 and found["quantization_loss"]["fp8"]["n"] == 3
    assert found["gain_survival"]["fp8"]["difference"] == pytest.approx((1 + -1) / 2 - (1 + 0) / 2)
    assert "1 of 4 answers of GRPO in bf16 could not be compared" in text
    base, grpo = cell([True, False], [None, False]), cell([True, True], [True, True])
    gain = judged({"bf16": (base, grpo)}, limits=Limits(max_undecided=0.5))[0]["gain"]["bf16"]
    assert gain["n"] == 2 and gain["difference"] == pytest.approx((0.5 + 1) / 2) and gain["pass_at_k"]["2"]["n"] == 1
    with pytest.raises(CheckFailed, match="decided answer in all of base in bf16, grpo in bf16"):
        judged({"bf16": (several(1, 1, 4), cell([None] * 4, [None] * 4))})


@pytest.mark.parametrize(
    "other",
    [
        cell([True], [True], [True]),
        cell([True, True], [True, True]),
        [replace(one, problem_id=f"x{one.problem_id}") for one in cell([True], [True])],
        cell([True], [True])[::-1],
    ],
)
def test_cells_of_other_problems_are_not_compared(other):
    with pytest.raises(BadInput, match="grpo in bf16 do not match those of base in bf16"):
        judged({"bf16": (cell([True], [True]), other)})


def test_every_format_is_compared_with_bf16_and_keeps_its_keys():
    names = ["nf4", "bf16", "fp8", "fp8_block", "w4a16", "awq", "nvfp4a16", "nvfp4"]
    found, text = judged(dict.fromkeys(names, SHOWN))
    others = [name for name in names if name != "bf16"]
    assert list(found["gain"]) == names and list(found["gain_survival"]) == others == list(found["quantization_loss"])
    assert all(f"The gain survives {name} to" in text for name in others)
    keys = {"difference", "interval", "n", "mcnemar_p", "discordant", "minimum_detectable_effect", "p", "holm_p"}
    assert keys | {"needed_problems", "verdict"} <= set(found["gain"]["awq"])
    assert found["minimum_detectable_effect"] == found["gain"]["nf4"]["minimum_detectable_effect"]
    hygiene = found["hygiene"]
    assert hygiene["cells"]["grpo"]["awq"] == [] and hygiene["refused"] == {"gain": {}, "gain_survival": {}}
    for names in (["bf16"], ["fp8", "nvfp4"]):
        found, text = judged(dict.fromkeys(names, SHOWN))
        assert found["gain_survival"] == found["quantization_loss"] == {}
        assert "not measured: that needs bf16" in text and "The gain survives" not in text


def test_each_family_of_comparisons_is_adjusted_as_one():
    lossy = {
        name: (SHOWN[0], spoilt(SHOWN[1], share, correct=False)) for name, share in (("fp8", 0.05), ("awq", 0.03))
    }
    found, _ = judged({"bf16": SHOWN, **lossy})
    for family, count in (("gain", 3), ("gain_survival", 2), ("quantization_loss", 2)):
        made = list(found[family].values())
        assert [one["comparisons"] for one in made] == [count] * count
        assert [one["holm_p"] for one in made] == stats.holm([one["p"] for one in made])
        assert any(one["holm_p"] > one["p"] for one in made)


def test_every_limit_is_that_of_its_own_key():
    gate = {"min_parse_rate": 0.81, "max_prompt_leak": 0.02, "min_end_of_turn_rate": 0.83, "max_token_hit_rate": 0.04}
    values = {"eval": {"gate": gate | {"max_quantization_loss": 0.05, "min_gain": 0.06}}}
    values |= {"run": {"name": "x"}, "model": {"id": "x"}, "train": {"max_steps": 1}}
    found = limits_of(config_from_dict(values | {"reward": {"max_unknown_fraction": 0.07}}))
    assert found == Limits(**gate, max_undecided=0.07, margin=0.05)


def test_only_a_readable_answer_that_ended_by_itself_is_well_formed():
    wrong = [{"parsed": False}, {"ended": False}, {"hit_max_tokens": True}]
    assert well_formed(FINE) and not any(well_formed(replace(FINE, **fields)) for fields in wrong)
