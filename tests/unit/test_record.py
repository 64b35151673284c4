"""What a run writes about itself: strict JSON, whole lines, a fixed order, nothing told twice after a resume."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest

from kit.core.config.load import load_config
from kit.core.errors import BadInput, MachineFailed
from kit.core.run_directory import RunDir
from kit.core.run_files import read_json
from kit.train import record
from kit.train.checkpoint import rewind
from kit.train.record import (
    Recorder,
    add_counts,
    drop_steps_after,
    git_revision,
    step_line,
    unknown_so_far,
    write_config,
)

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "recipes" / "configs" / "grpo-tiny-nf4-cpu.yaml"
RECORD = {
    "step": 3,
    "total_steps": 80,
    "reward": 0.25,
    "reward_std": 0.5,
    "kl": 0.0123456,
    "entropy": 1.5,
    "zero_spread_fraction": 0.125,
    "clip_fraction": 0.0,
    "truncated_fraction": 0.5,
    "completion_length": 31.25,
    "grad_norm": 0.75,
    "seconds": {"rollout": 1.0, "reward": 0.1, "sync": 0.0, "update": 2.0, "step": 3.1},
}


def recorder(folder: Path, *overrides: str) -> Recorder:
    return Recorder(RunDir(folder), load_config(CONFIG, list(overrides)))


def test_the_line_of_a_step_names_its_numbers_in_a_fixed_order():
    line = step_line(RECORD)
    assert line.startswith(
        "step 3/80 reward 0.250 std 0.500 kl 0.01235 entropy 1.500 zero_spread 0.12 clipped 0.000 truncated 0.50 "
        "length 31.2 grad_norm 0.750 seconds 3.10 (rollout 1.00"
    )
    assert line.endswith("update 2.00)") and "\n" not in line


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_number_that_is_missing_or_not_finite_is_shown_as_such_and_never_as_zero(value):
    assert "reward n/a std" in step_line(RECORD | {"reward": value})
    without = {key: entry for key, entry in RECORD.items() if key != "kl"}
    assert "kl n/a entropy" in step_line(without)


def test_metrics_are_strict_json_whatever_the_numbers(tmp_path, read_jsonl, capsys):
    written = recorder(tmp_path)
    written.step(RECORD | {"loss": math.nan, "rewards": {"math": math.inf, "form": 0.5}})
    written.step(RECORD | {"step": 4})
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert rows[0]["loss"] is None and rows[0]["rewards"] == {"math": None, "form": 0.5}
    assert [row["step"] for row in rows] == [3, 4]
    lines = (tmp_path / "logs" / "trainer.log").read_text().splitlines()
    assert lines == capsys.readouterr().out.splitlines() and len(lines) == 2


def test_a_line_is_not_written_twice_where_prints_go_to_the_log(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    with open(tmp_path / "logs" / "trainer.log", "a") as log:
        monkeypatch.setattr("sys.stdout", log)
        recorder(tmp_path).say("once")
    assert (tmp_path / "logs" / "trainer.log").read_text() == "once\n"


def test_completions_are_capped_and_a_step_told_again_replaces_the_first(tmp_path, read_jsonl):
    written = recorder(tmp_path, "--watch.completions_per_step", "3")
    rows = [{"problem_id": str(index), "completion": 'a\n"b" é 日本', "advantage": math.nan} for index in range(10)]
    written.completions(7, rows)
    written.completions(7, rows[5:])
    found = read_jsonl(tmp_path / "completions" / "step-000007.jsonl")
    assert [row["problem_id"] for row in found] == ["5", "6", "7"]
    assert found[0]["completion"] == 'a\n"b" é 日本' and found[0]["advantage"] is None


def test_a_line_separator_in_a_completion_does_not_cut_its_line(tmp_path):
    recorder(tmp_path).completions(1, [{"completion": "a\u2028b\u2029c\x85d\x0be"}] * 2)
    lines = (tmp_path / "completions" / "step-000001.jsonl").read_text().splitlines()
    assert [json.loads(line)["completion"] for line in lines] == ["a\u2028b\u2029c\x85d\x0be"] * 2


def test_completions_come_at_the_first_step_and_every_so_many(tmp_path):
    written = recorder(tmp_path, "--watch.completions_every", "5")
    assert [step for step in range(1, 16) if written.wants_completions(step)] == [1, 5, 10, 15]
    reused = recorder(tmp_path, "--watch.completions_every", "5", "--train.num_iterations", "2")
    # A batch is generated at every other step, so what the 10th would have shown is in the 11th.
    assert [step for step in range(1, 16, 2) if reused.wants_completions(step)] == [1, 5, 11, 15]
    never = recorder(tmp_path, "--watch.completions_every", "0")
    assert not any(never.wants_completions(step) for step in range(1, 16))


@pytest.mark.parametrize("what", ["metrics", "ledger", "completions", "log"])
def test_a_full_disk_while_a_step_is_written_is_a_fault_of_the_machine(tmp_path, what):
    written = recorder(tmp_path)
    run = written.run
    run.completions.mkdir()
    target = {"metrics": run.metrics_file, "ledger": run.ledger_file, "log": run.logs / "trainer.log"}
    with pytest.raises(MachineFailed, match=r"writing .* failed: .*No space left.*--resume"):
        if what == "completions":
            # completions() starts its file anew, so the device is put in its place when it opens it.
            path = run.completions / "step-000001.jsonl"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Path, "unlink", lambda self, missing_ok: self.symlink_to("/dev/full"))
                assert not path.exists()
                written.completions(1, [{"completion": "x"}])
        target[what].symlink_to("/dev/full")
        written.ledger(1, ["a"])
        written.step(RECORD)


def test_rewinding_drops_later_steps_and_a_line_cut_by_a_crash(tmp_path, read_jsonl):
    run = RunDir(tmp_path)
    for path in (run.metrics_file, run.ledger_file):
        lines = ({"step": step, "problem_ids": [f"p{step}"]} for step in range(1, 6))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "rew')
    assert rewind(run, run.checkpoints / "step-000003") == 3
    for path in (run.metrics_file, run.ledger_file):
        assert [row["step"] for row in read_jsonl(path)] == [1, 2, 3]
        assert path.read_text().endswith("\n")
    (resume,) = read_jsonl(run.resumes_file)
    assert resume["step"] == 3, "behind it are problems that are sampled again"
    assert resume["sampled_again"] == [{"step": step, "problem_ids": [f"p{step}"]} for step in (4, 5)]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ledger.jsonl", "metrics.jsonl", "resumes.jsonl"]


@pytest.mark.parametrize("text", ['{"step": null}\n', '{"other": 1}\n', "\x00\x00\n"])
def test_a_whole_line_that_is_no_step_stops_a_resume(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + text)
    with pytest.raises(BadInput, match=r"metrics\.jsonl:2 is (not a line of a step|damaged)"):
        drop_steps_after(path, 3)
    assert path.read_text() == '{"step": 1}\n' + text


@pytest.mark.parametrize("text", ["", "\n\n", "\x00\x00"])
def test_lines_that_are_no_step_are_dropped(tmp_path, text, read_jsonl):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + text)
    drop_steps_after(path, 3)
    assert read_jsonl(path) == [{"step": 1}]
    drop_steps_after(tmp_path / "absent.jsonl", 3)
    assert not (tmp_path / "absent.jsonl").exists()


def test_rewards_that_could_not_be_computed_add_up_by_function_and_reason():
    parts = [{"math": {"late": 2}}, {}, {"math": {"late": 1, "crash": 3}, "code": {"late": 4}}, {"code": {}}]
    assert add_counts(parts) == {"math": {"late": 3, "crash": 3}, "code": {"late": 4}}
    assert parts[0] == {"math": {"late": 2}}


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([], {}),
        ([{"step": 1, "unknown_rewards": {"math": {"late": 1}}}], {"math": {"late": 1}}),
        ([{"step": 1, "unknown_rewards": {"math": {}}}, {"step": 2, "unknown_rewards": {"math": {"late": 3}}}], None),
        ([{"step": 1, "unknown_rewards": {"math": {"late": 1}}}, {"step": 2}], {}),
    ],
)
def test_a_resume_takes_the_counts_of_the_last_step(tmp_path, rows, found):
    path = tmp_path / "metrics.jsonl"
    assert unknown_so_far(path) == {}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert unknown_so_far(path) == ({"math": {"late": 3}} if found is None else found)


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_revision_is_the_commit_and_says_when_files_differ_from_it(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "__file__", str(tmp_path / "record.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_revision() is None

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "record.py").write_text("1\n")
    git("add", "-A")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    assert git_revision() == commit and len(commit) == 40
    (tmp_path / "record.py").write_text("2\n")
    assert git_revision() == f"{commit}+dirty"


def test_config_json_holds_what_is_needed_to_repeat_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/recipes/grpo_qlora.py", "--config", "x.yaml"])
    run = RunDir(tmp_path / "run")
    write_config(load_config(CONFIG), run, processes=4)
    facts = read_json(run.config_file)
    assert facts.keys() >= {"config", "versions", "machine", "processes", "git_revision", "seed", "command", "created"}
    assert facts["command"] == ["grpo_qlora.py", "--config", "x.yaml"] and facts["processes"] == 4
    assert facts["config"]["train"]["learning_rate"] == 1e-3 and facts["config"]["run"]["seed"] == facts["seed"]
    assert {"python", "torch", "trl", "peft", "bitsandbytes", "transformers"} <= facts["versions"].keys()
    assert facts["machine"]["cores"] >= 1
    if shutil.which("git") and (ROOT / ".git").exists():
        assert len(facts["git_revision"].removesuffix("+dirty")) == 40
