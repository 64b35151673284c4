"""Text of a Slurm job: which GPUs and nodes each side gets, and the body that starts, watches and ends them."""

import copy
import re
import shlex
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from kit.core.config.checks import check_config
from kit.core.config.recipe import recipe_of
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.run_directory import base_directory
from kit.plan.placement import place
from launch.vllm_command import Installed, is_loopback, plans

# Slurm's formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on.
TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,-]*")
ACCUMULATION = "train.gradient_accumulation_steps"
WORDS = '"${words[@]}" "${resume[@]}"'
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


@dataclass(frozen=True)
class Split:
    """The trainer's processes over all nodes, and the ports of the replicas."""

    processes: int
    ports: list[int]
    accumulation: int | None = None  # set if needed to keep a step's completions those of one node


def write_script(job: Job, config: Config) -> str:
    """Return the sbatch script of a run; `BadInput` lists what cannot work before anything waits in a queue."""
    _check_job(job, config)
    split = split_run(job, config)
    _check_run(job, config, split)
    parts = [_head(job, config), _start(config), _words(job, config, split), "prepare"]
    parts += [_several_nodes(job, config, split)] if job.nodes > 1 else ["start run python -m launch.up " + WORDS]
    return "\n\n".join([*parts, "finish\n"])


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
    found = []
    if job.nodes > 2 and job.gpus == 0:
        found.append("--gpus_per_node 0 is for one or two CPU nodes: the kit trains on one of them.")
    for flag, value, least in (("--nodes", job.nodes, 1), ("--gpus_per_node", job.gpus, 0)):
        if value < least:
            found.append(f"{flag} ({value}) must be at least {least}.")
    if job.cpus_per_gpu < 1:
        found.append(f"--cpus_per_gpu ({job.cpus_per_gpu}) must be at least 1.")
    if not TIME.fullmatch(job.time):
        found.append(f"--time {job.time!r} is none of Slurm's formats. Write 24:00:00, 2-12:00:00 or minutes.")
    for flag, value in (("--partition", job.partition), ("--account", job.account)):
        if value is not None and not NAME.fullmatch(value):
            found.append(f"{flag} {value!r} is not a name.")
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


def _head(job: Job, config: Config) -> str:
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
    lines = [f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *lines,
            "#SBATCH --requeue",
            f"# Written by: python -m launch.slurm {shlex.join(asked)}",
            "# Submit it from the checkout, on a file system that all nodes share. Options given to sbatch win",
            "# over the lines above. Submitted again, it continues the run from its newest checkpoint.",
        ]
    )


def _start(config: Config) -> str:
    return "\n".join(
        [
            'cd "${SLURM_SUBMIT_DIR:-.}" || exit 2',
            "if [[ ! -f launch/slurm/job.sh ]]; then",
            '  echo "error: $PWD is not the checkout; submit this script from there." >&2',
            "  exit 2",
            "fi",
            'export PATH="$PWD/.venv/bin:$PATH"',
            f"run={shlex.quote(str(config.run.directory))}",
            "source launch/slurm/job.sh",
        ]
    )


def _words(job: Job, config: Config, split: Split) -> str:
    """The configuration words for both sides, with the addresses that only the job knows."""
    lines = [f"words=({shlex.join(['--config', job.config_path, *job.overrides])})"]
    if job.nodes == 1:
        return lines[0]
    lines = [
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        *lines,
        f'urls="$(printf "http://${{nodes[0]}}:%s," {" ".join(map(str, split.ports))})"',
        # Bind to every address: a node's own /etc/hosts often maps its name to a loopback address.
        'words+=(--rollout.server_urls "[${urls%,}]" --server.host 0.0.0.0)',
    ]
    if job.gpus:
        lines += ["words+=(--server.gpus null) # all of the first node"]
    if split.accumulation:
        lines += [
            f"# {split.processes} processes then make the same step as those of one node.",
            f"words+=(--{ACCUMULATION} {split.accumulation})",
        ]
    return "\n".join(
        [
            *lines,
            "# The servers can be reached from other machines, so they ask for a key; the trainer finds it here too.",
            "VLLM_API_KEY=\"${VLLM_API_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}\"",
            "export VLLM_API_KEY",
        ]
    )


def _several_nodes(job: Job, config: Config, split: Split) -> str:
    """Servers on the first node, trainer on the others."""
    manifest = shlex.quote(str(base_directory(config) / "manifest.json"))
    configs, recipe = "accelerate launch --config_file accelerate_configs", f"{recipe_of(config)} {WORDS}"
    lines = [
        'on_first_node=(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --kill-on-bad-exit=1)',
        f"if [[ ! -e {manifest} ]]; then",
        '  "${on_first_node[@]}" python -m merge base "${words[@]}" || exit',
        "fi",
        'start servers "${on_first_node[@]}" python -m launch.server "${words[@]}"',
        "",
    ]
    if job.nodes > 2:
        count = job.nodes - 1
        return "\n".join(
            [
                *lines,
                'trainers="$(IFS=, && echo "${nodes[*]:1}")"',
                "# A machine's rank is known where srun has started the command.",
                f'start trainer srun --nodes={count} --ntasks={count} --nodelist="$trainers" --kill-on-bad-exit=1 \\',
                f"  bash -c 'exec {configs}/two_nodes.yaml --num_machines {count} \\",
                f'  --num_processes {split.processes} --main_process_ip "$0" --machine_rank "$SLURM_PROCID" "$@"\' \\',
                f'  "${{nodes[1]}}" {recipe}',
            ]
        )
    if job.gpus == 0:
        launch = f"env OMP_NUM_THREADS=1 {configs}/cpu.yaml"
    elif split.processes == 1:
        launch = f"{configs}/one_gpu.yaml"
    else:
        launch = f"{configs}/ddp.yaml --num_processes {split.processes}"
    srun = 'srun --nodes=1 --ntasks=1 --nodelist="${nodes[1]}" --kill-on-bad-exit=1'
    return "\n".join([*lines, f"start trainer {srun} \\", f"  {launch} \\", f"  {recipe}"])
