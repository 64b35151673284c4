"""launch.watch on logs written here: whole, growing, broken, dead, resumed."""

import io
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
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from kit.core.errors import run_command
from kit.core.metrics_log import phases, progress
from kit.core.one_line import one_line
from kit.core.run_directory import RunDir
from kit.core.run_state import lock_run, trainer_pid
from launch.watch import main
from launch.watching.page import duration, frame, show, sparkline
from launch.watching.samples import latest_group
from tests import processes
from tests.conftest import Finished
from tests.unit.metric_rows import log_of, make_run, rows_of, step_row

ROOT = Path(__file__).parents[2]
WATCH = [sys.executable, "-m", "launch.watch"]


@pytest.fixture
def watch(capsys) -> Callable[..., Finished]:
    """The command in this process; `watch(*arguments)` is how it ended and what it wrote."""

    def run(*arguments: object) -> Finished:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", ["watch", *map(str, arguments)])
            patch.setattr(sys.stdout, "reconfigure", lambda **keys: None, raising=False)
            run_command(main)
        return Finished(ended.value.code, *capsys.readouterr())

    return run


def summary_of(watch, path: Path) -> dict:
    done = watch(path, "--once", "--json")
    assert done.code == 0, done.err
    return json.loads(done.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_once_fits_80_columns_and_shows_every_curve(tmp_path):
    bad = {"loss": float("nan"), "truncated_fraction": 0.4, "kl": 123456.789, "grad_norm": 1.23e-9}
    run = make_run(tmp_path / ("long" * 30), rows_of(30, **bad))
    done = processes.run([*WATCH, str(run), "--once"])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(cell_len, lines)) <= 80
    for label in ("reward", "KL", "entropy", "zero spread", "clipped", "truncated", "grad norm", "step seconds"):
        assert any(re.match(rf" *{label} .*[▁▂▃▄▅▆▇█]", line) for line in lines), label
    for text in ("step 30/40", "75%", "s left", "tokens/s", "rollout 5,321", "seconds", "loss not finite"):
        assert text in done.stdout, text


def test_json_summary_gives_state_means_and_alerts_and_null_for_what_is_not_finite(tmp_path, watch):
    odd = {"loss": math.nan, "kl": math.inf, "peak_gib": {"a": math.nan}}
    rows = [*rows_of(29, truncated_fraction=0.5), step_row(30, truncated_fraction=0.5, **odd)]
    summary = summary_of(watch, make_run(tmp_path / "run", rows))
    assert (summary["state"], summary["step"], summary["total_steps"]) == ("running", 30, 40)
    assert summary["recent"]["reward"] == pytest.approx(0.45 + 0.4 * 25.5 / 40)
    assert summary["last"]["adapter_version"] == 30
    assert {"truncation", "loss not finite"} <= {alert["name"] for alert in summary["alerts"]}
    assert (summary["last"]["loss"], summary["last"]["kl"], summary["last"]["peak_gib"]) == (None, None, {"a": None})


def test_plot_writes_a_png_and_prints_its_path(tmp_path, watch):
    run = make_run(tmp_path / "run", [*rows_of(25), step_row(26, seconds=None, kl=None, reward_std=None)])
    done = watch(run, "--plot")
    assert (done.code, done.out.strip(), done.err) == (0, str(run / "health.png"), "")
    assert (run / "health.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in run.iterdir()) == ["config.json", "health.png", "metrics.jsonl"]


def test_plot_of_a_run_without_steps_says_so_and_exits_2(tmp_path, watch):
    done = watch(make_run(tmp_path / "run", []), "--plot")
    assert done.code == 2 and "no complete step yet" in done.err
    assert not (tmp_path / "run" / "health.png").exists()


def test_live_follow_sees_appended_lines_and_ends_by_itself(tmp_path, watch):
    run = make_run(tmp_path / "run", None)

    def train() -> None:
        time.sleep(0.2)
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
    assert done.code == 0, done.err
    first, *steps = done.out.splitlines()
    assert first == f"waiting for the first step in {run}/metrics.jsonl"
    assert [line.split()[1] for line in steps] == [f"{step}/6" for step in range(1, 7)]
    assert all(re.search(r"reward 0\.\d+  KL 0\.\d+  entropy", line) for line in steps)


@pytest.fixture
def followed(tmp_path):
    """`followed(rows)`: a run of 5 steps, and the command that follows it through a pipe, as a process."""

    def follow(count: int) -> tuple[Path, subprocess.Popen]:
        run, pipe = make_run(tmp_path / "run", rows_of(count, total=5)), subprocess.PIPE
        words = [*WATCH, str(run), "--interval", "0.05"]
        return run, subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)

    return follow


