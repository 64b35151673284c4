"""Text of a Slurm job: which GPUs and nodes each side gets; job.sbatch.j2 starts the sides, job.sh watches and ends
them."""

import copy
import re
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from kit.core.config.checks import check_config
from kit.core.config.recipe import recipe_of
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.limits import MOST_GPUS, MOST_NODES
from kit.core.one_line import in_comment
from kit.core.run_directory import base_directory
from kit.plan.placement import place
from launch.starting.restarts import MOST_RESTARTS
from launch.vllm_command import Installed, plans

# Slurm's formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on.
TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,-]*")
ACCUMULATION = "train.gradient_accumulation_steps"
MOST_CPUS = 1024  # of a GPU
GRACE_S = 300  # before the time limit, left for ending both sides


@dataclass(frozen=True)
class Job:
    """The Slurm request, and the run's command line (`overrides` are words: --group.key value)."""

    config_path: str
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    gpus: int = 8  # of each node
    cpus_per_gpu: int = 8
    partition: str | None = None
    account: str | None = None
    time: str = "24:00:00"
    restarts: int = 0  # of launch.up


@dataclass(frozen=True)
class Split:
    """The trainer's processes over all nodes, and the ports of the replicas."""

    processes: int
    ports: list[int]
    accumulation: int | None = None  # set if needed to keep a step's completions those of one node


def write_script(job: Job, config: Config) -> str:
    """Return the sbatch script of a run; `BadInput` lists what cannot work before anything waits in a queue."""
    from launch.templates import render

    _check_job(job, config)
    split = split_run(job, config)
    _check_run(job, config, split)
    options = {
        "job-name": config.run.name,
        "partition": job.partition,
        "account": job.account,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus or None,
        "cpus-per-task": job.cpus_per_gpu * max(1, job.gpus),
        "time": job.time,
        "signal": f"B:USR1@{GRACE_S}",
        "output": "%x-%j.log",
        "open-mode": "append",
    }
    asked = ["--config", job.config_path, "--nodes", str(job.nodes), "--gpus_per_node", str(job.gpus), *job.overrides]
    asked += ["--restarts", str(job.restarts)] if job.restarts else []
    values = {
        "options": options,
        "written_by": in_comment(shlex.join(asked)),
        "nodes": job.nodes,
        "gpus": job.gpus,
        "restarts": job.restarts,
        "run": config.run.directory,
        "words": shlex.join(["--config", job.config_path, *job.overrides]),
        "manifest": base_directory(config) / "manifest.json",
        "recipe": recipe_of(config),
    }
    quote = {"quote": lambda path: shlex.quote(str(path))}
    return render(Path(__file__).with_name("job.sbatch.j2"), values | asdict(split), quote)


def describe(job: Job, config: Config) -> str:
    """One-line summary of the job."""
    split, train = split_run(job, config), config.train
    steps = split.accumulation or train.gradient_accumulation_steps
    completions = split.processes * train.per_device_train_batch_size * steps
    replicas = f", {len(split.ports)} replicas" if config.rollout.backend == "server" else ""
    return (
        f"nodes: {job.nodes} with {job.gpus} GPUs each; trainer processes: {split.processes}, "
        f"{completions:,} completions a step{replicas}"
    )


def _check_job(job: Job, config: Config) -> None:
    from kit.rollout.replica import is_loopback

    found = []
    if job.nodes > 2 and job.gpus == 0:
        found.append("--gpus_per_node 0 is for one or two CPU nodes: the kit trains on one of them.")
    for flag, value, least, most in (
        ("--nodes", job.nodes, 1, MOST_NODES),
        ("--gpus_per_node", job.gpus, 0, MOST_GPUS),
        ("--cpus_per_gpu", job.cpus_per_gpu, 1, MOST_CPUS),
        ("--restarts", job.restarts, 0, MOST_RESTARTS),
    ):
        if not least <= value <= most:
            found.append(f"{flag} ({value}) must be at least {least} and at most {most}.")
    if not TIME.fullmatch(job.time):
        found.append(f"--time {job.time!r} is none of Slurm's formats. Write 24:00:00, 2-12:00:00 or minutes.")
    for flag, name in (("--partition", job.partition), ("--account", job.account)):
        if name is not None and not NAME.fullmatch(name):
            found.append(f"{flag} {name!r} is not a name.")
    if job.nodes > 1 and job.restarts:
        found.append(
            f"--restarts {job.restarts} is for launch.up, which starts the processes of one node. Use --nodes 1; with "
            "more, Slurm queues the job again before its time limit, and submitted again it continues."
        )
    if job.nodes > 1 and config.rollout.backend != "server":
        found.append(
            f"--nodes {job.nodes} puts the rollout servers on a node of their own, and rollout.backend is "
            f"{config.rollout.backend}. Use --nodes 1 or rollout.backend server."
        )
    if config.rollout.backend == "server":
        for url in config.rollout.server_urls:
            if not is_loopback(urlsplit(url).hostname or ""):
                found.append(
                    f"rollout.server_urls names {url}: which nodes the job gets is known when it runs, and the script "
                    "fills them in. Write http://127.0.0.1:PORT."
                )
    if found:
        raise BadInput("\n".join(found))


def split_run(job: Job, config: Config) -> Split:
    """Processes and ports; `BadInput` if the trainer's processes cannot make the same steps as on one node."""
    server, train = config.server, config.train
    ports = [urlsplit(url).port or 0 for url in config.rollout.server_urls]
    if job.nodes == 1:
        return Split(_on_one_node(job, config), ports)
    if job.gpus:
        ports = [ports[0] + number for number in range(job.gpus // server.tensor_parallel)]
    split = Split(max(1, job.gpus) * (job.nodes - 1), ports)
    try:
        here = _on_one_node(job, config)
    except BadInput:  # a run for several nodes only
        return split
    if split.processes == here or any(word.split("=")[0] == f"--{ACCUMULATION}" for word in job.overrides):
        return split
    steps, each = train.gradient_accumulation_steps, train.per_device_train_batch_size
    forwards = steps * here
    if forwards % split.processes:
        raise BadInput(
            f"{split.processes} trainer processes cannot make the step of one node ({each} per device x {here} "
            f"processes x {steps} = {forwards * each} completions): {forwards} forwards are not a multiple of "
            f"{split.processes}. Give --{ACCUMULATION} for these nodes."
        )
    return replace(split, accumulation=forwards // split.processes)


def _on_one_node(job: Job, config: Config) -> int:
    """Trainer processes if launch.up starts the run on one of these nodes."""
    is_served = config.rollout.backend == "server" and job.gpus > 0
    return max(1, len(place(config, [str(gpu) for gpu in range(job.gpus)], is_served).trainer))


def _check_run(job: Job, config: Config, split: Split) -> None:
    """Run the checks of servers and trainer on the configuration that the script will pass them."""
    config = copy.deepcopy(config)
    if split.accumulation:
        config.train.gradient_accumulation_steps = split.accumulation
    if config.rollout.backend == "server":
        config.rollout.server_urls = [f"http://127.0.0.1:{port}" for port in split.ports]
        config.server.host = None  # the job creates a key when it runs
        if job.nodes > 1:
            config.server.gpus = None
        plans(config, Installed("", is_cpu=not job.gpus), [str(gpu) for gpu in range(job.gpus)])
    check_config(config, split.processes)
