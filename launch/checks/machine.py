"""Result row of a `launch.doctor` check, and the machine being checked. Needs only the standard library."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.core.config.schema import Config

ROOT = Path(__file__).parents[2]
TOOL_LIMIT_S = 15.0
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One line of the report. `found` holds the numbers; `fix`, set for fail and warn, is what to do about it."""

    status: str  # ok, warn, fail or skip
    found: str
    fix: str = ""
    name: str = ""  # of the check


def ok(found: str) -> Row:
    return Row("ok", found)


def warn(found: str, fix: str) -> Row:
    return Row("warn", found, fix)


def fail(found: str, fix: str) -> Row:
    return Row("fail", found, fix)


def skip(why: str) -> Row:
    return Row("skip", why)


def split_message(text: str) -> tuple[str, str]:
    """Split a kit error message into what is wrong (its first sentence) and what to do (the rest)."""
    parts = re.split(r"(?<=[.:)])\s+(?=[A-Z])", text, maxsplit=1)
    return parts[0].rstrip(".:"), parts[1].rstrip(".") if len(parts) > 1 else "change that key"


def run_tool(command: list[str]) -> str | None:
    """Standard output of a short command; None if it is not installed, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi lists it; memory in GiB. `capability` is (0, 0) if the driver does not report it."""

    index: str
    uuid: str
    name: str
    driver: str
    total_gib: float
    used_gib: float
    capability: tuple[int, int]
    is_split: bool  # MIG


@dataclass(frozen=True)
class Machine:
    """The machine and the run it is to carry; tests substitute fake parts.

    `config_words` is the command line for the same configuration (`--config X.yaml --group.key value`);
    `accelerate` is the content of the accelerate config at `launcher`. All are unset without a run.
    """

    config: "Config | None" = None
    config_words: str = ""
    launcher: str | None = None
    accelerate: dict[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    run_tool: Callable[[list[str]], str | None] = run_tool
    which: Callable[[str], str | None] = shutil.which
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs
    root: Path = ROOT
    logs: Path | None = None  # where the output of child processes is kept

    @cached_property
    def all_gpus(self) -> list[Gpu]:
        """Every GPU of the machine, regardless of CUDA_VISIBLE_DEVICES."""
        fields = ["index", "uuid", "name", "driver_version", "memory.total", "memory.used", "compute_cap"]
        for asked in ([*fields, "mig.mode.current"], fields, fields[:-1]):  # older drivers support fewer fields
            query = ["nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader,nounits"]
            if text := self.run_tool(query):
                return [_gpu([part.strip() for part in line.split(",")]) for line in text.splitlines() if line.strip()]
        return []

    @cached_property
    def gpus(self) -> list[Gpu]:
        """The GPUs that a CUDA process started here would see, in CUDA's order."""
        listed = self.environment.get("CUDA_VISIBLE_DEVICES")
        if listed is None:
            return self.all_gpus
        found = []
        for name in (part.strip() for part in listed.split(",")):
            match = [gpu for gpu in self.all_gpus if name and (gpu.index == name or gpu.uuid.startswith(name))]
            if len(match) != 1:
                break  # CUDA stops at the first unknown entry
            found += match
        return found

    def log(self, name: str) -> Path | None:
        """Where the output of a check's child processes is kept, if anywhere."""
        return self.logs and self.logs / f"{name}.log"

    @property
    def uses_deepspeed(self) -> bool:
        return (self.accelerate or {}).get("distributed_type") == "DEEPSPEED"

    @property
    def needs_server(self) -> bool:
        return self.config is not None and self.config.rollout.backend == "server"

    @property
    def machines(self) -> int:
        """Number of machines that the trainer runs on."""
        return int((self.accelerate or {}).get("num_machines", 1))

    @property
    def processes_here(self) -> int:
        """Maximum number of processes on this machine that exchange tensors with each other."""
        shards = self.config.server.tensor_parallel if self.needs_server else 1
        trainers = int((self.accelerate or {}).get("num_processes", 1)) // self.machines
        return max(1, shards, min(trainers, len(self.gpus)) if self.gpus else trainers)


def _gpu(parts: list[str]) -> Gpu:
    parts += [""] * (8 - len(parts))
    capability = re.fullmatch(r"(\d+)\.(\d+)", parts[6])
    total, used = (float(text) / 1024 if re.fullmatch(r"[\d.]+", text) else 0.0 for text in parts[4:6])
    return Gpu(
        index=parts[0],
        uuid=parts[1],
        name=parts[2],
        driver=parts[3],
        total_gib=total,
        used_gib=used,
        capability=(int(capability[1]), int(capability[2])) if capability else (0, 0),
        is_split=parts[7] == "Enabled",
    )


def existing_parent(path: Path) -> Path:
    """The nearest existing ancestor of a path (or the path itself): the file system on which it would be created."""
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path


def cores() -> float:
    """Processor cores available to this process: its affinity, capped by the container's quota."""
    count = float(len(os.sched_getaffinity(0)))
    quota = read_text("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        count = min(count, int(quota[0]) / int(quota[1]))
    return count


def memory_gib() -> tuple[float, float]:
    """(total, available) memory in GiB: the machine's, or the container's when that is less."""
    kib = dict(re.findall(r"^(\w+): +(\d+) kB", read_text("/proc/meminfo"), re.M))
    whole, free = (int(kib.get(key, 0)) / 2**20 for key in ("MemTotal", "MemAvailable"))
    limit, used = (read_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and int(limit) / GIB < whole:
        whole = int(limit) / GIB
        free = min(free, whole - int(used or 0) / GIB)
    return whole, free


def read_text(path: str | Path) -> str:
    """A file's text; empty if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
