"""An evaluation of `--adapter`: one command from an adapter of another program to a verdict on it."""

import json
from pathlib import Path

import pytest

from eval import gate
from eval.run import main
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir
from kit.core.run_files import read_json
from tests.unit.test_merge_imported import peft_adapter

FEW = ["--formats", "bf16", "--eval.max_new_tokens", "4", "--eval.bootstrap_samples", "100"]


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> tuple[list[str], RunDir]:
    """The options of an evaluation of four problems, and the run that it made. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("judged")
    peft_adapter(folder / "adapter")
    rows = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(4)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--adapter", str(folder / "adapter"), "--out", str(folder / "run")]
    options += ["--data.eval_path", str(folder / "test.jsonl"), *FEW]
    assert main([*options, "--dry_run"]) == 0 and not (folder / "run").exists()
    assert main(options) == 0
    return options, RunDir(folder / "run")


def test_an_adapter_without_a_run_is_imported_merged_and_measured_by_one_command(judged, capsys):
    options, run = judged
    result = read_json(run.eval_file)
    assert (result["n"], result["trained_policy"], result["adapter_version"]) == (4, "imported", 0)
    assert {policy: list(cells) for policy, cells in result["matrix"].items()} == {"base": ["bf16"], "grpo": ["bf16"]}
    assert result["base_hash"] == run.base()["hash"] and {"difference", "interval"} <= set(result["gain"]["bf16"])
    assert run.config()["data"]["eval_path"] == options[options.index("--data.eval_path") + 1]
    # The gate needs no flag: the run's configuration has the problems and how they were asked.
    assert gate.main(["--run", str(run.path), "--eval.gate.format", "bf16"]) == 1
    assert "gain in bf16" in (said := capsys.readouterr().out) and "not promoted" in said


def test_a_second_evaluation_reuses_the_run_and_merges_only_what_is_missing(judged, capsys):
    options, run = judged
    before = (run.merged / "grpo/bf16/manifest.json").stat().st_mtime_ns
    assert main([*options, "--reuse"]) == 0
    assert "made of this adapter before" in (said := capsys.readouterr().out) and "update kept" not in said
    formats = [*options[: options.index("--formats") + 2], "fp8", *options[options.index("--formats") + 2 :]]
    assert main([*formats, "--reuse"]) == 0
    assert "update kept" in capsys.readouterr().out
    assert set(read_json(run.eval_file)["matrix"]["grpo"]) == {"bf16", "fp8"}
    assert (run.merged / "grpo/bf16/manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--data.eval_path": "none.jsonl"}, "none.jsonl"),
        ({"--formats": "bf61"}, "eval.formats must be some of"),
        ({"--data.answer_format": "boxed"}, "has no balanced"),
        ({"--eval.batch_size": "0"}, r"eval\.batch_size \(0\)"),
        ({"--adapter": "no/adapter"}, "holds no adapter"),
        ({"--base": "no/base"}, "no/base"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_a_run_is_made(judged, tmp_path, changed, message):
    options, _ = judged
    given = dict(zip(options[::2], options[1::2], strict=True)) | {"--out": str(tmp_path / "run")} | changed
    with pytest.raises(BadInput, match=message):
        main([word for pair in given.items() for word in pair])
    assert not (tmp_path / "run").exists()


def test_an_adapter_without_problems_is_told_the_key_of_held_out_ones(judged, tmp_path):
    options, _ = judged
    with pytest.raises(BadInput, match=r"no data set is named: set data\.eval_path \(held-out problems alone\)"):
        main(["--adapter", options[1], "--out", str(tmp_path / "run"), *FEW])


def test_options_of_an_adapter_do_not_go_with_a_run(judged, tmp_path):
    _, run = judged
    with pytest.raises(BadInput, match="--base_storage is of an adapter without a run"):
        main(["--run", str(run.path), "--base_storage", "nf4"])
    with pytest.raises(BadInput, match=r"--run is missing.*--adapter DIR, and --out"):
        main(["--formats", "bf16"])
    with pytest.raises(BadInput, match="no run directory"):
        main(["--run", str(Path(tmp_path) / "none")])
