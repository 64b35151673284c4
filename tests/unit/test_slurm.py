"""The sbatch scripts: options that Slurm knows, the split of the GPUs, refusals before anything waits in a queue."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kit.core.config.load import load_config
from kit.core.errors import BadInput
from launch.slurm.__main__ import main
from launch.slurm.script import Job, describe, split_run, write_script

ROOT = Path(__file__).parents[2]
EIGHT = "recipes/configs/grpo-qwen3_8b-nf4-fp8-deepmath-8gpu.yaml"
TWO = "recipes/configs/grpo-qwen3_8b-nf4-fp8-gsm8k-2gpu.yaml"
ONE_CARD = "recipes/configs/grpo-qwen3_8b-nf4-fp8-1x24gb.yaml"
ALONE = "recipes/configs/grpo-qwen2.5_1.5b-nf4-gsm8k-1gpu.yaml"
TINY = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
NAME, COUNT = r"[A-Za-z0-9][\w.,-]*", r"[1-9]\d*"
# The long options of sbatch (Slurm 20.11 to 25.05) that a script may use, and their values.
OPTIONS = {
    "job-name": r"[A-Za-z0-9][\w.-]*",
    "partition": NAME,
    "account": NAME,
    "nodes": COUNT,
    "ntasks-per-node": COUNT,
    "gpus-per-node": rf"([a-z]\w*:)?{COUNT}",
    "cpus-per-task": COUNT,
    "time": r"\d+|(\d+-)?\d+(:\d\d){1,2}|\d+-\d+",
    "signal": r"(B:)?(USR1|USR2|TERM|INT)(@\d{1,5})?",
    "output": r"[\w./%-]+",
    "open-mode": "append|truncate",
    "requeue": None,
}


def script(path: str = EIGHT, *overrides: str, **job) -> str:
    return write_script(Job(path, overrides, **job), load_config(ROOT / path, list(overrides)))


def options(text: str) -> dict[str, str | None]:
    """The #SBATCH options of a script; AssertionError for one that sbatch would refuse or not see."""
    found, is_body = {}, False
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            assert not is_body, f"sbatch reads no option after the first command: {line}"
            key, equals, value = line.removeprefix("#SBATCH --").partition("=")
            assert key in OPTIONS, f"unknown option {line}"
            assert key not in found, f"{key} is given twice"
            pattern = OPTIONS[key]
            assert bool(equals) == (pattern is not None), line
            assert pattern is None or re.fullmatch(pattern, value), f"{line} is no value of {key}"
            found[key] = value or None
        elif line and not line.startswith("#"):
            is_body = True
    return found


JOBS = {
    "one node": (EIGHT, (), {}),
    "two nodes": (EIGHT, (), {"nodes": 2, "partition": "gpu", "account": "lab-1", "time": "2-12:00:00"}),
    "three nodes": (EIGHT, (), {"nodes": 3, "time": "90"}),
    "one card": (ONE_CARD, (), {"gpus": 1}),
    "a card for each side": (ONE_CARD, (), {"gpus": 1, "nodes": 2}),
    "no server": (ALONE, (), {"gpus": 1}),
    "no GPU": (TINY, ("--rollout.backend", "server", "--run.name=it"), {"gpus": 0, "nodes": 2}),
}


@pytest.mark.parametrize("name", JOBS)
def test_every_option_is_one_that_slurm_knows_and_bash_reads_the_body(name):
    path, overrides, job = JOBS[name]
    text = script(path, *overrides, **job)
    found = options(text)
    assert found["nodes"] == str(job.get("nodes", 1))
    assert found["signal"] == "B:USR1@300"
    assert ("gpus-per-node" in found) == (job.get("gpus", 8) > 0)
    assert text.startswith("#!/usr/bin/env bash\n")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert max(map(len, text.replace(found["job-name"], "").splitlines())) < 160


@pytest.mark.parametrize(("file", "nodes"), [("one_node.sbatch", 1), ("two_nodes.sbatch", 2)])
def test_the_shipped_examples_are_what_the_generator_writes(file, nodes):
    text = (ROOT / "launch/slurm" / file).read_text()
    assert text == script(nodes=nodes)
    (line,) = re.findall(r"^# Written by: python -m launch.slurm (.*)$", text, re.M)
    assert shlex.split(line) == ["--config", EIGHT, "--nodes", str(nodes), "--gpus_per_node", "8"]