def test_live_follow_prints_the_steps_of_a_resumed_run_again(followed):
    run, process = followed(4)
    first = [process.stdout.readline().split()[1] for _ in range(4)]
    with open(run / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(step_row(step, total=5)) + "\n" for step in (3, 4, 5)))
    rest = [line.split()[1] for line in processes.finish(process)[0].splitlines()]
    assert process.returncode == 0
    assert (first, rest) == (["1/5", "2/5", "3/5", "4/5"], ["3/5", "4/5", "5/5"])


def test_ctrl_c_ends_with_exit_code_0(followed):
    _, process = followed(2)
    assert process.stdout.readline().startswith("step 1/5")
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in processes.finish(process)[1]
    assert process.returncode == 0


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
    processes.finish(process)
    assert process.returncode == 0
    os.close(leader)


def read_until(file: int, mark: bytes, timeout_s: float = 180.0) -> bytes:
    """What a terminal shows until `mark` appears, its other end closes, or the time is over."""
    shown, end = b"", time.monotonic() + timeout_s
    while mark not in shown and time.monotonic() < end:
        if select.select([file], [], [], 0.1)[0]:
            try:
                shown += os.read(file, 65536)
            except OSError:  # Linux reports the closed other end of a pseudo-terminal this way
                break
    return shown


def test_waits_with_a_message_while_there_is_no_log(tmp_path, watch):
    run = make_run(tmp_path / "run", None)
    assert "waiting for the first step" in watch(run, "--once").out
    assert summary_of(watch, run)["state"] == "waiting"


def test_a_directory_that_is_no_run_exits_2_and_names_the_nearest(tmp_path, watch):
    make_run(tmp_path / "grpo-tiny", rows_of(1))
    (tmp_path / "empty").mkdir()
    missing, empty = watch(tmp_path / "grpo-tyni", "--once"), watch(tmp_path / "empty")
    assert (missing.code, empty.code) == (2, 2)
    assert f"Did you mean {tmp_path / 'grpo-tiny'}?" in missing.err and "no config.json" in empty.err


@pytest.mark.parametrize(
    "arguments",
    [["--json"], ["--fail_on_alert"], ["--out", "."], ["--interval", "0"], ["--interval", "nan"], ["--onc"]],
)
def test_bad_arguments_exit_2(tmp_path, watch, arguments):
    assert watch(make_run(tmp_path / "run", rows_of(1)), *arguments).code == 2


def test_half_a_last_line_is_left_out_and_a_broken_line_is_counted(tmp_path):
    run = make_run(tmp_path / "run", rows_of(4))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('not json\n[1, 2]\n{"loss": 1}\n\n' + json.dumps(step_row(5))[:60])
    log = log_of(run)
    assert [row["step"] for row in log.rows] == [1, 2, 3, 4] and log.bad_lines == 3
    assert "3 unreadable lines skipped" in "\n".join(rendered(run, 80))


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


def test_a_rotated_log_goes_on_where_the_old_one_ended(tmp_path):
    run = make_run(tmp_path / "run", rows_of(8))
    log = log_of(run)
    (run / "metrics.jsonl").rename(run / "metrics.jsonl.1")
    assert not log.poll()
    with open(run / "metrics.jsonl", "w") as file:
        file.write(json.dumps(step_row(9)) + "\n" + json.dumps(step_row(10))[:30])
    assert log.poll()
    assert ([row["step"] for row in log.rows], log.resumed_at) == (list(range(1, 10)), [])
    # Cut in place, as copytruncate does it, in the middle of a line that was half read.
    (run / "metrics.jsonl").write_text(json.dumps(step_row(10)) + "\n")
    log.poll()
    assert [row["step"] for row in log.rows] == list(range(1, 11))


