"""The path of the quickstart by the commands it types, on a run of six steps of a model made in seconds."""

import re

import pytest

from kit.core.run_directory import RunDir, read_manifest
from kit.core.run_files import read_json
from recipes.quickstart import judging_steps, summary
from tests.conftest import ROOT, Finished, make_base, run_here

FORMATS = ("nf4", "bf16", "fp8", "w4a16")


@pytest.fixture(scope="module")
def path(tmp_path_factory, recipe, recipe_arguments) -> tuple[RunDir, dict[str, Finished]]:
    """A run after every command, and what each of them said."""
    folder = tmp_path_factory.mktemp("path")
    run, base = RunDir(folder / "run"), folder / "base"
    # w4a16 packs groups of 128 inputs, so the width is the quickstart's; the sums are easier.
    size = ("--layers", "1", "--limit", "10", "--problems", "800", "--heldout", "24")
    make_base(base, "--steps", "150", "--processes", "1", *size)
    changes = {"data.eval_split": "heldout", "eval.batch_size": 24, "train.learning_rate": 3e-3}
    trained = recipe(recipe_arguments(base, run.path, changes))
    assert trained.code == 0, trained.err
    done = {}
    for name, (_, *words), accepted in judging_steps(run.path):
        done[name] = run_here(*words)
        assert done[name].code in accepted, f"{name}: {done[name].err[-3000:]}"
    return run, done


def test_every_file_the_path_promises_is_there_and_whole(path):
    run, _ = path
    assert (run.path / "health.png").read_bytes().startswith(b"\x89PNG")
    assert (run.path / "eval.png").read_bytes().startswith(b"\x89PNG")
    assert all(name in (run.path / "eval.md").read_text() for name in FORMATS)
    merged = {str(place.parent.relative_to(run.merged)) for place in run.merged.rglob("manifest.json")}
    others = {f"{policy}/{name}" for policy in ("base", "grpo") for name in FORMATS if name != "nf4"}
    assert merged - {"grpo/nf4"} == others
    base = read_json(run.base_file)["hash"]
    for place in merged:
        assert read_manifest(run.merged / place, "checkpoint", deep=True)["base_hash"] == base
    written = {place.stem for place in (run.path / "eval").glob("*.jsonl")}
    assert written == {f"{policy}-{name}" for policy in ("base", "grpo") for name in FORMATS}


def test_nf4_of_the_policy_is_written_exactly_when_it_keeps_half_of_the_update(path):
    run, done = path
    place = run.merged / "grpo" / "nf4"
    if place.exists():
        assert done["merge to nf4"].code == 0
        assert read_manifest(place, "checkpoint", deep=True)["retained_update"] >= 0.5
    else:
        assert done["merge to nf4"].code == 1
        share = re.search(r"refused: grpo nf4: .* keeps (\d+\.\d)% of the update", done["merge to nf4"].out)
        assert float(share[1]) < 50.05


def test_the_matrix_has_every_cell_and_the_gain_is_that_of_its_cells(path):
    run, _ = path
    result = read_json(run.eval_file)
    assert result["n"] == 24
    for name in FORMATS:
        base, grpo = (result["matrix"][policy][name]["accuracy"] for policy in ("base", "grpo"))
        assert result["gain"][name]["difference"] == pytest.approx(grpo - base, abs=1e-9)
    assert result["adapter_version"] == 6
    assert "sampled at temperature 1, seed 0, at most" in (run.path / "eval.md").read_text()


def test_the_gate_says_no_exactly_when_the_artifact_is_not_promoted(path):
    run, done = path
    promoted = read_manifest(run.merged / "grpo" / "fp8")["promoted"]
    assert promoted == (done["gate"].code == 0)
    assert ("not promoted: " in done["gate"].out) == (not promoted)
    # Six steps on 24 problems show no gain of ten points.
    assert done["gate"].code == 1


def test_the_summary_tells_what_the_files_hold(path):
    run, _ = path
    result = read_json(run.eval_file)
    text = summary(run, {"GRPO": 41.4, "eval": 2.0})
    assert re.search(r"^training reward +0\.\d{3} .* -> 0\.\d{3} ", text, re.M)
    before, after = (result["matrix"][policy]["nf4"]["accuracy"] for policy in ("base", "grpo"))
    line = next(line for line in text.splitlines() if line.startswith("held-out accuracy"))
    assert f"{before:.1%} [" in line
    assert f"-> {after:5.1%} [" in line
    assert "n = 24" in line
    rows = [line.split()[0] for line in text.splitlines() if line.startswith(FORMATS)]
    assert rows == list(FORMATS)
    assert result["conclusion"] in text
    assert re.search(r"^total +43 s$", text, re.M)
    assert f"{run.path}/" in text


def test_a_dry_run_prints_the_commands_and_runs_none():
    done = run_here("recipes.quickstart", "--seed", "12345", "--dry_run")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[-1].startswith("$ python -m eval gate --run runs/tiny-seed12345")
    assert len(lines) >= 6 and not (ROOT / "runs" / "tiny-seed12345").exists()
    assert not make_base(ROOT / "models" / "never-made", "--dry_run").exists()


def test_a_dry_gate_judges_and_leaves_the_manifest(path):
    run, done = path
    before = (run.merged / "grpo" / "fp8" / "manifest.json").read_bytes()
    dry = run_here("eval", "gate", "--run", run.path, "--dry_run")
    assert dry.code == done["gate"].code
    assert (run.merged / "grpo" / "fp8" / "manifest.json").read_bytes() == before
    assert "promoted" not in dry.out
