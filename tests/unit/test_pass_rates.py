"""Problems filtered and ordered by measured pass rates; files that were measured of something else."""

import json
import math
from pathlib import Path

import pytest

from kit.core.checksum import line_of
from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir
from kit.data.pass_rates import SAMPLING, TASK, describe_other_base, select, settings_of
from kit.data.problems import Problem
from recipes.pass_rates import begun, entry, measuring
from tests.conftest import CONFIG
from tests.unit.test_checks import refusal

RATES = {"a": 0.5, "b": 1.0, "c": None, "d": 0.0, "e": 0.875, "f": 0.5}
PROBLEMS = [Problem(name, f"{name}?", "1", f"file:{place}") for place, name in enumerate(RATES, 1)]


@pytest.fixture
def configured(tmp_path):
    """`configured(*changes, facts, rates)`: a configuration with a file of pass rates."""

    def make(*changes: str, facts: dict | None = None, rates: dict | None = None):
        file = tmp_path / "rates.jsonl"
        settings = settings_of(load_config(CONFIG), SAMPLING + TASK) | (facts or {})
        lines = [{"facts": {"base_hash": "ab" * 32, "model": "tiny", "settings": settings}}]
        measured = RATES if rates is None else rates
        lines += [{"problem_id": name, "pass_rate": rate, "known": 8} for name, rate in measured.items()]
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return load_config(CONFIG, [f"--data.pass_rates={file}", *changes])

    return make


def ids(problems: list[Problem]) -> str:
    return "".join(problem.id for problem in problems)


@pytest.mark.parametrize(
    ("changes", "wanted", "said"),
    [
        ("", "abcdef", "pass rates: 6 of 6 problems kept (0 to 1), 1 not known (kept)"),
        ("min_pass_rate=0.1", "abef", "pass rates: 4 of 6 problems kept (0.1 to 1), 1 not known (left out)"),
        ("min_pass_rate=0.5 max_pass_rate=0.9", "aef", "pass rates: 3 of 6 problems kept (0.5 to 0.9)"),
        ("max_pass_rate=0", "d", "pass rates: 1 of 6 problems kept (0 to 0)"),
        ("order=easy_first", "beafdc", "pass rates: 6 of 6"),
        ("order=easy_first max_pass_rate=0.9", "eafd", "pass rates: 4 of 6"),
    ],
)
def test_problems_are_kept_by_their_rate_and_put_in_its_order(configured, changes, wanted, said):
    kept, lines = select(PROBLEMS, configured(*(f"--data.{change}" for change in changes.split())))
    assert ids(kept) == wanted and len(lines) == 1 and lines[0].startswith(said)


def test_without_a_file_nothing_changes():
    assert select(PROBLEMS, load_config(CONFIG)) == (PROBLEMS, [])
    assert describe_other_base(load_config(CONFIG), "cd" * 32) == ""


def test_problems_that_were_not_measured_are_named(configured):
    config = configured(rates={"a": 0.5, "f": 1.0})
    with pytest.raises(
        BadInput, match=r"4 of 6 training problems are not in .*rates.jsonl: file:2, file:3, file:4, …\."
    ):
        select(PROBLEMS, config)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            {"reward.functions": ["gsm8k_strict"]},
            r"another task: reward.functions was \['gsm8k_strict'\], is \['math'\]",
        ),
        ({"environment.tools": ["python"]}, r"another task: environment.tools was \['python'\], is \[\]"),
    ],
)
def test_rates_of_another_task_are_refused(configured, facts, said):
    with pytest.raises(BadInput, match=said):
        select(PROBLEMS, configured(facts=facts))


