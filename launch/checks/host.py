"""Host checks of `launch.doctor`: Python, processor, memory, limits, disk, environment variables, compiler."""

import fcntl
import os
import platform as system
import resource
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from launch.checks.machine import (
    GIB,
    Machine,
    Row,
    cores,
    existing_parent,
    fail,
    memory_gib,
    ok,
    read_text,
    warn,
)

OLDEST_PYTHON = (3, 11)
FEW_CORES = 4
LEAST_MEMORY_GIB, LOW_MEMORY_GIB = 2.0, 6.0
LEAST_FILES, ENOUGH_FILES = 1024, 4096
# Shared memory that vLLM's workers and NCCL use on one machine.
SHM_GIB, SHM_GIB_PER_WORKER = 0.5, 1.0
LEAST_DISK_GIB, LOW_DISK_GIB = 1.0, 5.0
# A running compile writes into its folder; one that has been quiet for this long was abandoned.
QUIET_S = 180.0
VLLM_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def python(machine: Machine, version: tuple[int, ...] = sys.version_info[:3]) -> Iterator[Row]:
    """Interpreter version."""
    found = f"{'.'.join(map(str, version))} at {sys.executable}"
    if version < OLDEST_PYTHON:
        yield fail(f"{found}; 3.11 or newer is needed", "make install PYTHON=python3.11")
    else:
        yield ok(found)


def platform(machine: Machine, flags: str | None = None) -> Iterator[Row]:
    """Operating system, processor and cores."""
    kind = system.system()
    if kind != "Linux":
        yield fail(f"{kind}: vLLM has no builds for it", "use Linux, or WSL 2 on Windows")
        return
    flags = read_text("/proc/cpuinfo") if flags is None else flags
    sets = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags.split()]
    count = cores()
    found = f"Linux {system.machine()}, {count:g} cores, {', '.join(sets) or 'no AVX'}"
    if not machine.all_gpus and system.machine() == "x86_64" and "avx2" not in sets:
        yield warn(f"{found}: vLLM for CPUs needs AVX2 or AVX-512", "use a newer processor, or a GPU")
    elif count < 2:
        yield warn(f"{found}: trainer and server need a core each", "give the container 2 cores or more")
    elif not machine.all_gpus and system.machine() == "x86_64" and "avx512f" not in sets:
        yield ok(f"{found}: vLLM for CPUs serves w4a16 and awq only with AVX-512, fp8 and bf16 here too")
    else:
        yield ok(found)


def memory(machine: Machine, gib: tuple[float, float] | None = None) -> Iterator[Row]:
    """Host memory, or the container's when that is less."""
    whole, free = gib or memory_gib()
    found = f"{free:.1f} of {whole:.1f} GiB are free"
    if free < LEAST_MEMORY_GIB:
        yield fail(f"{found}; importing torch and vLLM takes {LEAST_MEMORY_GIB:g}", "ps aux --sort=-rss | head")
    elif free < LOW_MEMORY_GIB:
        yield warn(f"{found}; trainer and server together take {LOW_MEMORY_GIB:g}", "ps aux --sort=-rss | head")
    else:
        yield ok(found)


def limits(machine: Machine, read=resource.getrlimit, has_infiniband: bool | None = None) -> Iterator[Row]:
    """ulimits: open files, locked memory, core dumps."""
    bad = False
    files, most_files = (_count(value) for value in read(resource.RLIMIT_NOFILE))
    locked, _ = (_count(value) for value in read(resource.RLIMIT_MEMLOCK))
    core, _ = (_count(value) for value in read(resource.RLIMIT_CORE))
    if files < ENOUGH_FILES:
        bad = True
        found = f"{files:.0f} open files (ulimit -n); a server with hundreds of requests needs {ENOUGH_FILES}"
        fix = f"ulimit -n {min(65536, most_files):.0f}"
        if most_files < ENOUGH_FILES:
            fix = "docker run --ulimit nofile=65536, or raise nofile in /etc/security/limits.conf"
        yield (fail if files < LEAST_FILES else warn)(found, fix)
    if has_infiniband is None:
        has_infiniband = Path("/sys/class/infiniband").is_dir()
    if has_infiniband and locked < GIB:
        bad = True
        found = f"{locked / 2**20:.0f} MiB of locked memory (ulimit -l): NCCL over InfiniBand registers more"
        yield warn(found, "ulimit -l unlimited, or docker run --ulimit memlock=-1")
    if core > 10 * GIB and not read_text("/proc/sys/kernel/core_pattern").startswith("|"):
        bad = True
        found = "core dumps are on (ulimit -c): a crashed server writes its whole memory into its log folder"
        yield warn(found, "ulimit -c 0")
    if not bad:
        told = "unlimited" if locked == float("inf") else f"{locked / 2**20:.0f} MiB"
        yield ok(f"{files:.0f} open files, {told} locked memory, core dumps {'on' if core else 'off'}")


