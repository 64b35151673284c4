"""eval.qat_study: what it runs in which order, what it leaves out, and how its table is computed."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval import plots, qat_study
from kit.core.config.recipe import DISTILLATION, PLAIN, QUANTIZED
from kit.core.errors import BadInput, CheckFailed
from kit.core.file_kinds import CELL, EVALUATION, MANIFEST
from kit.core.run_directory import file_hash, write_record
from tests.unit.filled import filled

CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
PROBLEMS = 60
FACTS = {"sampler_k3": 0.001, "seconds": {"step": 1.5, "update": 0.5}, "peak_gib": {"rollout": 2.0, "update": 3.0}}


def options(out: Path, *words: str) -> tuple:
    return qat_study.parse_arguments(["--config", CONFIG, "--out", str(out), "--train.max_steps", "12", *words])


def rows(right: int) -> str:
    """An evaluation's jsonl in which the first `right` problems are solved."""
    fields = {"completion": "", "tokens": 1, "ended": True, "hit_max_tokens": False, "parsed": True, "answer": "1"}
    fields |= {"gold": "1", "correct_strict": True, "prompt_leak": False}
    return "".join(json.dumps(fields | {"problem_id": f"p{n}", "correct": n < right}) + "\n" for n in range(PROBLEMS))


def write_cell(run: Any, name: str, text: str) -> None:
    """The completions of GRPO in a format, and the header with their hash."""
    file = run.path / "eval" / f"grpo-{name}.jsonl"
    file.write_text(text)
    write_record(file.with_name(f"grpo-{name}.meta.json"), filled(CELL, {"records": file_hash(file)}))


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study whose commands leave what the real ones leave; `asked` has their words."""
    made, asked = qat_study.Study(*options(tmp_path, "--seeds", "0", "1", "--formats", "nvfp4a16", "fp8")), []

    def command(run: Any, what: str, words: list[str]) -> None:
        asked.append((run.path.name, what, words))
        right = {"ptq": 30, "qat": 45, "qad": 36}[run.path.name.partition("-")[0]]
        if what == "train":
            steps = made.options.distill_steps if DISTILLATION in words else 12
            adapter = run.adapter_dir(steps)
            adapter.mkdir(parents=True)
            (adapter / "manifest.json").write_text(json.dumps({"kind": "adapter", "files": {}}))
            curve = [0.0] * 6 + [1.0] * (steps - 6)
            run.metrics_file.write_text(
                "".join(json.dumps({"step": step, "reward": one, **FACTS}) + "\n" for step, one in enumerate(curve, 1))
            )
        elif what == "merge":
            for name in words[words.index("--format") + 1 :]:
                folder = run.merged / "grpo" / name
                folder.mkdir(parents=True)
                (folder / "manifest.json").write_text(json.dumps(filled(MANIFEST, {"verify": {"mean_kl": 0.5}})))
        else:
            names = words[words.index("--formats") + 1 : words.index("--samples")]
            run.eval_file.write_text(
                json.dumps(filled(EVALUATION, {"matrix": {"grpo": {name: {} for name in names}}}))
            )
            (run.path / "eval").mkdir(exist_ok=True)
            for name in names:
                write_cell(run, name, rows(right))

    monkeypatch.setattr(made, "command", command)
    made.asked = asked
    return made


def test_every_format_is_trained_for_and_distilled_into_from_the_plain_run_of_its_seed(study):
    assert study.everything() == []
    trained = {name: words for name, what, words in study.asked if what == "train"}
    assert len(trained) == 2 + 2 * 2 * 2
    assert PLAIN in trained["ptq-1"] and "--run.seed=1" in trained["ptq-1"]
    assert QUANTIZED in trained["qat-fp8-1"] and "--policy.quant_cfg=fp8" in trained["qat-fp8-1"]
    distilled = trained["qad-nvfp4a16-1"]
    teacher = study.run("ptq", 1).newest_adapter()
    assert DISTILLATION in distilled and f"--distill.teacher_adapter={teacher}" in distilled
    assert f"--policy.init_adapter={teacher}" in distilled and "--train.max_steps=40" in distilled


def test_a_dry_run_prints_every_command_and_leaves_nothing(tmp_path, capsys):
    words = ["--config", CONFIG, "--out", str(tmp_path / "study"), "--seeds", "0", "1", "--formats", "fp8"]
    keys = ["--train.max_steps", "12", "--model.path", str(tmp_path)]
    assert qat_study.main([*words, "--dry_run", *keys]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 * 3 * 3 and not (tmp_path / "study").exists()
    assert sum("accelerate.commands.launch" in line for line in said) == 6
    (distilled,) = [line for line in said if DISTILLATION in line and "run.seed=1" in line]
    assert "distill.teacher_adapter=" in distilled and "ptq-1/adapters/v000012" in distilled


def test_what_is_there_is_kept(study):
    study.everything()
    study.asked.clear()
    assert study.everything() == [] and study.asked == []
    study.run("qat", 0, "fp8").eval_file.unlink()
    assert study.everything() == [] and [one[:2] for one in study.asked] == [("qat-fp8-0", "eval")]


def test_a_format_that_is_added_later_is_merged_alone(study):
    study.everything()
    study.asked.clear()
    study.options.formats.append("w4a16")
    assert study.everything() == []
    merges = {name: words[words.index("--format") + 1 :] for name, what, words in study.asked if what == "merge"}
    assert merges["ptq-0"] == ["w4a16"] and merges["qat-w4a16-0"] == ["bf16", "w4a16"]
    # An interrupted merge may have left the base's checkpoint, which merge would refuse to write again.
    assert all("--overwrite" in words for _, what, words in study.asked if what == "merge")


def test_the_table_compares_with_the_plain_run_in_the_same_format(study):
    study.everything()
    found = qat_study.collect(study)
    assert list(found) == ["bf16", "nvfp4a16", "fp8"] and list(found["bf16"]) == ["ptq"]
    row = found["fp8"]["qat"]
    assert row["accuracy"] == 0.75 and row["by_seed"] == [0.75, 0.75] and row["kl"] == [0.5, 0.5]
    assert row["change"]["difference"] == pytest.approx(0.25) and row["change"]["interval"][0] > 0
    assert row["curve"] == [{"first": 0.4, "last": 0.6, "steps": 12}] * 2
    assert row["rewards"] == [[0.0] * 6 + [1.0] * 6] * 2
    assert row["costs"] == [pytest.approx({"k3": 0.001, "step_s": 1.5, "peak_gib": 3.0})] * 2
    (line,) = [
        line for line in qat_study.markdown(found, "head").splitlines() if line.startswith("| fp8 | qat | 75.0")
    ]
    assert line.endswith("| 1.0e-03 | 1.50 | 3.00 |")


def test_the_curves_are_of_all_seeds_and_a_distillation_goes_on_where_plain_grpo_ended(study, tmp_path, monkeypatch):
    drawn, make = [], plots.reward_curves
    monkeypatch.setattr(plots, "reward_curves", lambda panels: drawn.append(make(panels)) or drawn[0])
    study.everything()
    qat_study.draw(qat_study.collect(study), 12, tmp_path / "rewards.svg")
    assert b"<svg" in (tmp_path / "rewards.svg").read_bytes()
    first, second = drawn[0].axes
    assert (first.get_title(), second.get_title()) == ("nvfp4a16", "fp8")
    lines = first.get_lines()
    assert len(lines) == 3 * (2 + 1)  # two seeds and their mean, of each arm
    assert [int(line.get_xdata()[0]) for line in lines[2::3]] == [1, 1, 13]
    assert lines[2].get_ydata()[-1] == pytest.approx(0.6)


def failing_at(study: Any, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, str]) -> None:
    """Make one command, (run, what), fail."""
    command = study.command

    def failing(run: Any, what: str, words: list[str]) -> None:
        if (run.path.name, what) == broken:
            raise CheckFailed(f"{broken[0]}: {what} ended with exit code 1")
        command(run, what, words)

    monkeypatch.setattr(study, "command", failing)


def test_a_run_that_fails_leaves_the_others(study, monkeypatch):
    failing_at(study, monkeypatch, ("qat-fp8-0", "train"))
    assert study.everything() == ["qat-fp8-0: train ended with exit code 1"]
    row = qat_study.collect(study)["fp8"]["qat"]
    assert row["seeds"] == [1] and row["change"]["over_seeds"] is None


def test_nothing_is_distilled_from_a_plain_run_that_failed(study, monkeypatch):
    failing_at(study, monkeypatch, ("ptq-0", "train"))
    assert study.everything() == ["ptq-0: train ended with exit code 1"]
    names = {name for name, _, _ in study.asked}
    assert {"qat-fp8-0", "ptq-1", "qad-fp8-1"} <= names and not {"ptq-0", "qad-fp8-0"} & names
    assert [row["seeds"] for row in qat_study.collect(study)["fp8"].values()] == [[1], [0, 1], [1]]


def test_a_distillation_needs_the_plain_runs_adapter_and_not_its_verdict(study, monkeypatch):
    failing_at(study, monkeypatch, ("ptq-0", "merge"))
    assert study.everything() == ["ptq-0: merge ended with exit code 1"]
    assert ("qad-fp8-0", "eval") in [one[:2] for one in study.asked]


def test_an_answer_that_could_not_be_compared_is_left_out(study):
    study.everything()
    lines = rows(45).splitlines()
    lines[0] = lines[0].replace('"correct": true', '"correct": null')
    write_cell(study.run("qat", 0, "fp8"), "fp8", "\n".join(lines) + "\n")
    row = qat_study.collect(study)["fp8"]["qat"]
    assert row["by_seed"] == pytest.approx([44 / 59, 45 / 60]) and row["accuracy"] == pytest.approx(44 / 59)
    assert row["change"]["difference"] == pytest.approx(15 / 59)  # of the problems that all runs decided


def test_a_difference_is_of_the_seeds_that_both_arms_have(study):
    study.everything()
    write_cell(study.run("ptq", 1), "fp8", rows(PROBLEMS))
    assert qat_study.collect(study)["fp8"]["qat"]["change"]["difference"] == pytest.approx(0.0)
    study.run("qat", 1, "fp8").eval_file.unlink()
    change = qat_study.collect(study)["fp8"]["qat"]["change"]
    assert change["difference"] == pytest.approx(0.25) and change["over_seeds"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy.quant_cfg", "fp8"], "starts from the plain run"),
        (["--seeds", "1", "1"], "names a seed twice"),
        (["--eval.temperature", "0"], "all --samples are the same"),
        (["--launcher", "accelerate_configs/none.yaml"], "none.yaml does not exist"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tmp_path, words, said):
    with pytest.raises(BadInput, match=said):
        qat_study.Study(*options(tmp_path, *words))


def test_runs_with_servers_share_a_base_that_is_written_first_and_no_port(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[2])
    words = ["--seeds", "0", "1", "--formats", "w4a16", "--cards", "1", "0", "--dry_run", "--port", "8900"]
    keys = ["--rollout.backend=server", f"--server.base={tmp_path / 'base'}", "--server.weights=bf16"]
    made = qat_study.Study(*options(tmp_path / "study", *words, *keys))
    assert made.everything() == []
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("python -m merge base --config")
    trained = [line for line in lines if "-m launch.up" in line]
    assert len(trained) == 6 and not any("accelerate.commands.launch" in line for line in lines)
    for number, line in enumerate(trained):
        assert f"127.0.0.1:{8900 + number}'" in line.replace("'\"'\"'", "'")
        name = line.partition("--run.name=")[2].split()[0]
        card = made.card(made.run(name[:3], int(name[-1]), name[4:-2] or None))
        assert f"train.gpus=[{card}]" in line and f"server.gpus=[{card}]" in line
    (tmp_path / "base").mkdir()
    made.everything()
    assert "merge base" not in capsys.readouterr().out
