"""launch.watch through its real command line, on logs written here: whole, growing, broken, dead, resumed."""

import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.cells import cell_len

from launch.health import RULES, alerts
from launch.metrics import MetricsLog, progress
from launch.watch import duration, show, sparkline

ROOT = Path(__file__).parents[2]
WATCH = [sys.executable, "-m", "launch.watch"]


def step_row(step: int, total: int = 40, **changes) -> dict:
    """One metrics line as the trainer writes it, of a run in good health, a step a second, written just now."""
    row = {
        "step": step,
        "total_steps": total,
        "time": time.time() + step - total,
        "loss": 0.01,
        "reward": 0.45 + 0.4 * step / total,
        "reward_std": 0.4,
        "rewards": {"math": 0.45 + 0.4 * step / total},
        "zero_spread_fraction": 0.25,
        "kl": 0.001 * step,
        "entropy": 0.8 - 0.4 * step / total,
        "clip_fraction": 0.01,
        "truncated_fraction": 0.02,
        "completion_length": 31.5,
        "masked_fraction": None,
        "grad_norm": 0.4,
        "learning_rate": 1e-3,
        "sampler_k3": None,
        "effective_sample_size": None,
        "corrected_token_fraction": 0.001,
        "canary_delta": None,
        "sync_seconds": None,
        "rollout_tokens_per_s": 5321.0,
        "update_tokens_per_s": 8123.0,
        "seconds": {"rollout": 0.5, "reward": 0.1, "update": 0.3, "step": 1.0},
        "peak_gib": {"rollout": 1.2, "update": 1.4},
        "adapter_version": step,
    }
    return row | changes


def rows_of(count: int, total: int = 40, **changes) -> list[dict]:
    return [step_row(step, total, **changes) for step in range(1, count + 1)]


def make_run(path: Path, rows: list[dict] | None) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"config": {}}')
    if rows is not None:
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def log_of(path: Path) -> MetricsLog:
    log = MetricsLog(path / "metrics.jsonl")
    log.poll()
    return log


def watch(*arguments: object, **settings) -> subprocess.CompletedProcess:
    command = [*WATCH, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, **settings)


def watch_json(path: Path) -> dict:
    done = watch(path, "--once", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_once_fits_80_columns_and_shows_every_curve(tmp_path):
    bad = {"loss": float("nan"), "truncated_fraction": 0.4, "kl": 123456.789, "grad_norm": 1.23e-9}
    run = make_run(tmp_path / ("long" * 30), rows_of(30, **bad))
    done = watch(run, "--once")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(cell_len, lines)) <= 80
    for label in ("reward", "KL", "entropy", "zero spread", "clipped", "truncated", "grad norm", "step seconds"):
        assert any(re.match(rf" *{label} .*[▁▂▃▄▅▆▇█]", line) for line in lines), label
    for text in ("step 30/40", "75%", "s left", "tokens/s", "rollout 5,321", "seconds", "loss not finite"):
        assert text in done.stdout, text


def test_json_summary_gives_state_means_and_alerts(tmp_path):
    summary = watch_json(make_run(tmp_path / "run", rows_of(30, truncated_fraction=0.5)))
    assert (summary["state"], summary["step"], summary["total_steps"]) == ("running", 30, 40)
    assert summary["recent"]["reward"] == pytest.approx(0.45 + 0.4 * 25.5 / 40)
    assert summary["last"]["adapter_version"] == 30
    assert [alert["name"] for alert in summary["alerts"]] == ["truncation"]


def test_json_has_null_where_the_log_has_nan_or_infinity(tmp_path):
    summary = watch_json(make_run(tmp_path / "run", rows_of(3, loss=math.nan, kl=math.inf, peak_gib={"a": math.nan})))
    assert summary["last"]["loss"] is None
    assert summary["last"]["kl"] is None
    assert summary["last"]["peak_gib"] == {"a": None}
    assert summary["recent"]["kl"] is None