def test_a_log_that_was_replaced_is_read_anew(tmp_path):
    run = make_run(tmp_path / "run", rows_of(8))
    log = log_of(run)
    (run / "metrics.jsonl").write_text(json.dumps(step_row(1, reward=0.22)) + "\n")
    assert log.poll()
    assert ([(row["step"], row["reward"]) for row in log.rows], log.resumed_at) == ([(1, 0.22)], [])
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


def rendered(run: Path, width: int, height: int | None = None) -> list[str]:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(frame(RunDir(run), log_of(run), width, height))
    return console.file.getvalue().splitlines()


def write_completions(run: Path, step: int, texts: dict[str, float], whole: bool = True) -> None:
    (run / "completions").mkdir(exist_ok=True)
    mean = sum(texts.values()) / len(texts)
    rows = [
        {"problem_id": "p", "prompt": "1+1?", "completion": text, "rewards": {"math": paid}, "advantage": paid - mean}
        for text, paid in texts.items()
    ]
    text = "\n".join(map(json.dumps, rows)) + ("\n" if whole else "")
    (run / "completions" / f"step-{step:06d}.jsonl").write_text(text)


@pytest.mark.parametrize("height", [None, 60, 24, 16, 10, 6, 3])
@pytest.mark.parametrize("width", [40, 80, 132])
def test_the_page_fits_the_terminal_and_keeps_what_decides(tmp_path, width, height):
    server = {"sampler_k3": 1e-5, "effective_sample_size": 0.999, "canary_delta": 0.08, "heldout_accuracy": 0.5}
    quantized = {"quant_clip_fraction": 4.7e-5, "quant_peak_ratio": 1.33}
    ill = {"kl": 1.5, "truncated_fraction": 0.4, "rewards": {"math": 0.4, "boxed_format": 0.9}}
    run = make_run(tmp_path / "run", rows_of(30, **server, **quantized, **ill))
    write_completions(run, 30, {"right " * 100: 1.0, "so so": 0.5, "wrong\x1b[31m\nnot\u202ered": 0.0})
    lines = rendered(run, width, height)
    assert len(lines) <= (height or 999)
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    assert "step 30/40" in text and "\x1b[31m" not in text and "\u202e" not in text
    if height is None or height >= 16:
        assert (
            "KL climbing" in text and "truncation" in text and re.search(r"^ reward .*[▁▂▃▄▅▆▇█]", text, re.MULTILINE)
        )
    if height is None and width >= 80:
        wanted = ("held-out", "· math", "· boxed_form", "sampler k3", "eff. sample", "input clip", "4.7e-05")
        wanted += ("input peak", "1.33", "rollout", "peak GiB", "best", "worst")
        assert all(part in text for part in wanted)


def test_curves_that_a_run_does_not_have_take_no_line(tmp_path):
    text = "\n".join(rendered(make_run(tmp_path / "run", rows_of(5, clip_fraction=0.0)), 80))
    for label in ("held-out", "sampler k3", "eff. sample", "clipped", "input clip", "input peak", "· math"):
        assert label not in text, label


def test_phases_add_up_to_the_step_and_the_sync_is_not_counted_twice():
    seconds = {"rollout": 3.0, "sync": 1.0, "wake": 0.5, "reward": 0.2, "heldout": 0.8, "update": 5.0, "step": 10.0}
    found = phases({"seconds": seconds | {"rollout_hidden": 2.0, "environment": 2.9}})
    assert found == pytest.approx(
        {"wake": 0.5, "sync": 1.0, "rollout": 1.5, "heldout": 0.8, "reward": 0.2, "update": 5.0, "other": 1.0}
    )
    assert sum(found.values()) == pytest.approx(seconds["step"])
    assert [phases({"seconds": odd}) for odd in (None, [1, 2], {}, {"step": 3.0}, {"rollout": None})] == [{}] * 5


