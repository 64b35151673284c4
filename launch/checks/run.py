"""Checks of `launch.doctor` for one run: its keys, ports, GPUs, disk, model and data."""

import functools
import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from kit.core.config import speculation_rules
from kit.core.config.card_rules import served_product
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.plan.placement import Placement, place
from launch.checks.children import reason, run_step
from launch.checks.machine import GIB, Machine, Row, fail, ok, skip, split_message, warn
from launch.starting.trainer_command import announcement, environment_of

DEFAULT_PORTS = {8000: "rollout.server_urls", 29500: "accelerate's main_process_port"}
HEAD_LIMIT_S, HUB_LIMIT_S = 3.0, 10.0  # for the request, and for the child process that makes it
SOME_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
ANSWER_S = 2.0
# Bytes of a merged checkpoint per byte of the 16-bit one, embeddings and scales included.
FORMAT_SHARES = {"bf16": 1.0, "fp8": 0.6, "fp8_block": 0.6, "fp8_static": 0.6}
QUARTER_SHARE = 0.4
NF4_COPY_SHARE = 0.28  # 0.56 bytes a weight; other bases keep no separate copy on disk
# An adapter of rank 16 on all linear layers in float32: 175 MB of the 8B model's 16 GB; Adam keeps two more.
ADAPTER_SHARE = 0.011


SHARING_LIMIT_S = 90.0  # two processes that import torch
RECIPE_LIMIT_S = 120.0  # for a child that imports torch and transformers from a cold disk


def of_a_run(check: Callable[[Machine], Iterator[Row]]) -> Callable[[Machine], Iterator[Row]]:
    """A check of the run's configuration: skipped without one, and what it raises as `BadInput` are failed rows."""

    @functools.wraps(check)
    def checked(machine: Machine) -> Iterator[Row]:
        if machine.config is None:
            yield skip("no --config")
            return
        try:
            yield from check(machine)
        except BadInput as error:
            yield from fails_of(str(error))

    return checked


def fails_of(message: str) -> Iterator[Row]:
    """One row per line of a kit error message."""
    for line in message.splitlines():
        yield fail(*split_message(line))


@of_a_run
def settings(machine: Machine) -> Iterator[Row]:
    """Conflicting keys, and what the run directory already holds."""
    from kit.core.config.checks import check_config
    from kit.core.config.run_checks import check_run_directory

    config, processes = machine.config, planned_processes(machine)
    with environment_of(announced(machine, processes)):
        check_config(config, processes)
    try:
        check_run_directory(config, False, processes)
    except BadInput as error:
        yield warn(*split_message(str(error)))
        return
    steps, where = config.train.max_steps, config.run.directory
    yield ok(f"{config.run.name}: {steps} steps, {processes} trainer processes, writes to {where}")


def planned_processes(machine: Machine) -> int:
    """Trainer processes over all machines, even when there are too few GPUs: the gpus check reports that."""
    try:
        return placed(machine)[1]
    except BadInput:
        return int((machine.accelerate or {}).get("num_processes", 1))