def test_rates_of_other_sampling_or_of_another_base_are_a_warning(configured):
    config = configured("--rollout.temperature=0.7")
    warned = select(PROBLEMS, config)[1][1]
    assert warned.startswith("WARNING: ") and warned.endswith("other settings: rollout.temperature was 1.0, is 0.7.")
    assert describe_other_base(config, "ab" * 32) == ""
    said = describe_other_base(config, "cd" * 32)
    assert "was measured with another base (tiny, abababababab; the run's is cdcdcdcdcdcd)" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ('{"problem_id": "a", "pass_rate": 1}\n', ":1 is not the facts of a measurement"),
        ('{"facts": {}}\n{"problem_id": "a"}\n', ":2 is not a problem's pass rate"),
        ('{"facts": {}}\n{"problem_id": "a", "pass_rate": 1.5}\n', ":2 is not a problem's pass rate"),
        ('{"facts": {}}\n{"problem_id": "a", "pass_rate": NaN}\n', ":2 is damaged: it is not JSON (it has NaN"),
        ('{"facts": {}}\n{"problem_id": "a", "pass_rate": true}\n', ":2 is not a problem's pass rate"),
        ('{"facts": {}}\n[]\n', ":2 is not a problem's pass rate: the content is [], expected an object"),
        ('{"facts": {}}\n{"pro', ":2 is damaged: it is not JSON"),
        ("[" * 100_000 + "\n", ":1 is damaged: it is not JSON"),
    ],
    ids=range(9),
)
def test_a_file_that_is_none_is_refused_with_its_line(tmp_path, text, said):
    (file := tmp_path / "rates.jsonl").write_text(text)
    with pytest.raises(BadInput) as error:
        select(PROBLEMS, load_config(CONFIG, [f"--data.pass_rates={file}"]))
    assert said in str(error.value) and "python -m recipes.pass_rates" in str(error.value)
    with pytest.raises(BadInput, match="does not exist"):
        select(PROBLEMS, load_config(CONFIG, [f"--data.pass_rates={tmp_path / 'none'}"]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("data.order=easy_first", "data.order (easy_first) needs data.pass_rates"),
        ("data.max_pass_rate=0.9", "data.max_pass_rate (0.9) needs data.pass_rates"),
        ("data.pass_rates=x data.min_pass_rate=0.9 data.max_pass_rate=0.1", "data.min_pass_rate (0.9) is above"),
        ("data.min_pass_rate=1.5", "data.min_pass_rate (1.5) must be between 0 and 1"),
        (
            "data.pass_rates=x data.order=easy_first train.trl={'shuffle_dataset':true}",
            "data.order is easy_first and train.trl.shuffle_dataset is set",
        ),
        ("rollout.resample_budget=64", "rollout.resample_budget is 64 and rollout.resample_rounds 0"),
        (
            "rollout.resample_rounds=1 rollout.resample_budget=4",
            "rollout.resample_budget (4) is below rollout.group_size",
        ),
        (
            "rollout.resample_rounds=2 rollout.overlap=true rollout.backend=server",
            "rollout.resample_rounds is 2 and rollout.overlap true",
        ),
        ("rollout.resample_rounds=2 distill.teacher=base", "rollout.resample_rounds is 2 in a distillation"),
        ("rollout.replay_steps=2 distill.teacher=base", "rollout.replay_steps is 2 in a distillation"),
        ("rollout.replay_steps=2 environment.factory=a:b", "rollout.replay_steps is 2 with an environment"),
        ("rollout.replay_steps=1 rollout.routing=replay", "rollout.replay_steps is 1 and rollout.routing replay"),
        ("rollout.resample_rounds=-1", "rollout.resample_rounds (-1) must be 0 or more"),
    ],
)
def test_settings_that_do_nothing_or_conflict_are_refused(changes, said):
    assert said in refusal(
        **{key.replace(".", "__"): value for key, _, value in (c.partition("=") for c in changes.split())}
    )


def test_a_measurement_is_of_all_problems_and_of_nothing_else():
    keys = [
        "--data.pass_rates=x",
        "--data.min_pass_rate=0.5",
        "--data.order=easy_first",
        "--rollout.resample_rounds=2",
        "--rollout.replay_steps=2",
    ]
    config = measuring(load_config(CONFIG, [*keys, "--watch.eval_every=5"]), Path("data/rates.jsonl"))
    check_config(config, 1)
    assert (config.data.pass_rates, config.data.min_pass_rate, config.data.order) == (None, 0.0, "shuffled")
    assert (config.rollout.resample_rounds, config.watch.eval_every) == (0, 0)
    assert RunDir(config.run.directory).path == Path("data/.rates.jsonl.run")


def test_an_interrupted_measurement_goes_on_and_one_of_other_facts_starts_over(tmp_path, read_jsonl):
    partial = tmp_path / "out" / "rates.jsonl.partial"
    assert begun(partial, {"samples": 8}) == set()
    with open(partial, "a") as file:
        file.write(line_of({"problem_id": "a", "pass_rate": 1.0}) + '\n{"problem_id": "b", "pas')
    assert begun(partial, {"samples": 8}) == {"a"}
    assert read_jsonl(partial) == [{"facts": {"samples": 8}}, {"problem_id": "a", "pass_rate": 1.0}]
    assert begun(partial, {"samples": 16}) == set() and read_jsonl(partial) == [{"facts": {"samples": 16}}]


def test_a_completion_that_could_not_be_judged_is_not_a_failure():
    found = entry("a", [1.0, 0.0, math.nan, 1.2], 1.0)
    assert found == {"problem_id": "a", "pass_rate": 2 / 3, "known": 3, "mean_reward": pytest.approx(2.2 / 3)}
    assert entry("a", [math.nan], 1.0) == {"problem_id": "a", "pass_rate": None, "known": 0, "mean_reward": None}
