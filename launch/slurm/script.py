"""The text of a Slurm job: which GPUs and nodes each side gets, and the body that starts, watches and ends them."""

import copy
import re
import shlex
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from launch.vllm_command import Installed, is_loopback, plans
from recipes.parts.checks import check_config
from recipes.parts.config import Config
from recipes.parts.errors import BadInput
from recipes.parts.rundir import base_directory

# Slurm's formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on.
TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,-]*")
ACCUMULATION = "train.gradient_accumulation_steps"
GRACE_S = 300  # before the time limit: what is left to end both sides in


@dataclass(frozen=True)
class Job:
    """What is asked of Slurm, and the run's command line (`overrides` are words: --group.key value)."""

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
    """Who runs where: the numbers of a node's GPUs for each side, and the trainer's processes over all nodes."""

    server_gpus: list[int]
    trainer_gpus: list[int]
    processes: int
    ports: list[int]
    accumulation: int | None = None  # what keeps a step's completions those of one node, when that is another value


def write_script(job: Job, config: Config) -> str:
    """The sbatch script of a run; `BadInput` lists what cannot work before anything waits in a queue."""
    _check_job(job, config)
    split = split_gpus(job, config)
    _check_run(job, config, split)
    parts = [_head(job, config), _start(job, config), _words(job, config, split), "prepare"]
    if config.rollout.backend == "server":
        parts.append(_base_and_servers(job, config))
    return "\n\n".join([*parts, _trainer(job, split), "finish\n"])


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


