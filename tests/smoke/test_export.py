"""Exports of all shipped configurations, and faulty ones, held against verl's own code in one process (.venv-verl)."""

import json
import os
import subprocess
import sys
from pathlib import Path

from kit.core.config.load import load_config
from launch.export.check import PYTHON
from launch.export.files import write
from launch.export.translate import Cluster, translate
from tests import processes, sandbox
from tests.conftest import ROOT

# How each configuration's data looks, and the cluster it is exported to.
RUNS = {
    "grpo-tiny-nf4-cpu": ({"question": "1 + 1?", "answer": "2"}, Cluster(1, 8), []),
    "grpo-qwen2.5_1.5b-nf4-gsm8k-1gpu": (
        {"question": "1 + 1?", "answer": "It is 2.\n#### 2"},
        Cluster(1, 2),
        ["--rollout.correction=sequence_mask", "--train.lr_scheduler=cosine", "--watch.eval_every=10"],
    ),
    "grpo-qwen3_8b-nf4-fp8-1x24gb": (
        {"question": "1 + 1?", "answer": "#### 2"},
        Cluster(1, 1),
        ["--policy.target_modules=[q_proj, v_proj]", "--server.vllm={max_num_batched_tokens: 8192}"],
    ),
    "grpo-qwen3_8b-nf4-fp8-deepmath-8gpu": (
        {"question": "What's \\frac{1}{2}?", "final_answer": "\\frac{1}{2}"},
        Cluster(4, 8),
        ["--reward.functions=[math, boxed_format]", "--reward.weights=[1.0, 0.1]", "--rollout.correction=token_mask"],
    ),
}
# One word of a good export, what it becomes, and what verl or the check says.
FAULTS = {
    "unknown key": ("data.train_batch_size=", "data.train_batchsize=", "Could not override 'data.train_batchsize'"),
    "added key": ("data.truncation=", "+data.truncations=", "+data.truncations is added to verl's schema"),
    "wrong type": ("clip_ratio_high=0.28", "clip_ratio_high=high", "clip_ratio_high is 'high' (str)"),
    "batch": ("trainer.n_gpus_per_node=8", "trainer.n_gpus_per_node=7", "must be divisible by minimal possible"),
    "micro batch": ("actor.ppo_micro_batch_size_per_gpu=4", "actor.ppo_micro_batch_size_per_gpu=3", "does not divide"),
}


def export(name: str, folder: Path) -> Path:
    row, cluster, overrides = RUNS[name]
    data = folder / "data"
    data.mkdir(parents=True)
    rows = [{key: value.replace("1 + 1?", f"1 + 1? ({number})") for key, value in row.items()} for number in range(99)]
    if "final_answer" in row:
        rows = [{**one, "question": f"{one['question']} ({number})"} for number, one in enumerate(rows)]
    for split in ("train", "test"):
        (data / f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    splits = ["--data.train_split=train", "--data.eval_split=test", f"--data.path={data}"]
    config = load_config(ROOT / f"recipes/configs/{name}.yaml", [*splits, *overrides])
    out = folder / "export"
    write(config, translate(config, cluster, None, False, out), out, "python -m launch.export verl …")
    return out


def test_verl_takes_every_shipped_configuration_and_refuses_planted_faults(tmp_path):
    assert PYTHON.is_relative_to(sandbox.side_environment("verl"))
    good = {name: export(name, tmp_path / name) for name in RUNS}
    text = (good["grpo-qwen3_8b-nf4-fp8-deepmath-8gpu"] / "run.sh").read_text()
    bad = {}
    for name, (old, new, _) in FAULTS.items():
        bad[name] = tmp_path / name / "export"
        assert old in text, name
        bad[name].parent.mkdir()
        subprocess.run(["cp", "-r", good["grpo-qwen3_8b-nf4-fp8-deepmath-8gpu"], bad[name]], check=True)
        (bad[name] / "run.sh").write_text(text.replace(old, new))
    command = [sys.executable, "-m", "launch.export", "check", *map(str, [*good.values(), *bad.values()])]
    done = processes.run(command)
    assert done.returncode == 1
    for name, folder in good.items():
        assert f"takes {folder}:" in done.stdout, f"{name}: {done.stderr}"
    errors = {name: line for name in bad for line in done.stderr.splitlines() if f"refuses {bad[name]}:" in line}
    said = {
        name: errors.get(name, "nothing") + done.stderr.partition(f"refuses {bad[name]}:")[2][:400] for name in bad
    }
    assert {name: text for name, text in said.items() if FAULTS[name][2] not in text} == {}
    assert "32 prompts x 8 = 256 completions a step on 32 GPUs" in done.stdout
    assert "boxed reference and nothing, of two problems: 1.1, 0, 1.1, 0" in done.stdout


def test_the_command_line_writes_an_export_whole_or_not_at_all(tmp_path):
    out, data = tmp_path / "exports" / "it", tmp_path / "data"
    data.mkdir()
    for split, size in (("train", 200), ("heldout", 40)):
        rows = [json.dumps({"question": f"{split} {number}", "answer": str(number)}) for number in range(size)]
        (data / f"{split}.jsonl").write_text("\n".join(rows))
    words = ["verl", "--config", "recipes/configs/grpo-tiny-nf4-cpu.yaml", "--out", str(out), "--gpus_per_node", "4"]
    words.append(f"--data.path={data}")

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "launch.export", *arguments]
        return processes.run(command)

    refused = run(*words, "--data.answer_column=anser")
    assert (refused.returncode, out.exists()) == (2, False)
    assert "Set data.answer_column to 'answer'" in refused.stderr
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert "200 problems" in done.stdout
    assert "no QLoRA" in done.stdout
    names = {entry.name for entry in out.iterdir()}
    assert names == {"run.sh", "overrides.yaml", "notes.md", "reward_function.py", "train.parquet", "test.parquet"}
    assert os.access(out / "run.sh", os.X_OK)
    assert subprocess.run(["bash", "-n", str(out / "run.sh")]).returncode == 0
    again = run(*words)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    nothing = run("check", str(tmp_path))
    assert (nothing.returncode, "has no run.sh" in nothing.stderr) == (2, True)
