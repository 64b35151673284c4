"""Health rules: each fires on a curve that is ill in its way and on no other, none fires on runs that went well."""

import io
import json
import math
from types import SimpleNamespace

import pytest
from rich.console import Console

from kit.core.config.load import load_config
from kit.core.health import HELDOUT_FALL, JUDGES, RULES, alerts
from kit.core.run_directory import RunDir
from kit.train.setup import training
from launch import up
from launch.watching.page import health
from reward import REWARDS
from reward.explain import judges
from tests.unit.metric_rows import make_run, recorded, rows_of, step_row


def fired(rows: list[dict]) -> list[str]:
    return [alert.name for alert in alerts(rows)]


def curve(count: int, total: int = 40, **keys) -> list[dict]:
    """`count` steps of a run in good health with other values: constants, or functions of the step."""
    made = []
    for step in range(1, count + 1):
        made.append(step_row(step, total, **{key: of(step) if callable(of) else of for key, of in keys.items()}))
    return made


def measured(*values: float, every: int = 5, **keys) -> list[dict]:
    """Steps of which every fifth has a held-out accuracy."""
    rows = curve(every * len(values), **keys)
    for place, value in enumerate(values):
        rows[place * every + every - 1]["heldout_accuracy"] = value
    return rows


FLAT = {"reward": 0.3}
FIRING = {
    "loss not finite": [*rows_of(12), step_row(13, loss=None)],
    "never paid": rows_of(6, reward=0.0, reward_std=0.0, rewards={"math": 0.0}),
    "never changed": rows_of(6, reward=0.5, reward_std=0.0, rewards={"math": 0.5}),
    "reward falls": curve(40, reward=lambda s: 0.5 if s <= 25 else 0.1),
    "held-out falls": measured(0.5, 0.52, 0.54, 0.53, 0.46, 0.41, 0.36, 0.3),
    "held-out loss rises": curve(40, heldout_loss={10: 2.0, 20: 1.0, 30: 1.2, 40: 1.2}.get),
    "entropy collapse": curve(40, entropy=lambda s: 0.5 if s < 15 else 0.01),
    "KL climbing": curve(30, kl=lambda s: 0.06 if s <= 20 else 0.2),
    "no spread": rows_of(20, zero_spread_fraction=1.0, **FLAT),
    "sampled in vain": rows_of(20, kept_fraction=0.2),
    "truncation": rows_of(20, truncated_fraction=0.3),
    "sampler mismatch": rows_of(20, sampler_k3=0.02),
    "unknown rewards": rows_of(20, masked_fraction=0.015),
    "throughput drop": curve(40, update_tokens_per_s=lambda s: 8000.0 if s <= 30 else 3000.0),
}
QUIET = {
    "loss not finite": [step_row(1, loss=math.nan), *rows_of(30)[1:]],
    # Four steps are few; one answer that was paid is one; a penalty may cancel what is paid.
    "never paid": [*rows_of(4, reward=0.0, reward_std=0.0), step_row(5, reward=0.0, reward_std=0.1)],
    # One answer that got another reward is one.
    "never changed": [*rows_of(9, reward=1.0, reward_std=0.0), step_row(10, reward=1.0, reward_std=0.1)],
    "reward falls": curve(40, reward=lambda s: 0.3 + 0.1 * (s % 5) + 0.005 * s - (0.05 if s > 30 else 0)),
    # Noise of a few problems, and a fall that the reward follows.
    "held-out falls": measured(0.5, 0.55, 0.48, 0.56, 0.5, 0.53, 0.49, 0.52),
    "held-out loss rises": curve(40, heldout_loss={10: 2.0, 20: 1.0, 30: 1.01, 40: 1.02}.get),
    "entropy collapse": curve(40, entropy=lambda s: 0.5 - 0.01 * s),
    "KL climbing": curve(45, kl=lambda s: 0.02 * s),
    "no spread": rows_of(20, zero_spread_fraction=0.9, **FLAT),
    # Replaced groups teach, however many have no spread as they are drawn.
    "sampled in vain": rows_of(20, kept_fraction=0.3, zero_spread_fraction=1.0, no_signal_fraction=0.1, **FLAT),
    "truncation": rows_of(20, truncated_fraction=0.2),
    "sampler mismatch": rows_of(20, sampler_k3=0.005, effective_sample_size=0.9, corrected_token_fraction=0.05),
    "unknown rewards": rows_of(20, masked_fraction=0.005),
    "throughput drop": curve(40, update_tokens_per_s=lambda s: 8000.0 if s <= 30 else 4500.0),
}


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_each_health_rule_fires_on_its_curve_and_not_on_a_sound_one(rule):
    assert fired(FIRING[rule]) == [rule]
    assert fired(QUIET[rule]) == []