def _count(value: int) -> float:
    return float("inf") if value == resource.RLIM_INFINITY else float(value)


def shm(machine: Machine) -> Iterator[Row]:
    """Free space in /dev/shm, through which processes on one machine pass tensors."""
    try:
        stat = machine.statvfs("/dev/shm")
    except OSError as error:
        yield fail(f"/dev/shm cannot be read: {error.strerror}", "mount -t tmpfs -o size=16g tmpfs /dev/shm")
        return
    free = stat.f_bavail * stat.f_frsize / GIB
    workers = machine.processes_here
    needed = SHM_GIB if workers == 1 else SHM_GIB_PER_WORKER * workers
    found = f"{free:.2f} GiB free in /dev/shm"
    if free < needed:
        what = f"{found}; {workers} processes that exchange tensors need {needed:g}"
        fix = "docker run --shm-size=16g (or --ipc=host); else: sudo mount -o remount,size=16g /dev/shm"
        yield (fail if workers > 1 else warn)(what, fix)
    else:
        yield ok(found)


def disk(machine: Machine, needs: dict[str, tuple[Path, float]]) -> Iterator[Row]:
    """Free space, inodes, and whether files can be written and locked. `needs` is {purpose: (path, GiB)}; needs on
    the same file system are added up."""
    systems: dict[int, list[tuple[str, Path, float]]] = {}
    for purpose, (path, gib) in needs.items():
        place = existing_parent(path)
        if fault := _cannot_write(place):
            yield fail(f"{purpose} {path}: {fault}", f"chmod u+w {place}, or choose another place")
            continue
        systems.setdefault(os.stat(place).st_dev, []).append((purpose, place, gib))
    for users in systems.values():
        stat = machine.statvfs(str(users[0][1]))
        free, needed = stat.f_bavail * stat.f_frsize / GIB, sum(gib for _, _, gib in users)
        parts = [f"{purpose} {gib:.1f}" if gib >= 0.05 else purpose for purpose, _, gib in users]
        found = f"{free:.1f} GiB free for {', '.join(parts)}"
        fix = f"du -xsh {users[0][1]}/* | sort -h | tail, or --run.output_dir and HF_HOME on a larger disk"
        if free < needed + LEAST_DISK_GIB:
            yield fail(f"{found}; {needed + LEAST_DISK_GIB:.1f} are needed", fix)
        elif stat.f_files and not stat.f_favail:
            yield fail(f"{found}, and no inode is left", fix)
        elif free < needed + LOW_DISK_GIB:
            yield warn(f"{found}; {needed + LOW_DISK_GIB:.1f} leave room for logs and compiled kernels", fix)
        else:
            yield ok(found)


def _cannot_write(place: Path) -> str:
    """Why a file cannot be created, written and locked at `place`; empty if it can."""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def environment(machine: Machine) -> Iterator[Row]:
    """Variables known to slow a run down, break it or send it elsewhere."""
    found = [*_threads(machine), *_odd_variables(machine)]
    yield from found
    if not found:
        threads = machine.environment.get("OMP_NUM_THREADS", "not set")
        yield ok(f"OMP_NUM_THREADS {threads}; nothing odd among VLLM_*, NCCL_*, HF_*, CUDA_* and RANK")


def _threads(machine: Machine) -> Iterator[Row]:
    text, count = machine.environment.get("OMP_NUM_THREADS"), cores()
    if text is None:
        if count <= FEW_CORES and not machine.gpus:
            found = f"OMP_NUM_THREADS is not set on {count:g} cores: threads waiting for each other cost minutes"
            yield warn(found, "export OMP_NUM_THREADS=1")
    elif not text.isdigit() or int(text) < 1:
        yield fail(f"OMP_NUM_THREADS is {text!r}, no number of threads", "export OMP_NUM_THREADS=1")
    elif int(text) > count:
        found = f"OMP_NUM_THREADS is {text} on {count:g} cores"
        yield warn(found, f"export OMP_NUM_THREADS={max(1, int(count))}")


