"""The study over seeds: which commands are left to do, and what its table says."""

import json
from pathlib import Path

import pytest

from kit.core.errors import BadInput
from kit.core.file_kinds import EVALUATION, MANIFEST, SERVING
from recipes import study
from tests.unit.filled import filled

CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
FORMATS = ["bf16", "fp8", "nf4"]


def cell(accuracy: float) -> dict:
    return {"accuracy": accuracy, "interval": [accuracy - 0.05, accuracy + 0.05]}


def change(difference: float) -> dict:
    return {"difference": difference, "interval": [difference - 0.02, difference + 0.02]}


def write_run(path: Path, gain: float) -> None:
    """A finished run: trained, merged, evaluated."""
    for name in (
        "adapters/v000080",
        *(f"merged/{policy}/{form}" for policy in study.POLICIES for form in ("bf16", "fp8")),
    ):
        (path / name).mkdir(parents=True)
        (path / name / "manifest.json").write_text(
            json.dumps(filled(MANIFEST, {"promoted": name.endswith("grpo/fp8")}))
        )
    rows = [{"step": step, "reward": 0.5 if step <= 10 else 0.9} for step in range(1, 21)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    matrix = {"base": {name: cell(0.4) for name in FORMATS}, "grpo": {name: cell(0.4 + gain) for name in FORMATS}}
    result = {"n": 100, "matrix": matrix, "gain": {name: change(gain) for name in FORMATS}, "versions": {"torch": "1"}}
    result["gain_survival"] = {"fp8": change(-gain / 10), "nf4": change(0.0)}
    (path / "eval.json").write_text(json.dumps(filled(EVALUATION, result)))


def make(tmp_path, *arguments: str) -> study.Study:
    base = ["--config", CONFIG, "--formats", *FORMATS, "--run.output_dir", str(tmp_path / "tiny")]
    return study.Study(*study.parse_arguments([*base, *arguments]))


def names(commands) -> list[str]:
    return [name.partition(": ")[2] for name, _, _ in commands]


def test_a_new_seed_takes_the_whole_path_and_a_finished_one_only_judgement(tmp_path):
    found = make(tmp_path, "--seeds", "0", "1", "--serving")
    assert names(found.commands(0)) == ["GRPO", "merge", "layers", "eval", "gate", "serving", "report"]
    assert "serving" not in names(found.commands(1)), "one seed is enough for the engine's speed"
    write_run(found.runs[1], 0.3)
    assert names(found.commands(1)) == ["layers", "gate", "report"]


def test_an_interrupted_benchmark_of_serving_is_repeated(tmp_path):
    found = make(tmp_path, "--serving")
    write_run(found.runs[0], 0.3)
    file = found.runs[0] / "serving.json"
    file.write_text(json.dumps(filled(SERVING, {"formats": {"bf16": {}}, "failed": {}})))
    assert "serving" in names(found.commands(0))
    file.write_text(json.dumps(filled(SERVING, {"formats": {"bf16": {}}, "failed": {"fp8": {}}})))
    assert "serving" not in names(found.commands(0))


def test_an_interrupted_training_is_resumed(tmp_path):
    found = make(tmp_path)
    found.runs[2].mkdir(parents=True)
    (_, train, _), *_ = found.commands(2)
    assert not {"--resume", "--overwrite"} & set(train), "nothing was trained yet"
    (found.runs[2] / "base.json").write_text("{}")
    (_, train, _), *_ = found.commands(2)
    assert train[-1] == "--overwrite", "there is no checkpoint to go on from"
    (found.runs[2] / "checkpoints" / "step-000002").mkdir(parents=True)
    (_, train, _), *_ = found.commands(2)
    assert train[-1] == "--resume" and str(found.runs[2]) in train and "--run.seed" in train


def test_the_table_holds_mean_and_range_over_the_seeds(tmp_path):
    runs = {seed: tmp_path / str(seed) for seed in (0, 1)}
    for path, gain in zip(runs.values(), (0.2, 0.4), strict=True):
        write_run(path, gain)
    result = study.collect(runs, FORMATS)
    assert result["over_seeds"]["fp8"]["gain"] == pytest.approx({"mean": 0.3, "min": 0.2, "max": 0.4})
    assert result["over_seeds"]["fp8"]["survival"]["mean"] == pytest.approx(-0.03)
    text = study.markdown({**result, "command": ["python"], "date": "2026-01-01"})
    assert "| fp8 | 40.0 (40.0 to 40.0) | 70.0 (60.0 to 80.0) | +30.0 (+20.0 to +40.0) | -3.0 (-4.0 to -2.0) |" in text
    assert "| 1 | 0.50 → 0.90 | fp8 | 40.0 [35.0, 45.0] | 80.0 [75.0, 85.0] | +40.0 [+38.0, +42.0] |" in text
    assert text.count("| yes |") == 2


def test_a_study_without_bf16_is_refused(tmp_path):
    with pytest.raises(BadInput, match="bf16"):
        make(tmp_path, "--formats", "fp8")