def test_two_or_more_nodes_make_the_step_of_one():
    config = load_config(ROOT / EIGHT)
    per_device = config.train.per_device_train_batch_size
    sizes = set()
    for nodes in (1, 2, 3, 5):
        split = split_run(Job(EIGHT, nodes=nodes), config)
        sizes.add(per_device * split.processes * (split.accumulation or config.train.gradient_accumulation_steps))
    assert sizes == {256}
    text = script(nodes=3)
    assert re.search(r"--num_machines 2 \\\n  --num_processes 16 ", text)
    assert "words+=(--train.gradient_accumulation_steps 4)" in text
    # Who sets it decides alone.
    assert "words+=(--train." not in script(EIGHT, "--train.gradient_accumulation_steps", "16", nodes=3)


@pytest.mark.parametrize(
    ("path", "overrides", "job", "said"),
    [
        (ALONE, [], {"gpus": 1}, "nodes: 1 with 1 GPUs each; trainer processes: 1, 128 completions a step"),
        (ALONE, [], {}, "nodes: 1 with 8 GPUs each; trainer processes: 1, 128 completions a step"),  # train.gpus [0]
        (
            *(ALONE, ["--train.gpus", "null"], {}),
            "nodes: 1 with 8 GPUs each; trainer processes: 8, 1,024 completions a step",
        ),
        (
            *(EIGHT, [], {"nodes": 3}),
            "nodes: 3 with 8 GPUs each; trainer processes: 16, 256 completions a step, 8 replicas",
        ),
    ],
)
def test_the_summary_tells_a_step_that_the_number_of_gpus_makes(path, overrides, job, said):
    assert describe(Job(path, **job), load_config(ROOT / path, overrides)) == said


def test_restarts_go_to_launch_up_and_are_for_one_node():
    text = script(TWO, gpus=2, restarts=5)
    assert 'start run python -m launch.up "${words[@]}" --restarts 5 "${resume[@]}"' in text
    assert (
        "--restarts 5" in text.splitlines()[next(n for n, line in enumerate(text.splitlines()) if "Written" in line)]
    )
    assert "--restarts" not in script(TWO, gpus=2)
    with pytest.raises(BadInput, match=r"--restarts 5 is for launch\.up, which starts the processes of one node"):
        script(EIGHT, nodes=2, restarts=5)
    with pytest.raises(BadInput, match=r"--restarts \(-1\) must be at least 0"):
        script(TWO, gpus=2, restarts=-1)


def test_the_words_of_the_run_are_quoted_for_bash():
    text = script(EIGHT, "--train.max_steps=7", "--data.prompt_suffix", "it's")
    assert """ --train.max_steps=7 --data.prompt_suffix 'it'"'"'s')""" in text


def test_a_run_that_no_single_node_could_hold_keeps_its_step():
    urls = [f"http://127.0.0.1:{port}" for port in range(8000, 8008)]
    text = script(EIGHT, f"--rollout.server_urls={urls}", "--server.gpus=null", nodes=2)
    assert "gradient_accumulation_steps" not in text
    assert "--num_processes 8" in text


@pytest.mark.parametrize(
    ("path", "overrides", "job", "complaint"),
    [
        (EIGHT, (), {"nodes": 0}, "--nodes (0) must be at least 1"),
        (EIGHT, (), {"time": "24h"}, "--time '24h' is none of Slurm's formats"),
        (EIGHT, (), {"partition": "gpu; rm -rf x"}, "--partition 'gpu; rm -rf x' is not a name"),
        (EIGHT, (), {"gpus": 4}, "server.gpus names 4, 5, 6, 7; CUDA shows 4 GPUs"),
        (ALONE, (), {"nodes": 2, "gpus": 1}, "rollout.backend is in_process"),
        (TINY, ("--rollout.backend", "server"), {"nodes": 3, "gpus": 0}, "the kit trains on one of them"),
        (EIGHT, ("--rollout.server_urls", "[http://node7:8000]"), {}, "Write http://127.0.0.1:PORT"),
        (EIGHT, ("--rollout.group_size", "7"), {"nodes": 2}, "must divide the generation batch (4 per device x 8"),
        (EIGHT, ("--server.gpus=[2, 3, 4, 5]",), {"nodes": 2, "gpus": 6}, "32 forwards are not a multiple of 6"),
        (EIGHT, ("--server.max_num_seqs", "4"), {}, "server.max_num_seqs (4) is below rollout.group_size (8)"),
    ],
)
def test_what_cannot_work_is_refused_before_it_waits_in_a_queue(path, overrides, job, complaint):
    with pytest.raises(BadInput) as refused:
        script(path, *overrides, **job)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("path", "words", "gpus"),
    [(TWO, [], "2"), (ONE_CARD, [], "1"), (EIGHT, [], "8"), (TINY, [], "8"), (TWO, ["--nodes", "2"], "8")],
)
def test_a_job_asks_for_the_gpus_that_the_configuration_names(path, words, gpus, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["slurm", "--config", path, *words])
    assert main() == 0
    assert options(capsys.readouterr().out)["gpus-per-node"] == gpus