@pytest.mark.parametrize("name", ["in_process", "server"])
def test_no_rule_fires_at_any_step_of_a_recorded_run_that_went_well(name):
    rows = recorded(name)
    assert len(rows) == 80 and rows[-1]["reward"] > 0.8
    assert {step: found for step in range(1, 81) if (found := fired(rows[:step]))} == {}


def test_a_recorded_run_with_too_high_a_learning_rate_is_told_before_its_reward_is_gone():
    """The same configuration with train.learning_rate 5e-3 instead of 1e-3."""
    rows = recorded("diverged")
    names = {step: fired(rows[:step]) for step in range(1, 81)}
    first = {name: step for step in range(80, 0, -1) for name in names[step]}
    assert first["KL climbing"] <= 20 and rows[19]["reward"] > 0.3
    assert 30 < first["reward falls"] < 60
    assert "reward falls" in names[80]


# A recorded run made ill from its middle on: rule -> what changes.
ILL = {
    "loss not finite": {"loss": math.nan},
    "reward falls": {"reward": 0.2},
    "entropy collapse": {"entropy": 0.002},
    "KL climbing": {"kl": 0.3},
    "no spread": {"zero_spread_fraction": 1.0, "reward": 0.9},
    "truncation": {"truncated_fraction": 0.11},
    "sampler mismatch": {"sampler_k3": 0.004},
    "unknown rewards": {"masked_fraction": 0.02},
    "throughput drop": {"rollout_tokens_per_s": 400.0},
}


@pytest.mark.parametrize("rule", list(ILL))
def test_a_recorded_run_made_ill_is_told_ten_steps_later(rule):
    rows = recorded("server")
    ill = [*rows[:50], *(row | ILL[rule] for row in rows[50:])]
    assert fired(ill[:60]) == [rule]
    if rule != "KL climbing":  # a jump, which ends
        assert fired(ill) == [rule], "it is still ill at step 80"


def test_only_a_fault_is_one_and_every_rule_says_what_to_do():
    assert [rule.name for rule in RULES if rule.fault] == ["loss not finite"]
    assert alerts(FIRING["loss not finite"])[0].fault
    assert all(rule.meaning.endswith(".") and rule.action.endswith(".") for rule in RULES)
    assert {rule.name for rule in RULES} == set(FIRING) == set(QUIET)


def test_answers_that_are_never_paid_are_told_beside_rewards_for_their_form():
    paid = {"reward": 0.5, "rewards": {"math": 0.0, "boxed_format": 0.5, "length": 0.0}}
    (alert,) = alerts(rows_of(6, **paid))
    assert (alert.name, alert.value) == ("never paid", "rewards.math is 0 in all 6 steps")
    assert fired(rows_of(6, **(paid | {"rewards": {"math": 0.5, "length": 0.0}}))) == []
    assert {name for name in REWARDS if judges(name)} == set(JUDGES)


def test_a_function_of_the_users_that_never_pays_is_told_by_its_whole_name():
    paid = {"reward": 0.5, "rewards": {"my.rewards:exact": 0.0, "boxed_format": 0.5}}
    (alert,) = alerts(rows_of(6, **paid))
    assert (alert.name, alert.value) == ("never paid", "rewards.my.rewards:exact is 0 in all 6 steps")
    assert fired([*rows_of(6, **paid), step_row(7, rewards={"my.rewards:exact": 0.1, "boxed_format": 0.5})]) == []


def completion(problem: int, text: str, **more) -> str:
    row = {
        "problem_id": f"id{problem}",
        "prompt": "?",
        "completion": text,
        "gold": str(problem),
        "rewards": {"m:f": 0.0},
    } | more
    return json.dumps(row) + "\n"