def split_gpus(job: Job, config: Config) -> Split:
    """The GPUs of each side; `BadInput` when the trainer's processes cannot make the same steps as on one node."""
    server, train = config.server, config.train
    ports = [urlsplit(url).port or 0 for url in config.rollout.server_urls]
    everything = list(range(job.gpus))
    if config.rollout.backend != "server":
        return Split([], everything, max(1, job.gpus), [])
    wanted = server.gpus if server.gpus is not None else everything[: len(ports) * server.tensor_parallel]
    # Without a GPU of its own the trainer shares the servers' cards (server.sleep, train.max_gpu_gib).
    trainer = [gpu for gpu in everything if gpu not in wanted] or everything
    here = Split(wanted, trainer, max(1, len(trainer)), ports)
    if job.nodes == 1:
        return here
    if job.gpus:
        replicas = job.gpus // server.tensor_parallel
        ports = [ports[0] + number for number in range(replicas)]
    processes = max(1, job.gpus) * (job.nodes - 1)
    split = Split(everything, everything, processes, ports)
    if processes == here.processes or any(word.split("=")[0] == f"--{ACCUMULATION}" for word in job.overrides):
        return split
    forwards = train.gradient_accumulation_steps * here.processes
    if forwards % processes:
        completions = forwards * train.per_device_train_batch_size
        raise BadInput(
            f"{processes} trainer processes cannot make the step of one node ({train.per_device_train_batch_size} per "
            f"device x {here.processes} processes x {train.gradient_accumulation_steps} = {completions} completions): "
            f"{forwards} forwards are not a multiple of {processes}. Give --{ACCUMULATION} for these nodes."
        )
    return replace(split, accumulation=forwards // processes)


def _check_run(job: Job, config: Config, split: Split) -> None:
    """The checks of servers and trainer with what the script will pass them."""
    config = copy.deepcopy(config)
    if split.accumulation:
        config.train.gradient_accumulation_steps = split.accumulation
    if config.rollout.backend == "server":
        config.rollout.server_urls = [f"http://127.0.0.1:{port}" for port in split.ports]
        config.server.host = None  # a key is made where the job runs
        if job.gpus:
            config.server.gpus = split.server_gpus[: len(split.ports) * config.server.tensor_parallel]
        wide = [gpu for gpu in split.server_gpus if gpu >= job.gpus] if job.gpus else []
        if wide:
            raise BadInput(f"server.gpus names {wide}; a node has {job.gpus} (--gpus_per_node), from 0.")
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


def _start(job: Job, config: Config) -> str:
    lines = [
        'cd "${SLURM_SUBMIT_DIR:-.}" || exit 2',
        "if [[ ! -f launch/slurm/job.sh ]]; then",
        '  echo "error: $PWD is not the checkout; submit this script from there." >&2',
        "  exit 2",
        "fi",
        'export PATH="$PWD/.venv/bin:$PATH"',
        f"run={shlex.quote(str(config.run.directory))}",
    ]
    if job.gpus and job.nodes == 1:
        lines.append(f"gpus={','.join(map(str, range(job.gpus)))}")
    lines.append("source launch/slurm/job.sh")
    return "\n".join(lines)


def _words(job: Job, config: Config, split: Split) -> str:
    """The configuration as servers and trainer both get it, with the addresses that the job knows."""
    lines = [f"words=({shlex.join(['--config', job.config_path, *job.overrides])})"]
    if config.rollout.backend != "server":
        return lines[0]
    if job.nodes == 1:
        return "\n".join(lines + [f'words+=(--server.gpus "[{_pick(split.server_gpus)}]")'] * bool(job.gpus))
    lines = ['mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")', *lines]
    # Bound to every address: in its own /etc/hosts a node's name often stands for a loopback address.
    lines += [
        f'urls="$(printf "http://${{nodes[0]}}:%s," {" ".join(map(str, split.ports))})"',
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


def _pick(gpus: list[int]) -> str:
    return f"$(pick {' '.join(map(str, gpus))})"


def _base_and_servers(job: Job, config: Config) -> str:
    manifest = shlex.quote(str(base_directory(config) / "manifest.json"))
    lines, where = [], ""
    if job.nodes > 1:
        lines = ['on_first_node=(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --kill-on-bad-exit=1)']
        where = '"${on_first_node[@]}" '
    return "\n".join(
        [
            *lines,
            f"if [[ ! -e {manifest} ]]; then",
            f'  {where}python -m merge base "${{words[@]}}" || exit',
            "fi",
            f'start servers {where}python -m launch.server "${{words[@]}}"',
        ]
    )


def _trainer(job: Job, split: Split) -> str:
    configs = "accelerate launch --config_file accelerate_configs"
    recipe = 'recipes/grpo_qlora.py "${words[@]}" "${resume[@]}"'
    if job.nodes > 2:
        machines = f"--num_machines {job.nodes - 1} --num_processes {split.processes}"
        lines = [
            'trainers="$(IFS=, && echo "${nodes[*]:1}")"',
            f'start trainer srun --nodes={job.nodes - 1} --ntasks={job.nodes - 1} --nodelist="$trainers" \\',
            f"  --kill-on-bad-exit=1 bash -c 'exec {configs}/two_nodes.yaml \\",
            # Each machine's rank is known where srun has started the command.
            f'  {machines} --main_process_ip "$0" --machine_rank "$SLURM_PROCID" "$@"\' \\',
            f'  "${{nodes[1]}}" {recipe}',
        ]
        return "\n".join(lines)
    if job.gpus == 0:
        launch = f"env OMP_NUM_THREADS=1 {configs}/cpu.yaml"
    elif split.processes == 1:
        launch = f"{configs}/one_gpu.yaml" + (f' --gpu_ids "{_pick(split.trainer_gpus)}"' if job.nodes == 1 else "")
    else:
        launch = f"{configs}/ddp.yaml --num_processes {split.processes}"
        if job.nodes == 1:
            launch = f'env CUDA_VISIBLE_DEVICES="{_pick(split.trainer_gpus)}" \\\n  {launch}'
    if job.nodes == 1:
        return f"start trainer {launch} \\\n  {recipe}"
    srun = 'srun --nodes=1 --ntasks=1 --nodelist="${nodes[1]}" --kill-on-bad-exit=1'
    return f"start trainer {srun} \\\n  {launch} \\\n  {recipe}"