def test_the_newest_group_is_shown_best_median_worst(tmp_path):
    run = make_run(tmp_path / "run", rows_of(3))
    write_completions(run, 1, {"old": 1.0, "older": 0.0})
    write_completions(run, 3, {"b": 0.5, "a": 1.0, "c": 0.0})
    with open(run / "completions" / "step-000003.jsonl", "a") as file:
        file.write('not json\n[1]\n{"completion": 7}\n{"completion": "half a li')
    group = latest_group(RunDir(run))
    assert (group.step, group.prompt) == (3, "1+1?")
    assert {name: sample.text for name, sample in group.picks().items()} == {"best": "a", "median": "b", "worst": "c"}
    write_completions(run, 5, {"half": 1.0}, whole=False)
    assert latest_group(RunDir(run)).step == 3, "a file without a whole line is not shown yet"
    write_completions(run, 5, {"alone": 1.0})
    assert latest_group(RunDir(run)).picks().keys() == {"best", "worst"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("a\n\n b\tc", "a b c"),
        ("\x1b]0;title\x07\x1b[2J", "·]0;title··[2J"),
        ("\u202egnp.exe\u200b\ud83d", "·gnp.exe··"),
        ("begin " + "x" * 5000 + " the end", "begin … xxxxx the end"),
    ],
)
def test_an_answer_becomes_one_harmless_line_with_its_end(text, shown):
    assert one_line(text, 22) == shown
    assert len(one_line(text, 22)) <= 22


def test_a_silent_run_says_how_long_and_whether_a_process_still_holds_it(tmp_path):
    rows = rows_of(10)
    for row in rows:
        row["time"] -= 2 * 3600 + 7 * 60
    run = make_run(tmp_path / "run", rows)

    def said() -> str:
        return "\n".join(rendered(run, 120))

    assert re.search(r"no line for 2 h 0[78] min: the run has stopped, or a step is stuck", said())
    assert trainer_pid(RunDir(run)) is None
    lock = lock_run(RunDir(run))
    assert trainer_pid(RunDir(run)) == os.getpid()
    assert f"process {os.getpid()} still holds it, so a step is stuck" in said()
    lock.close()
    assert trainer_pid(RunDir(run)) is None
    lock_run(RunDir(run)).close()  # looking took nothing from a trainer


def test_a_run_that_is_resumed_with_more_steps_has_not_ended_with_its_last_line(tmp_path):
    log = log_of(make_run(tmp_path / "run", rows_of(6, total=6)))
    assert progress(log)["state"] == "finished"
    lock = lock_run(RunDir(tmp_path / "run"))
    state = progress(log)
    assert (state["state"], state["time_left_s"]) == ("running", 0.0)
    lock.close()
    assert progress(log)["state"] == "finished"


@pytest.mark.parametrize("value", [None, True, "x", [1], {}, {"a": "b"}, 10**299, math.nan, 1e308, 5])
def test_values_of_another_kind_break_no_page(tmp_path, value):
    odd = {key: value for key in step_row(1) if key != "step"}
    run = make_run(tmp_path / "run", [*rows_of(12), *(step_row(step) | odd for step in (13, 14))])
    assert any("step 14" in line for line in rendered(run, 80))


def test_fail_on_alert_exits_1_when_a_rule_fires(tmp_path, watch):
    sound, ill = make_run(tmp_path / "sound", rows_of(30)), make_run(tmp_path / "ill", rows_of(30, kl=2.0))
    assert watch(sound, "--once", "--json", "--fail_on_alert").code == 0
    done = watch(sound, ill, "--once", "--json", "--fail_on_alert")
    assert done.code == 1
    assert [len(run["alerts"]) for run in json.loads(done.out)["runs"]] == [0, 1]


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
    ("write", "values"),
    [
        (show, {None: "–", math.nan: "NaN", math.inf: "inf", 0.0: "0", 0.45678: "0.457", 12345.6: "12,346"}),
        (duration, {0: "0 s", 59.4: "59 s", 59.6: "1 min 00 s", 3700: "1 h 01 min", 90000: "1 d 1 h"}),
    ],
)
def test_numbers_and_durations_are_short(write, values):
    assert {value: write(value) for value in values} == values


def test_an_episode_is_shown_with_what_the_environment_said():
    from launch.watching.samples import _said

    call = {"type": "function", "function": {"name": "guess", "arguments": {"number": 5}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "guess", "content": "higher"},
        {"role": "assistant", "content": "Found."},
    ]
    row = {"completion": "Found.", "messages": messages}
    assert _said(row) == 'guess({"number": 5}) [tool] higher Found.'
    assert _said({"completion": "Found."}) == _said({**row, "messages": "torn"}) == "Found."