def test_plot_writes_a_png_and_prints_its_path(tmp_path):
    run = make_run(tmp_path / "run", [*rows_of(25), step_row(26, seconds=None, kl=None, reward_std=None)])
    done = watch(run, "--plot")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(run / "health.png")
    assert done.stderr == ""
    assert (run / "health.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in run.iterdir()) == ["config.json", "health.png", "metrics.jsonl"]


def test_plot_of_a_run_without_steps_says_so_and_exits_2(tmp_path):
    done = watch(make_run(tmp_path / "run", []), "--plot")
    assert done.returncode == 2
    assert "no complete step yet" in done.stderr
    assert not (tmp_path / "run" / "health.png").exists()


def test_live_follow_sees_appended_lines_and_ends_by_itself(tmp_path):
    run = make_run(tmp_path / "run", None)

    def train() -> None:
        time.sleep(1.0)
        with open(run / "metrics.jsonl", "w") as file:
            for row in rows_of(6, total=6):
                text = json.dumps(row) + "\n"
                for part in (text[:50], text[50:]):  # a reader must never take the first half for a line
                    file.write(part)
                    file.flush()
                    time.sleep(0.1)

    writer = threading.Thread(target=train)
    writer.start()
    done = watch(run, "--interval", "0.05")
    writer.join()
    assert done.returncode == 0, done.stderr
    first, *steps = done.stdout.splitlines()
    assert first == f"waiting for the first step in {run}/metrics.jsonl"
    assert [line.split()[1] for line in steps] == [f"{step}/6" for step in range(1, 7)]
    assert all(re.search(r"reward 0\.\d+  KL 0\.\d+  entropy", line) for line in steps)


def test_live_follow_prints_the_steps_of_a_resumed_run_again(tmp_path):
    run = make_run(tmp_path / "run", rows_of(4, total=5))
    process = subprocess.Popen([*WATCH, str(run), "--interval", "0.05"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    first = [process.stdout.readline().split()[1] for _ in range(4)]
    with open(run / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(step_row(step, total=5)) + "\n" for step in (3, 4, 5)))
    rest = [line.split()[1] for line in process.communicate(timeout=20)[0].splitlines()]
    assert process.returncode == 0
    assert (first, rest) == (["1/5", "2/5", "3/5", "4/5"], ["3/5", "4/5", "5/5"])


def test_live_follow_in_a_terminal_redraws_and_ends_by_itself(tmp_path):
    run = make_run(tmp_path / "run", rows_of(5, total=6))
    leader, follower = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "50"}
    process = subprocess.Popen(
        [*WATCH, str(run), "--interval", "0.05"], cwd=ROOT, stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    shown = read_until(leader, b"step 5/6")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(step_row(6, total=6)) + "\n")
    shown += read_until(leader, b"finished")
    assert b"step 5/6" in shown
    assert b"finished" in shown
    read_until(leader, b"never written: drains the terminal until the command ends")
    assert process.wait(timeout=20) == 0
    os.close(leader)


def read_until(file: int, mark: bytes, timeout_s: float = 20.0) -> bytes:
    """What a terminal shows until `mark` appears, its other end closes, or the time is over."""
    shown, end = b"", time.monotonic() + timeout_s
    while mark not in shown and time.monotonic() < end:
        if select.select([file], [], [], 0.1)[0]:
            try:
                shown += os.read(file, 65536)
            except OSError:  # Linux reports the closed other end of a pseudo-terminal this way
                break
    return shown


def test_ctrl_c_ends_with_exit_code_0(tmp_path):
    run = make_run(tmp_path / "run", rows_of(2))
    process = subprocess.Popen([*WATCH, str(run)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("step 1/40")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0
    assert "Traceback" not in process.communicate()[1]


def test_waits_with_a_message_while_there_is_no_log(tmp_path):
    run = make_run(tmp_path / "run", None)
    done = watch(run, "--once")
    assert done.returncode == 0
    assert "waiting for the first step" in done.stdout
    assert watch_json(run)["state"] == "waiting"


def test_a_directory_that_is_no_run_exits_2_and_names_the_nearest(tmp_path):
    make_run(tmp_path / "grpo-tiny", rows_of(1))
    (tmp_path / "empty").mkdir()
    missing, empty = watch(tmp_path / "grpo-tyni", "--once"), watch(tmp_path / "empty")
    assert (missing.returncode, empty.returncode) == (2, 2)
    assert f"Did you mean {tmp_path / 'grpo-tiny'}?" in missing.stderr
    assert "no config.json" in empty.stderr
    assert "Traceback" not in missing.stderr + empty.stderr


@pytest.mark.parametrize("arguments", [["--json"], ["--interval", "0"], ["--interval", "nan"], ["--onc"]])
def test_bad_arguments_exit_2(tmp_path, arguments):
    assert watch(make_run(tmp_path / "run", rows_of(1)), *arguments).returncode == 2


def test_a_dead_run_says_how_long_since_the_last_line(tmp_path):
    rows = rows_of(10)
    for row in rows:
        row["time"] -= 2 * 3600 + 7 * 60
    run = make_run(tmp_path / "run", rows)
    assert re.search(
        r"no line for 2 h 0[78] min: the run has stopped, or a step is stuck", watch(run, "--once").stdout
    )


def test_half_a_last_line_is_left_out_and_a_broken_line_is_counted(tmp_path):
    run = make_run(tmp_path / "run", rows_of(4))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('not json\n[1, 2]\n{"loss": 1}\n\n' + json.dumps(step_row(5))[:60])
    log = log_of(run)
    assert [row["step"] for row in log.rows] == [1, 2, 3, 4]
    assert log.bad_lines == 3
    assert "3 unreadable lines skipped" in watch(run, "--once").stdout


def test_a_line_glued_to_the_half_line_of_a_killed_run_is_read(tmp_path):
    run = make_run(tmp_path / "run", rows_of(4))
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(step_row(5))[:60] + json.dumps(step_row(5, reward=0.77)) + "\n")
    log = log_of(run)
    assert [row["step"] for row in log.rows] == [1, 2, 3, 4, 5]
    assert (log.rows[-1]["reward"], log.bad_lines) == (0.77, 0)


def test_after_a_resume_the_later_line_wins(tmp_path):
    run = make_run(tmp_path / "run", rows_of(8))
    log = log_of(run)
    with open(run / "metrics.jsonl", "a") as file:
        for step in (5, 6):
            file.write(json.dumps(step_row(step, reward=0.11)) + "\n")
    assert log.poll()
    assert [row["step"] for row in log.rows] == [1, 2, 3, 4, 5, 6]
    assert [row["reward"] == 0.11 for row in log.rows] == [False] * 4 + [True] * 2
    assert log.resumed_at == [5]


def test_a_log_that_was_replaced_is_read_anew(tmp_path):
    run = make_run(tmp_path / "run", rows_of(8))
    log = log_of(run)
    (run / "metrics.jsonl").write_text(json.dumps(step_row(1, reward=0.22)) + "\n")
    assert log.poll()
    assert [(row["step"], row["reward"]) for row in log.rows] == [(1, 0.22)]
    assert not log.poll()


def test_time_left_is_the_median_step_time_and_ends_at_zero(tmp_path):
    rows = rows_of(10, total=40)
    rows[0]["seconds"]["step"] = 500.0  # compilation in the first step must not count
    log = log_of(make_run(tmp_path / "run", rows))
    assert progress(log, now=rows[-1]["time"])["time_left_s"] == pytest.approx(30.0)
    for row in log.rows:
        row["seconds"] = None
    assert progress(log, now=rows[-1]["time"])["time_left_s"] == pytest.approx(30.0, abs=0.01)
    log.rows.append(step_row(40, total=40))
    assert progress(log)["state"] == "finished"


FIRING = {
    "loss not finite": [*rows_of(12), step_row(13, loss=None)],
    "entropy collapse": [step_row(s, entropy=0.5 if s < 15 else 0.01) for s in range(1, 41)],
    "KL climbing": [step_row(s, kl=0.06 if s <= 20 else 0.2) for s in range(1, 31)],
    "zero spread": rows_of(20, zero_spread_fraction=1.0),
    "truncation": rows_of(20, truncated_fraction=0.3),
    "sampler mismatch": rows_of(20, corrected_token_fraction=0.3),
}
QUIET = {
    "loss not finite": [step_row(1, loss=math.nan), *rows_of(30)[1:]],
    "entropy collapse": [step_row(s, entropy=0.5 - 0.01 * s) for s in range(1, 41)],
    "KL climbing": [step_row(s, kl=0.02 * s) for s in range(1, 46)],
    "zero spread": rows_of(20, zero_spread_fraction=0.9),
    "truncation": rows_of(20, truncated_fraction=0.2),
    "sampler mismatch": rows_of(20, corrected_token_fraction=0.05),
}


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_each_health_rule_fires_on_its_curve_and_not_on_a_sound_one(rule):
    assert [alert.name for alert in alerts(FIRING[rule])] == [rule]
    assert alerts(QUIET[rule]) == []


def test_kl_above_its_ceiling_fires_even_when_it_is_flat():
    assert [alert.name for alert in alerts(rows_of(30, kl=1.5))] == ["KL climbing"]


def test_no_rule_fires_without_data():
    empty = {key: None for key in step_row(1)} | {"loss": 0.0}
    assert alerts([]) == []
    assert alerts([empty | {"step": step} for step in range(1, 31)]) == []


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([math.nan, math.nan], "  "),
        ([3.0, 3.0, 3.0], "▁▁▁"),
        ([0.0, math.nan, 7.0], "▁ █"),
        ([0.0, 0.0, 7.0, 7.0], "▁▁██"),
        ([0.0] * 50 + [7.0] * 50, "▁▁▁▁▁█████"),
    ],
)
def test_sparkline_draws_means_and_leaves_gaps(values, line):
    assert sparkline(values, 10) == line


def test_sparkline_of_a_share_keeps_noise_near_zero_flat():
    assert sparkline([0.0, 0.01, 0.0, 0.01], 10, is_share=True) == "▁▁▁▁"
    assert sparkline([0.0, 1.0], 10, is_share=True) == "▁█"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (math.nan, "NaN"), (math.inf, "inf"), (0.0, "0"), (0.45678, "0.457"), (12345.6, "12,346")],
)
def test_numbers_are_short(value, text):
    assert show(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3700, "1 h 01 min"), (90000, "1 d 1 h")],
)
def test_durations_are_readable(seconds, text):
    assert duration(seconds) == text