def test_an_alert_of_a_reward_that_never_moved_shows_three_completions_of_the_run(tmp_path):
    run = RunDir(make_run(tmp_path / "run", FIRING["never paid"]))
    (alert,) = alerts(FIRING["never paid"], run)
    assert alert.examples == (), "no completions yet"
    run.completions.mkdir()
    texts = ["x" * 500 + "the end\x1b[2J", "again", "second", "third", "fourth"]
    lines = [completion(number, text) for number, text in zip((1, 1, 2, 3, 4), texts, strict=True)]
    (run.completions / "step-000001.jsonl").write_text("".join(lines) + '{"problem_id": "half')
    (run.completions / "step-000003.jsonl").write_text("")
    (alert,) = alerts(FIRING["never paid"], run)
    first, second, third = alert.examples
    assert first.startswith("id1: 'xxx") and first.endswith("the end·[2J' against '1': m:f 0.0") and len(first) < 130
    assert [second, third] == ["id2: 'second' against '2': m:f 0.0", "id3: 'third' against '3': m:f 0.0"]
    assert alert.lines == [alert.text, f"  {first}", f"  {second}", f"  {third}"]
    assert alerts(FIRING["no spread"], run)[0].examples == (), "a reward that moved shows none"
    said = io.StringIO()
    Console(file=said, width=150).print(health(FIRING["never paid"], run))
    assert "id2: 'second' against '2'" in said.getvalue()


def test_a_run_whose_reward_never_left_zero_says_so_at_its_end(tmp_path, monkeypatch, capsys):
    run = RunDir(make_run(tmp_path / "run", FIRING["never paid"]))
    monkeypatch.setattr("kit.policy.load.check_base_unchanged", lambda model, facts: None)
    monkeypatch.setattr(RunDir, "newest_adapter", lambda self: self.adapter_dir(6))
    accelerator = SimpleNamespace(
        is_main_process=True, unwrap_model=lambda model: model, wait_for_everyone=lambda: None
    )
    sampler = SimpleNamespace(close=lambda: None)
    trainer = SimpleNamespace(run=run, sampler=sampler, accelerator=accelerator, model=None)
    trainer.state = SimpleNamespace(global_step=6)
    trainer.config = SimpleNamespace(launch=SimpleNamespace(stall_s=0))
    with training(trainer, {"hash": "0" * 64}):
        pass
    alert, done = capsys.readouterr().out.splitlines()
    assert alert.startswith("alert: never paid: reward is 0 in all 6 steps. ") and "completions/" in alert
    assert "python -m reward check" in alert and done.startswith("done: 6 steps")
    (run.logs).mkdir()
    config = load_config("recipes/configs/grpo-tiny-nf4-cpu.yaml")
    start = SimpleNamespace(run=run, config=config, log=lambda name: run.logs / f"{name}.log")
    assert alert in up.summary(start).splitlines()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"sampler_k3": lambda s: 0.0005 if s <= 30 else 0.003}, "k3 0.003 nats, 0.0005 nats usually"),
        ({"effective_sample_size": 0.4}, "effective sample 40% < 50%"),
        ({"corrected_token_fraction": 0.3}, "30% of the tokens corrected > 10%"),
    ],
)
def test_mismatch_shows_in_the_estimate_in_the_sample_and_in_what_is_cut(keys, text):
    (alert,) = alerts(curve(40, **keys))
    assert (alert.name, alert.value) == ("sampler mismatch", text)


FALL = (0.6, 0.6, 0.6, 0.5, 0.4, 0.3)
EARLY = {"total": 400, "entropy": lambda s: 0.8 if s <= 12 else 0.15}


@pytest.mark.parametrize(
    ("rows", "rules"),
    [
        (rows_of(30, kl=1.5), ["KL climbing"]),  # above its ceiling, though it is flat
        # one step of an estimate that is a thousand times the rest is no climb
        (curve(30, kl=lambda s: 20.0 if s == 27 else 0.02, sampler_k3=lambda s: 0.5 if s == 25 else 0.0005), []),
        (curve(40, truncated_fraction=lambda s: 0.04 if s <= 30 else 0.12), ["truncation"]),  # it doubled
        (curve(40, truncated_fraction=lambda s: 0.01 if s <= 30 else 0.04), []),
        (curve(40, zero_spread_fraction=0.97, reward=lambda s: 0.2 + 0.01 * s), []),  # the reward still moves
        (curve(60, reward=0.4, **EARLY), ["entropy collapse"]),
        (curve(60, reward=lambda s: 0.4 + 0.005 * s, **EARLY), []),
        (measured(*FALL), ["held-out falls"]),
        (measured(*FALL, reward=lambda s: 0.9 - 0.02 * s), ["reward falls"]),  # both fall: no gaming
        (measured(*FALL[1:]), []),  # five measurements
        (measured(0.6, 0.6, 0.6, *[0.61 - HELDOUT_FALL] * 3), []),
    ],
)
def test_a_rule_fires_beyond_its_limit_and_not_before(rows, rules):
    assert fired(rows) == rules


def test_no_rule_fires_without_data():
    empty = {key: None for key in step_row(1)} | {"loss": 0.0}
    assert alerts([]) == []
    assert alerts([empty | {"step": step} for step in range(1, 31)]) == []