def _odd_variables(machine: Machine) -> Iterator[Row]:
    value = machine.environment.get
    level = value("VLLM_LOGGING_LEVEL", "INFO")
    rules = [
        (level.upper() not in VLLM_LEVELS, fail, f"VLLM_LOGGING_LEVEL is {level!r}, none of {', '.join(VLLM_LEVELS)}",
         "VLLM_LOGGING_LEVEL"),
        (level.upper() in ("ERROR", "CRITICAL"), warn, f"VLLM_LOGGING_LEVEL={level} keeps the reasons out of a "
         "server's log", "VLLM_LOGGING_LEVEL"),
        (level.upper() == "DEBUG", warn, "VLLM_LOGGING_LEVEL=DEBUG slows a server down", "VLLM_LOGGING_LEVEL"),
        (value("VLLM_SERVER_DEV_MODE", "0") == "1", warn, "VLLM_SERVER_DEV_MODE=1 opens /collective_rpc to whoever "
         "reaches a server that is started by hand", "VLLM_SERVER_DEV_MODE"),
        (value("CUDA_LAUNCH_BLOCKING", "0") == "1", warn, "CUDA_LAUNCH_BLOCKING=1 waits after every kernel",
         "CUDA_LAUNCH_BLOCKING"),
        (value("NCCL_P2P_DISABLE", "0") == "1", warn, "NCCL_P2P_DISABLE=1 sends data between GPUs through the host",
         "NCCL_P2P_DISABLE"),
        (value("CUDA_DEVICE_ORDER", "FASTEST_FIRST") == "FASTEST_FIRST" and len({g.name for g in machine.gpus}) > 1,
         warn, "CUDA counts different GPUs by speed and nvidia-smi by slot, so server.gpus may mean others",
         "CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        ("expandable_segments:true" in _allocator(machine) and machine.needs_server and machine.config.server.sleep,
         warn, "expandable_segments does not go with the memory pool of server.sleep, where not every vLLM switches "
         "it off; the trainer asks for it by itself",
         "PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF"),
        ("WORLD_SIZE" in machine.environment or "RANK" in machine.environment, warn, "WORLD_SIZE or RANK is set "
         "outside of a launcher: a command takes itself for one of several processes", "WORLD_SIZE RANK LOCAL_RANK"),
    ]  # fmt: skip
    for is_odd, status, found, variables in rules:
        if is_odd:
            yield status(found, f"{'export' if '=' in variables else 'unset'} {variables}")


def _allocator(machine: Machine) -> str:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return " ".join(machine.environment.get(name, "") for name in names).lower()


def compiler(machine: Machine, include: Path | None = None) -> Iterator[Row]:
    """Compilers for kernels built on first use (vLLM, triton, DeepSpeed), and stale locks of killed compiles."""
    bad = False
    found = machine.which("g++") or machine.which("clang++")
    if not found:
        bad = True
        # Triton, which compiles GPU kernels, needs only a C compiler.
        is_enough = machine.gpus and not machine.uses_deepspeed and any(map(machine.which, ("gcc", "clang", "cc")))
        what = "no C++ compiler: vLLM and torch compile kernels on first use"
        yield (warn if is_enough else fail)(what, "sudo apt-get install g++")
    if not ((include or Path(sysconfig.get_path("include"))) / "Python.h").is_file():
        bad = True
        yield (fail if machine.gpus else warn)(
            "Python.h is missing: compiled kernels (triton on GPUs, torch's on CPUs) need it",
            f"sudo apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev",
        )
    if machine.uses_deepspeed and not machine.which("ninja"):
        bad = True
        venv = Path(sys.prefix) / "bin"
        fix = f"export PATH={venv}:$PATH" if (venv / "ninja").is_file() else f"{sys.executable} -m pip install ninja"
        yield fail("ninja is not on PATH, and DeepSpeed compiles a helper with it on first use", fix)
    for lock in _quiet_locks(machine):
        bad = True
        what = f"{lock}: a killed compile left its lock, and the next one waits for it forever"
        yield (fail if machine.uses_deepspeed else warn)(what, f"rm {lock}")
    if not bad:
        ninja = "ninja" if machine.which("ninja") else "no ninja (only DeepSpeed needs it)"
        yield ok(f"{found}, Python.h, {ninja}, no lock left behind")


def _quiet_locks(machine: Machine) -> list[Path]:
    cache = machine.environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(machine.environment.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions")
    found = []
    for lock in folder.glob("**/lock"):
        newest = max((file.stat().st_mtime for file in lock.parent.iterdir()), default=0.0)
        if time.time() - newest > QUIET_S:
            found.append(lock)
    return sorted(found)
