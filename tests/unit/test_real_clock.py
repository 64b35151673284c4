"""The bench of reward against wall clock, without its GPU: figures, picture, what both sides learn from one YAML."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(1, str(Path(__file__).parents[2] / "bench"))
sys.path.insert(1, str(Path(__file__).parents[2] / "bench/step"))

import clock_picture
import real_clock
import stock_clock
from servers import Child, Failed
from workload import CONFIG, ROOT

from kit.core.config.load import load_config
from kit.core.errors import BadInput, run_command
from kit.core.run_directory import RunDir
from tests.processes import run, wait_until
from tests.unit.metric_rows import make_run, rows_of

SCRIPT = ROOT / "bench/real_clock.py"


def steps(count: int, first: float = 30.0, each: float = 2.0) -> list[dict]:
    """Rows of a run whose reward climbs from 0 by a hundredth a step."""
    return [
        {"number": place + 1, "seconds": first + each * place, "reward": place / 100, "peak_gib": 1.0 + place}
        for place in range(count)
    ]


def made(side: str, rows: list[dict], error: str = "") -> dict:
    return {"side": side, "seed": 0, "error": error, "card_gib": 40.0, "rows": rows} | clock_picture.figures(rows)


def test_a_run_is_timed_from_its_start_and_a_step_from_the_one_before():
    found = clock_picture.figures(steps(50))
    assert (found["first_step_s"], found["done_s"], found["median_step_s"]) == (30.0, 128.0, 2.0)
    assert found["reward_first"] == pytest.approx(0.045) and found["reward_last"] == pytest.approx(0.445)
    assert found["trainer_gib"] == 50.0


def test_a_run_without_a_step_has_a_line_with_its_error_and_no_picture(tmp_path, capsys):
    runs = [made("kit", [], "no card\nthe server did not start")]
    clock_picture.write(tmp_path / "x.json", {"title": "t"}, runs)
    clock_picture.table(runs)
    assert "the server did not start" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_the_table_and_the_picture_of_earlier_calls_are_made_anew(tmp_path):
    names = []
    for side in ("stock_bf16", "kit+overlap"):
        names.append(tmp_path / f"{side}.json")
        names[-1].write_text(json.dumps({"runs": [made(side, steps(50))]}))
    done = run([sys.executable, SCRIPT, "--sides", "--earlier", *names, "--out", tmp_path / "both.json"])
    assert done.returncode == 0, done.stderr
    lines = [line.split()[:6] for line in done.stdout.splitlines() if line.startswith(("stock_bf16", "kit+overlap"))]
    assert lines == [[side, "0", "50", "30.0", "128.0", "2.00"] for side in ("stock_bf16", "kit+overlap")]
    picture = (tmp_path / "both.svg").read_text()
    assert picture.count("<path") > 10 and (tmp_path / "both.png").stat().st_size > 10_000
    assert len(json.loads((tmp_path / "both.json").read_text())["runs"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sides", "kitt"], "there is no side 'kitt'"),
        (["--sides", "kit+fast"], "'fast' is neither overlap nor KEY=VALUE"),
        (["--sides", "kit+policy.computing=fp8"], "unknown key policy.computing"),
        (["--sides", "kit", "--kit", "train.max_step=3"], "unknown key train.max_step"),
        (["--sides", "stock_bf16"], "stock_bf16 needs a GPU"),
        (["--sides", "kit", "--model.path=nowhere"], "model.path nowhere is not a directory"),
        (["--sides"], "there is nothing to show"),
    ],
)
def test_bad_input_is_one_sentence_before_a_run_starts(tmp_path, monkeypatch, capsys, words, said):
    options = ["--config", ROOT / CONFIG, "--device", "cpu", "--out", tmp_path / "x.json", "--model.path", tmp_path]
    monkeypatch.setattr(sys, "argv", ["real_clock.py", *map(str, options), *words])
    with pytest.raises(SystemExit) as ended:
        run_command(real_clock.main)
    assert ended.value.code == 2 and said in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


# None of these is a default of trl, so what does not reach stock differs.
LEARNED = {
    "train": "gradient_accumulation_steps=4 warmup_steps=3 lr_scheduler=cosine loss_type=dapo beta=0.03 epsilon=0.1 "
    "epsilon_high=0.3 num_iterations=2 max_grad_norm=0.5 weight_decay=0.1 mask_truncated=true max_steps=7 "
    "optimizer=adafactor recompute=none scale_rewards=batch",
    "rollout": "temperature=0.6 top_p=0.9 top_k=7 correction=sequence_truncate correction_cap=1.5 group_size=4",
    "run": "seed=5",
    "data": 'chat_template_kwargs={"thinks":false}',
}
# What a run writes and where, and how its batch is cut: 16 x 16 completions, of the kit 64 x 4.
OTHER = {"output_dir", "run_name", "use_cpu", "bf16", "report_to", "disable_tqdm", "reward_weights"}
OTHER |= {"logging_steps", "logging_nan_inf_filter", "save_strategy", "save_steps", "ddp_find_unused_parameters"}
OTHER |= {"per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"}


def test_stock_learns_what_the_kit_learns_from_the_same_yaml(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    from trl import GRPOConfig

    from kit.train.trainer import trainer_arguments

    overrides = [f"--{group}.{one}" for group, text in LEARNED.items() for one in text.split()]
    config = load_config(ROOT / CONFIG, [*overrides, f"--run.output_dir={tmp_path / 'run'}"])
    kit = trainer_arguments(config, RunDir(config.run.directory))
    fixed = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": []}
    stock = GRPOConfig(**stock_clock.learned(config, 16), **stock_clock.sampler("bf16", config, 0.3), **fixed)
    default = GRPOConfig(**fixed)
    names = {one.name for one in dataclasses.fields(kit) if not one.name.startswith("_")} - OTHER
    changed = {name for name in names if getattr(kit, name, None) != getattr(default, name, None)}
    assert len(changed) > 20
    assert not {
        name: (getattr(stock, name), getattr(kit, name))
        for name in changed
        if getattr(stock, name) != getattr(kit, name)
    }
    assert stock.generation_batch_size == kit.generation_batch_size == 256
    assert stock.vllm_mode == "colocate" and stock.vllm_max_model_length == 64 + 40 + 1


def test_a_micro_batch_that_does_not_divide_the_step_is_refused():
    with pytest.raises(BadInput, match="--micro_batch 48 does not divide the 64 completions"):
        stock_clock.learned(load_config(ROOT / CONFIG), 48)


def test_sides_without_time_are_not_started_and_are_told(tmp_path):
    command = [sys.executable, SCRIPT, "--config", ROOT / CONFIG, "--device", "cpu", "--out", tmp_path / "x.json"]
    done = run([*command, "--model.path", tmp_path, "--sides", "stock_nf4", "kit", "--limit_s", "0"])
    assert done.returncode == 1 and "not all steps: stock_nf4, seed 0; kit, seed 0" in done.stderr, done.stderr
    assert (
        done.stdout.count("no time was left") == 2 and len(json.loads((tmp_path / "x.json").read_text())["runs"]) == 2
    )


def test_a_lever_of_the_kit_reaches_its_sides_and_not_stock(tmp_path, monkeypatch):
    words = ["--config", str(ROOT / CONFIG), "--device", "cpu", "--out", str(tmp_path / "x.json"), "--sides", "kit"]
    words += ["kit+overlap+policy.compute=fused", "stock_nf4", "--kit", "rollout.max_canary_delta=1"]
    monkeypatch.setattr(sys, "argv", ["real_clock.py", *words, f"--model.path={tmp_path}", "--train.beta=0.1"])
    clock = real_clock.Clock(*real_clock.parse())
    kit, overlap, stock = (clock.command(side, 1, tmp_path) for side in clock.options.sides)
    assert not any("canary" in word or "overlap" in word for word in stock)
    for command in (kit, overlap, stock):
        assert "--train.beta=0.1" in command and "--run.seed=1" in command and "--train.max_steps=50" in command
    config, lagged = (
        load_config(one[one.index("--config") + 1], one[one.index("--config") + 2 :]) for one in (kit, overlap)
    )
    assert (config.rollout.overlap, lagged.rollout.overlap) == (False, True)
    assert (config.policy.compute, lagged.policy.compute) == ("plain", "fused")
    assert config.rollout.max_canary_delta == lagged.rollout.max_canary_delta == 1 and lagged.train.beta == 0.1


def test_a_run_whose_time_is_over_is_asked_to_end_and_says_so(tmp_path):
    script = (
        "import time\nprint('began', flush=True)\ntry:\n    time.sleep(600)\nfinally:\n    print('ended', flush=True)"
    )
    child = Child("side", ["-c", script], tmp_path)
    wait_until(lambda: "began" in child.log.read_text(), child.process)
    with pytest.raises(Failed, match="stopped after 0 s"):
        real_clock.child_ends(child, 0)
    assert child.process.returncode is not None and "ended" in child.log.read_text()


def test_rows_of_the_kit_have_the_names_of_stock(tmp_path):
    lines = rows_of(3)
    found = real_clock.kit_rows(make_run(tmp_path / "run", lines) / "metrics.jsonl")
    assert [one["number"] for one in found] == [1, 2, 3] and {one["peak_gib"] for one in found} == {1.4}
    for ours, theirs in (("reward", "reward"), ("length", "completion_length"), ("truncated", "truncated_fraction")):
        assert [one[ours] for one in found] == [line[theirs] for line in lines]