def announced(machine: Machine, processes: int) -> dict[str, str]:
    """The environment variables through which `accelerate launch` would pass its config to the trainer."""
    return {
        **announcement(machine.accelerate or {}),
        "LOCAL_WORLD_SIZE": str(max(1, processes // machine.machines)),
    }


@of_a_run
def servers(machine: Machine) -> Iterator[Row]:
    """The rollout servers of the run: keys, GPUs, API key, dequantized base."""
    config = machine.config
    if not machine.needs_server:
        yield skip(f"rollout.backend is {config.rollout.backend}")
        return
    from kit.core.run_directory import base_directory
    from launch import kv_cache
    from launch.vllm_command import check_base, installed_vllm, language_facts, plans

    kind = installed_vllm()
    if kind.is_cpu and machine.gpus:
        found = f"the installed vLLM is for CPUs and there are {len(machine.gpus)} GPUs"
        yield fail(found, "make install DEVICE=cuda")
        return
    broken = 0
    gpus = None if kind.is_cpu else [one.index for one in machine.gpus]
    card = min((one.total_gib for one in machine.gpus), default=None)
    directory = base_directory(config)
    checks: list[Callable[[], object]] = [lambda: plans(config, kind, gpus, card)]
    if directory.exists():
        checks.append(lambda: check_base(config, "CONFIG"))
    else:
        broken += 1
        found = f"the dequantized base {directory} is not there yet; launch.up writes it"
        yield warn(found, f"python -m merge base {machine.config_words}")
    for check in checks:
        try:
            check()
        except BadInput as error:
            broken += 1
            yield from fails_of(str(error).replace("--config CONFIG", machine.config_words))
    if not broken:
        key = (
            "with VLLM_API_KEY"
            if machine.environment.get("VLLM_API_KEY")
            else "on loopback, with a key if launch.up starts it"
        )
        count = len(config.rollout.server_urls)
        capability = machine.gpus[0].capability if machine.gpus else None
        product, forced = served_product(config, capability or None)
        called = f"{config.server.weights} ({product}{', forced' if forced else ''})"
        drafts = speculation_rules.wanted(config.server)
        how = f", speculative decoding: {speculation_rules.called(drafts)}" if drafts else ""
        kinds = list(dict.fromkeys((one.name, one.capability) for one in machine.gpus if one.capability != (0, 0)))
        cache = kv_cache.choose(config, kind.is_cpu, kinds, language_facts(config))
        yield ok(f"{count} of {called} from {directory}, {key}{how}; KV cache {cache.text}")


@of_a_run
def gpus_needed(machine: Machine) -> Iterator[Row]:
    """Whether this machine has the GPUs that trainer and servers need."""
    from kit.core.config.shared_gpu import split_fault
    from kit.plan.replica import replica_gib

    config, there = machine.config, len(machine.gpus)
    placement, processes = placed(machine)
    if not there:
        yield skip(f"no GPU: {processes} trainer processes on the CPU")
        return
    with environment_of(announced(machine, processes)):
        fault = split_fault(config, min(one.total_gib for one in machine.gpus), replica_gib(config))
    if fault:
        yield fail(*split_message(fault))
    elif processes > there * machine.machines:
        fix = f"accelerate launch --num_processes {there * machine.machines}"
        yield fail(f"{processes} trainer processes on {machine.machines} machines of {there} GPUs", fix)
    else:
        trainer, replicas = (", ".join(gpus) or "none" for gpus in (placement.trainer, placement.servers))
        yield ok(f"{there} visible: {processes} trainer processes on {trainer}; servers on {replicas}")


def placed(machine: Machine) -> tuple[Placement, int]:
    """(GPU placement on this machine, trainer processes over all machines), as launch.up decides them; `BadInput` if
    there are too few GPUs."""
    from launch.starting.trainer_command import choose_launcher, process_count, read_launcher
    from launch.vllm_command import installed_vllm

    config, visible = machine.config, [one.index for one in machine.gpus]
    try:
        replicas_on_gpus = machine.needs_server and not installed_vllm().is_cpu
    except BadInput:  # the packages check reports it
        replicas_on_gpus = machine.needs_server
    if machine.machines > 1:
        if not visible and not machine.accelerate.get("use_cpu"):
            raise BadInput(
                f"{machine.launcher} is for GPUs and CUDA shows none here. Use accelerate_configs/cpu.yaml."
            )
        return place(config, visible, replicas_on_gpus), int(machine.accelerate.get("num_processes", 1))
    launcher = read_launcher(machine.launcher) if machine.launcher else None
    placement = place(config, visible, replicas_on_gpus, not (launcher and launcher.is_cpu))
    trainer_gpus = len(placement.trainer)
    return placement, process_count(launcher or choose_launcher(trainer_gpus), trainer_gpus)


@of_a_run
def model(machine: Machine) -> Iterator[Row]:
    """Whether the recipe accepts the run's model and this machine; from its config.json, in a child process."""
    from kit.core.config.load import to_dict

    processes = planned_processes(machine)
    # Files that are not here yet belong to the hub check, which has a time limit of its own.
    variables = announced(machine, processes) | {"HF_HUB_OFFLINE": "1"}
    step = ("recipe_checks", json.dumps(to_dict(machine.config), default=str), processes, str(Path.cwd()))
    outcome = run_step(machine, RECIPE_LIMIT_S, "model", *step, **variables)
    if outcome.fault:
        fix = "python -m launch.doctor --only imports torch --logs doctor-logs"
        yield fail(f"the recipe's checks failed: {reason(outcome)}", fix)
    elif outcome.facts["skipped"]:
        yield skip(outcome.facts["skipped"])
    elif outcome.facts["refused"]:
        yield from fails_of(outcome.facts["refused"])
    else:
        yield ok(f"{machine.config.model.source}, {outcome.facts['kind']}: accepted by the recipe")


@of_a_run
def sharing(machine: Machine) -> Iterator[Row]:
    """With `server.share_base`, whether a process can map the memory of another one here, in child processes."""
    if not machine.config.server.share_base:
        yield skip("server.share_base is false")
        return
    outcome = run_step(machine, SHARING_LIMIT_S, "sharing", "mapped_memory")
    if outcome.fault:
        fix = "leave WSL and other layers that lack CUDA IPC, or set server.share_base to false"
        yield fail(f"a process cannot map another one's memory: {reason(outcome)}", fix)
    else:
        yield ok(f"memory of one process on {outcome.facts['device']} is mapped by another, with its values")


@of_a_run
def rewards(machine: Machine) -> Iterator[Row]:
    """Whether the run's rewards pay the references of its data, in a child process: they may be the user's code."""
    from kit.core.config.load import to_dict

    step = ("reward_checks", json.dumps(to_dict(machine.config), default=str), planned_processes(machine))
    outcome = run_step(machine, RECIPE_LIMIT_S, "rewards", *step, str(Path.cwd()))
    if outcome.fault:
        yield fail(f"the rewards could not be tried: {reason(outcome)}", "reward.try_references 0 leaves this out")
    elif outcome.facts["skipped"]:
        yield skip(outcome.facts["skipped"])
    elif outcome.facts["refused"]:
        found, _, fix = outcome.facts["refused"].rpartition("\n")
        yield fail(found.replace(":\n  ", ": ").replace("\n  ", "; "), fix) if found else fail(*split_message(fix))
    else:
        yield ok("; ".join(outcome.facts["said"]) or "reward.try_references is 0: none was tried")


def is_here(url: str) -> bool:
    """Whether a URL's host is this machine, judging by its name."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1", "0.0.0.0", socket.gethostname()) or host.startswith("127.")


def ports(machine: Machine) -> Iterator[Row]:
    """Whether the ports that the run listens on are free, or already served by its own replicas."""
    config, free = machine.config, []
    wanted = dict(DEFAULT_PORTS) if config is None else {}
    if machine.needs_server:
        for url in config.rollout.server_urls:
            if not is_here(url):
                yield skip(f"{url} is on another machine: run the doctor there")
                continue
            host, port = urlsplit(url).hostname, urlsplit(url).port or 80
            if not (fault := _why_taken(host, port)):
                free.append(port)
            elif told := _replica_at(url):
                yield ok(f"{url} is already served by the kit: {told}")
            else:
                stop = f"python -m launch.server stop {machine.config_words}"
                other = f"--rollout.server_urls '[\"http://{host}:{_free_port()}\"]'"
                yield fail(f"{url}: {fault}", f"{stop} (if it is a server of this run), or {other}")
    facts = machine.accelerate or {}
    if facts.get("num_processes", 1) > 1:
        wanted[int(facts.get("main_process_port") or 29500)] = "accelerate's main_process_port"
    for port, owner in wanted.items():
        if fault := _why_taken("127.0.0.1", port):
            flag = f"accelerate launch --main_process_port {_free_port()}"
            if "accelerate" not in owner:
                flag = f"--rollout.server_urls '[\"http://127.0.0.1:{_free_port()}\"]'"
            yield (fail if config else warn)(f"{port} ({owner}): {fault}", flag)
        else:
            free.append(port)
    if free:
        yield ok(f"free: {', '.join(map(str, free))}")
    elif not wanted and not machine.needs_server:
        yield skip("rollout.backend is in_process and one process trains: no port is used")


def _why_taken(host: str, port: int) -> str:
    """Why a port cannot be listened on, and which process holds it; empty if it can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            return ""
        except OSError as error:
            return f"{error.strerror or error}{_listener(port)}"


def _listener(port: int) -> str:
    try:
        import psutil

        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
                return f" (pid {one.pid}, {psutil.Process(one.pid).name()})"
    except Exception:  # the owner is a hint; that the port is taken is the finding
        pass
    return ""


def _replica_at(url: str) -> str:
    """What the kit's rollout server at `url` reports about itself; empty if there is none."""
    from kit.rollout.replica import Replica, ReplicaError

    try:
        info = Replica(url, ANSWER_S).info(timeout_s=ANSWER_S)
        return f"base {str(info['base_hash'])[:12]} as {info['weights']}"
    except (ReplicaError, KeyError, TypeError):
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def hub_folder(machine: Machine) -> Path:
    """The hub's cache directory, resolved as huggingface_hub does."""
    value = machine.environment.get
    if value("HF_HUB_CACHE"):
        return Path(value("HF_HUB_CACHE")).expanduser()
    cache = value("XDG_CACHE_HOME") or "~/.cache"
    return Path(value("HF_HOME") or f"{cache}/huggingface").expanduser() / "hub"


def cached(machine: Machine, kind: str, identifier: str) -> Path | None:
    """A cached snapshot of a hub model with all its weights (data set: with any file); None if there is none."""
    folder = hub_folder(machine) / f"{kind}s--{identifier.replace('/', '--')}" / "snapshots"
    for snapshot in sorted(folder.glob("*")):
        if is_whole_model(snapshot) if kind == "model" else any(snapshot.iterdir()):
            return snapshot
    return None


def is_whole_model(folder: Path) -> bool:
    """Whether a folder has a config and every weight file that its index lists."""
    from kit.core.checkpoint_files import read_index

    if not (folder / "config.json").is_file():
        return False
    try:
        return all((folder / file).is_file() for file in set(read_index(folder).values()))
    except BadInput:
        return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def hub(machine: Machine) -> Iterator[Row]:
    """Where model and data are: at a local path, in the cache, or on the hub."""
    config = machine.config
    if config is None:
        answer = ask_hub(machine, "model", SOME_MODEL, None)
        models = len(list(hub_folder(machine).glob("models--*")))
        if answer == "there":
            yield ok(f"the hub answers; {models} models in {hub_folder(machine)}")
        else:
            fix = "work with local copies (--model.path, --data.path), or fill the cache: hf download MODEL"
            yield warn(f"the hub does not answer ({answer}); {models} models in {hub_folder(machine)}", fix)
        return
    yield _place(machine, "model", config.model.path, config.model.id, config.model.revision)
    yield _place(machine, "dataset", config.data.path, config.data.id, None)


def _place(machine: Machine, kind: str, path: str | None, identifier: str | None, revision: str | None) -> Row:
    key = "model" if kind == "model" else "data"
    if path is not None:
        return _local(machine, kind, Path(path))
    if identifier is None:
        return fail("neither data.id nor data.path is set", "--data.path FILE")
    if there := cached(machine, kind, identifier):
        return ok(f"{key}.id {identifier} is in the cache: {there}")
    if is_offline(machine):
        flag = " --repo-type dataset" if kind == "dataset" else ""
        get = f"HF_HUB_OFFLINE=0 hf download {identifier}{flag}, or --{key}.path DIRECTORY"
        return fail(f"{key}.id {identifier} is not in {hub_folder(machine)}, and HF_HUB_OFFLINE is set", get)
    answer = ask_hub(machine, kind, identifier, revision)
    if answer == "there":
        return ok(f"{key}.id {identifier} is on the hub, not in the cache yet")
    if "gated" in answer:
        fix = f"accept its terms at https://huggingface.co/{identifier}, then hf auth login"
    elif "no answer" in answer or "hangs" in answer:
        fix = f"check the network (HTTPS_PROXY, HF_ENDPOINT), or --{key}.path with a local copy"
    else:
        fix = f"check the spelling, hf auth login for a private one, or --{key}.path with a local copy"
    return fail(f"{key}.id {identifier}: {answer}; not in {hub_folder(machine)} either", fix)


def _local(machine: Machine, kind: str, path: Path) -> Row:
    config = machine.config
    key = "model.path" if kind == "model" else "data.path"
    make = f"--{key} with the right one"
    if path.name == "tiny-base":
        make = f"python recipes/tiny_base.py --out {path}"
    if not path.exists():
        return fail(f"{key} {path} does not exist", make)
    if kind == "model" and not is_whole_model(path):
        return fail(f"{key} {path} has no config.json, or not all of its weights", make)
    split = config.data.train_split.partition("[")[0]
    if kind == "dataset" and path.is_dir() and not any(path.glob(f"{split}*")):
        return fail(f"{key} {path} has no file of the split {split}", "--data.train_split NAME")
    return ok(f"{key} {path} is there")


def is_offline(machine: Machine) -> bool:
    """Whether huggingface_hub is set to offline mode."""
    values = (machine.environment.get(key, "") for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def ask_hub(machine: Machine, kind: str, identifier: str, revision: str | None) -> str:
    """`there`, or why the hub does not serve it; in a child process, because a DNS lookup cannot be interrupted."""
    outcome = run_step(machine, HUB_LIMIT_S, "hub", "hub_head", kind, identifier, revision, HEAD_LIMIT_S)
    return reason(outcome) if outcome.fault else outcome.facts


def model_gib(machine: Machine) -> tuple[float | None, bool]:
    """(GiB of the model's 16-bit weights, whether they are on this disk); None if the size is unknown."""
    config = machine.config
    place = Path(config.model.path) if config.model.path else cached(machine, "model", config.model.id)
    if place is not None and place.is_dir():
        files = [*place.glob("*.safetensors")] or [*place.glob("*.bin")]
        return sum(file.stat().st_size for file in files) / GIB, True
    billions = re.search(r"(\d+(?:\.\d+)?)[bB]\b", config.model.id)
    return (float(billions[1]) * 2e9 / GIB if billions else None), False


def disk_needs(machine: Machine) -> dict[str, tuple[Path, float]]:
    """{purpose: (path, GiB)} of what the run writes; without a run only the paths."""
    import tempfile

    places = {"hub cache": (hub_folder(machine), 0.0), "temporary files": (Path(tempfile.gettempdir()), 0.0)}
    config = machine.config
    if config is None:
        return {"runs": (Path("runs"), 0.0), **places}
    size, is_here = model_gib(machine)
    size = size or 0.0
    if not is_here:
        places["hub cache"] = (places["hub cache"][0], size)
    if machine.needs_server:
        from kit.core.run_directory import base_directory

        base = base_directory(config)
        copy = NF4_COPY_SHARE if config.policy.quantization == "nf4" else 0.0
        places["dequantized base"] = (base, 0.0 if base.exists() else size * (1 + copy))
    return {"run": (config.run.directory, size * _run_share(config)), **places}


def _run_share(config: Config) -> float:
    """Size of a run's output as a share of its model: merged formats, adapters, checkpoints."""
    merged = sum(FORMAT_SHARES.get(one, QUARTER_SHARE) for one in config.eval.formats)
    adapter = ADAPTER_SHARE * config.policy.lora_rank / 16
    saves = config.train.max_steps // config.train.save_steps + 1
    return merged + adapter * (saves + 3 * config.train.keep_checkpoints)
