"""Made machines and made faults for launch.doctor: what each check shall say of them."""

import json
import os
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from kit.core.config.load import load_config
from launch.checks import gpu, host, packages, run
from launch.checks.children import Outcome
from launch.checks.machine import GIB, Machine, Row
from launch.starting.trainer_command import read_accelerate
from tests.unit.command_lines import ROOT

TINY = ROOT / "recipes/configs/grpo-tiny-nf4-cpu.yaml"
BIG = ROOT / "recipes/configs/grpo-qwen3_8b-nf4-fp8-1x24gb.yaml"
ONE_GPU, ZERO2, TWO_NODES = (f"accelerate_configs/{name}.yaml" for name in ("one_gpu", "zero2", "two_nodes"))
H200 = "{index}, GPU-{index}ab, NVIDIA H200, 580.65.06, 143771, {used}, 9.0, {mig}"
A100 = "{index}, GPU-{index}ab, NVIDIA A100-SXM4-80GB, 580.65.06, 81920, {used}, 8.0, {mig}"
T4 = "{index}, GPU-{index}ab, Tesla T4, 580.65.06, 15360, {used}, 7.5, [N/A]"
V100 = "{index}, GPU-{index}ab, Tesla V100-SXM2-16GB, 535.54.03, 16384, {used}, 7.0, [N/A]"


def smi(line: str, count: int = 1, used: int = 5, mig: str = "Disabled", apps: str = "") -> Callable:
    """nvidia-smi of a machine with `count` equal GPUs."""

    def run(command: list[str]) -> str | None:
        if "--query-compute-apps" in " ".join(command):
            return apps
        return "\n".join(line.format(index=index, used=used, mig=mig) for index in range(count)) + "\n"

    return run


def machine(config: Path | None = None, changes: dict | None = None, launcher: str | None = None, **parts) -> Machine:
    """A machine without GPUs, with an environment of its own, for a run when there is a configuration."""
    overrides = [f"--{key}={value}" for key, value in (changes or {}).items()]
    facts = {"run_tool": lambda command: None, "which": lambda name: None, "environment": {"OMP_NUM_THREADS": "1"}}
    if config:
        facts["config"] = load_config(config, overrides)
        facts["config_words"] = f"--config {config.relative_to(ROOT)}"
    if launcher:
        facts |= {"launcher": str(ROOT / launcher), "accelerate": read_accelerate(str(ROOT / launcher))}
    return Machine(**facts | parts)


def served(**changes) -> Machine:
    return machine(TINY, {"rollout.backend": "server", **changes})


def statvfs(free_gib: float, inodes: int = 1000) -> Callable:
    return lambda path: SimpleNamespace(f_bavail=free_gib * GIB, f_frsize=1, f_files=1000, f_favail=inodes)


def limit(**values: int) -> Callable:
    """resource.getrlimit with these soft limits; the others are large enough."""
    import resource

    names = {resource.RLIMIT_NOFILE: ("files", 65536), resource.RLIMIT_MEMLOCK: ("locked", 1 << 34)}
    names[resource.RLIMIT_CORE] = ("core", 0)
    return lambda which: (values.get(names[which][0], names[which][1]), values.get("most", 1 << 20))


def variables(config: Path | None = None, **values: str) -> Machine:
    return machine(config, environment={"OMP_NUM_THREADS": "1", **values})


def requirements(folder: Path, *pins: str) -> Path:
    """A checkout with these pins, included by the file of either device."""
    (folder / "requirements.txt").write_text("# pins\n" + "\n".join(pins) + "\n")
    for device in ("cpu", "cuda"):
        (folder / f"requirements-{device}.txt").write_text("-r requirements.txt\n")
    return folder


def distribution(folder: Path, name: str, version: str, *needs: str) -> None:
    """An installed distribution, as importlib.metadata finds it in `folder`."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Requires-Dist: {need}" for need in needs]
    (info / "METADATA").write_text("\n".join([f"Name: {name}", f"Version: {version}", *lines]) + "\n")


def lock(folder: Path, age_s: float) -> Path:
    place = folder / "torch_extensions/py311/fused_adam"
    place.mkdir(parents=True)
    for file in (place / "lock", place / "build.ninja"):
        file.touch()
        os.utime(file, (time.time() - age_s,) * 2)
    return folder / "torch_extensions"


def compiler(folder: Path, age_s: float = 9999.0, launcher: str | None = None, **parts) -> list[Row]:
    environment = {"TORCH_EXTENSIONS_DIR": str(lock(folder, age_s))}
    tools = {"which": lambda name: f"/usr/bin/{name}", "environment": environment}
    return [*host.compiler(machine(launcher=launcher, **tools | parts))]


AWAKE = {"server.sleep": False}
RICH = metadata.version("rich")
GOOD = Outcome(1.0, {"gb_per_s": 100.0, "mib": 16})
HUNG = Outcome(75.0, fault="hangs: no end within 75 s", log="NCCL WARN something\n")
DEVICE = {"name": "NVIDIA H200", "capability": [9, 0], "errors": {"bfloat16": 0.002, "fp8": 0.037}}
SEEN = {"version": "2.13.0+cu130", "cuda": "13.0", "available": True, "devices": [DEVICE]}
TOKEN = {"version": "0.31.0", "token": 5, "delta": 0.05, "start_s": 3.0, "unknown": {}}
ON_H200 = {"run_tool": smi(H200)}


def seen(**changes) -> Outcome:
    return Outcome(1.0, SEEN | changes)


def wrong_device(**errors) -> Outcome:
    return seen(devices=[DEVICE | {"errors": errors}])


def vllm_fault(text: str, plain: Outcome | None = None, weights: str | None = "fp8_per_channel") -> Iterator[Row]:
    return gpu.vllm_rows(machine(), weights, Outcome(9.0, fault=text), plain)


# name: (rows of the fault, its status, what it says)
FAULTS: dict[str, tuple[Callable[[Path], Iterator[Row]], str, str]] = {
    "old python": (lambda t: host.python(machine(), (3, 9, 2)), "fail", "3.9.2"),
    "no vector instructions": (lambda t: host.platform(machine(), "sse2"), "warn", "AVX2"),
    "no memory": (lambda t: host.memory(machine(), (16.0, 0.5)), "fail", "0.5 of 16.0 GiB"),
    "little memory": (lambda t: host.memory(machine(), (16.0, 4.0)), "warn", "4.0 of 16.0 GiB"),
    "few files": (lambda t: host.limits(machine(), limit(files=256), False), "fail", "256 open files"),
    "few files ever": (lambda t: host.limits(machine(), limit(files=2000, most=2000), False), "warn", "2000"),
    "locked memory": (lambda t: host.limits(machine(), limit(locked=1 << 23), True), "warn", "8 MiB of locked"),
    "small shm": (lambda t: host.shm(machine(statvfs=statvfs(0.06))), "warn", "0.06 GiB free in /dev/shm"),
    "shm for tensor parallel": (
        lambda t: host.shm(machine(BIG, {"server.tensor_parallel": 4}, statvfs=statvfs(2.0), run_tool=smi(H200, 4))),
        "fail", "4 processes that exchange tensors need 4"),
    "full disk": (lambda t: host.disk(machine(statvfs=statvfs(0.2)), {"run": (t / "runs", 0.0)}),
        "fail", "0.2 GiB free for run; 1.0 are needed"),
    "disk that the run fills": (
        lambda t: host.disk(machine(statvfs=statvfs(20)), {"run": (t, 15.0), "base": (t / "b", 8.0)}),
        "fail", "20.0 GiB free for run 15.0, base 8.0; 24.0 are needed"),
    "disk nearly full": (lambda t: host.disk(machine(statvfs=statvfs(3)), {"run": (t, 0.0)}), "warn", "3.0 GiB free"),
    "no inodes": (lambda t: host.disk(machine(statvfs=statvfs(99, 0)), {"run": (t, 0.0)}), "fail", "no inode is left"),
    "place that cannot be written": (lambda t: host.disk(machine(), {"run": (Path("/proc/sys/runs"), 0.0)}),
        "fail", "run /proc/sys/runs"),
    "no compiler": (lambda t: compiler(t, 0, which=lambda name: None), "fail", "no C++ compiler"),
    "only a C compiler": (
        lambda t: compiler(t, 0, which=lambda name: name if name in ("gcc", "ninja") else None, **ON_H200),
        "warn", "no C++ compiler"),
    "no headers": (lambda t: host.compiler(machine(which=lambda n: n, environment={}, **ON_H200), t),
        "fail", "Python.h is missing"),
    "ninja for deepspeed": (
        lambda t: compiler(t, 0, ZERO2, which=lambda n: None if n == "ninja" else n),
        "fail", "ninja is not on PATH"),
    "lock left behind": (lambda t: compiler(t), "warn", "fused_adam/lock"),
    "lock for deepspeed": (lambda t: compiler(t, launcher=ZERO2), "fail", "left its lock"),
    "threads": (lambda t: host.environment(variables(OMP_NUM_THREADS="4096")), "warn", "4096 on"),
    "threads that are none": (lambda t: host.environment(variables(OMP_NUM_THREADS="all")), "fail", "'all'"),
    "log level": (lambda t: host.environment(variables(VLLM_LOGGING_LEVEL="LOUD")), "fail", "LOUD"),
    "quiet log": (lambda t: host.environment(variables(VLLM_LOGGING_LEVEL="ERROR")), "warn", "reasons"),
    "open routes": (lambda t: host.environment(variables(VLLM_SERVER_DEV_MODE="1")), "warn", "collective_rpc"),
    "blocking": (lambda t: host.environment(variables(CUDA_LAUNCH_BLOCKING="1")), "warn", "BLOCKING"),
    "rank": (lambda t: host.environment(variables(RANK="3")), "warn", "one of several processes"),
    "segments with sleep": (
        lambda t: host.environment(variables(BIG, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")),
        "warn", "the trainer asks for it by itself"),
    "package missing": (lambda t: packages.packages(machine(root=requirements(t, "no-such-distribution==1.0"))),
        "fail", "missing: no-such-distribution 1.0"),
    "package of another version": (lambda t: packages.packages(machine(root=requirements(t, "Rich==3.1.0"))),
        "fail", f"rich {RICH}, requirements-cpu.txt pins 3.1.0"),
    "package of another patch": (
        lambda t: packages.packages(machine(root=requirements(t, f"rich=={RICH.rpartition('.')[0]}.99"))),
        "warn", ".99"),
    "no requirements": (lambda t: packages.packages(machine(root=t)), "fail", "cannot be read"),
    "no gpu shown": (lambda t: gpu.gpu(machine(which=lambda n: n)), "fail", "shows no GPU"),
    "no fp8": (lambda t: gpu.gpu(machine(run_tool=smi(A100))), "warn", "no FP8"),
    "no fp8 for the server": (lambda t: gpu.gpu(machine(BIG, run_tool=smi(A100))), "fail", "which vLLM refuses on"),
    "no bf16": (lambda t: gpu.gpu(machine(BIG, run_tool=smi(T4))), "fail", "model.dtype is bfloat16, which Tesla T4"),
    "too old": (lambda t: gpu.gpu(machine(BIG, run_tool=smi(V100))), "fail", "is not supported"),
    "weights-only nvfp4": (lambda t: gpu.gpu(machine(BIG, {"eval.formats": "[bf16, fp8, nvfp4]"}, **ON_H200)),
        "warn", "does not multiply in nvfp4"),
    "split gpu": (lambda t: gpu.gpu(machine(run_tool=smi(H200, mig="Enabled"))), "warn", "MIG"),
    "gpu in use": (lambda t: gpu.gpu(machine(run_tool=smi(H200, used=9000, apps="GPU-0ab, 4711, python, 8990 MiB\n"))),
        "warn", "python (pid 4711, 8990 MiB)"),
    "gpu in use by others": (lambda t: gpu.gpu(machine(run_tool=smi(H200, used=9000))), "warn", "not visible"),
    "gpu that is not there": (lambda t: gpu.gpu(machine(environment={"CUDA_VISIBLE_DEVICES": "0,7"}, **ON_H200)),
        "fail", "CUDA_VISIBLE_DEVICES=0,7 shows 1 GPUs"),
    "every gpu hidden": (lambda t: gpu.gpu(machine(environment={"CUDA_VISIBLE_DEVICES": ""}, **ON_H200)),
        "warn", "hides every GPU"),
    "cuda build, no gpu": (lambda t: gpu.torch(machine(), ("2.13.0", "13.0")), "fail", "there is no GPU"),
    "cpu build, gpu": (lambda t: gpu.torch(machine(**ON_H200), ("2.13.0+cpu", None)), "fail", "built without CUDA"),
    "old driver": (lambda t: gpu.torch(machine(run_tool=smi(V100)), ("2.13.0", "13.0")),
        "fail", "needs driver 580 or newer; this is 535.54.03"),
    "no torch": (lambda t: gpu.torch(machine(), ("", None)), "fail", "not installed"),
    "device that torch cannot use": (
        lambda t: gpu.torch_rows(machine(**ON_H200), seen(available=False, reason="no kernel module")),
        "fail", "no kernel module"),
    "wrong product": (lambda t: gpu.torch_rows(machine(**ON_H200), wrong_device(bfloat16=0.7, fp8=0.037)),
        "fail", "a bfloat16 product: is off by 70.0%"),
    "no fp8 kernel": (lambda t: gpu.torch_rows(machine(**ON_H200), wrong_device(bfloat16=0.0, fp8="no kernel image")),
        "fail", "a fp8 product: no kernel image"),
    "fewer gpus in torch": (lambda t: gpu.torch_rows(machine(run_tool=smi(H200, 2)), Outcome(1.0, SEEN)),
        "warn", "torch sees 1 GPUs, nvidia-smi 2"),
    "bitsandbytes": (lambda t: [gpu.bitsandbytes_row(machine(), Outcome(1.0, fault="ValueError: off by 30 %"))],
        "fail", "off by 30 %"),
    "vllm in fp8": (lambda t: vllm_fault("ValueError: no kernel", Outcome(9.0, TOKEN)), "fail", "bf16 works"),
    "vllm": (lambda t: vllm_fault("RuntimeError: broken", Outcome(9.0, fault="too")), "fail", "broken"),
    "vllm compiler": (lambda t: vllm_fault("InvalidCxxCompiler: No working C++ compiler"), "fail", "compiler"),
    "vllm memory": (lambda t: vllm_fault("its process was killed by SIGKILL", weights=None), "fail", "bf16: its"),
    "vllm import": (lambda t: vllm_fault("ImportError: undefined symbol: x"), "fail", "undefined symbol"),
    "unknown variable": (
        lambda t: gpu.vllm_rows(machine(), None, Outcome(1.0, TOKEN | {"unknown": {"VLLM_A": ["VLLM_AB"]}}), None),
        "warn", "did you mean VLLM_AB?"),
    "nccl": (lambda t: [gpu.collective_row(machine(), "nccl", [GOOD, HUNG], {"NCCL_P2P_DISABLE": False})],
        "fail", "2 GPUs by nccl: rank 1: hangs"),
    "nccl without p2p": (lambda t: [gpu.collective_row(machine(), "nccl", [HUNG, HUNG], {"NCCL_P2P_DISABLE": True})],
        "fail", "with NCCL_P2P_DISABLE=1 it works"),
    "gloo": (lambda t: [gpu.collective_row(machine(), "gloo", [HUNG, GOOD], {})], "fail", "by gloo: rank 0"),
    "keys that contradict": (
        lambda t: run.settings(machine(TINY, {"rollout.group_size": 7, "run.output_dir": t / "r"})),
        "fail", "rollout.group_size (7) must divide"),
    "launcher in bf16": (
        lambda t: run.settings(machine(TINY, {"run.output_dir": t / "r"}, ONE_GPU, **ON_H200)),
        "fail", "mixed_precision: bf16"),
    "launcher that shards": (
        lambda t: run.settings(machine(BIG, {"run.output_dir": t / "r"}, accelerate={"distributed_type": "FSDP"})),
        "fail", "fsdp_version is 1"),
    "no api key": (
        lambda t: run.servers(served(**{"rollout.server_urls": "['http://0.0.0.0:8000']"})),
        "fail", "without a key"),
    "no base": (lambda t: run.servers(served(**{"server.base": t / "b"})),
        "warn", "is not there yet"),
    "broken base": (lambda t: run.servers(served(**{"server.base": t})),
        "fail", "has no manifest.json"),
    "gpu launcher, no gpu": (
        lambda t: run.gpus_needed(machine(BIG, {"train.gpus": "null"}, "accelerate_configs/ddp.yaml")),
        "fail", "is for GPUs and CUDA shows none here"),
    "two machines, no gpu": (lambda t: run.gpus_needed(machine(BIG, launcher=TWO_NODES)),
        "fail", "is for GPUs and CUDA shows none here"),
    "two machines, few gpus": (
        lambda t: run.gpus_needed(machine(TINY, launcher=TWO_NODES, **ON_H200)),
        "fail", "16 trainer processes on 2 machines of 1 GPUs"),
    "trainer on a gpu that is not there": (lambda t: run.gpus_needed(machine(TINY, {"train.gpus": "[5]"}, **ON_H200)),
        "fail", "train.gpus names 5"),
    "shared card that is too small": (
        lambda t: run.gpus_needed(machine(BIG, AWAKE | {"train.max_gpu_gib": 139.9}, ONE_GPU, **ON_H200)),
        "fail", "exceed its 140.4 GiB"),
    "no model": (lambda t: run.hub(machine(TINY, {"model.path": t / "absent", "data.path": TINY})),
        "fail", "does not exist"),
    "half a model": (lambda t: run.hub(machine(TINY, {"model.path": t, "data.path": TINY})),
        "fail", "not all of its weights"),
    "no split": (lambda t: run.hub(machine(TINY, {"data.path": t, "model.path": whole_model(t / "m")})),
        "fail", "no file of the split train"),
    "offline and not cached": (lambda t: run.hub(machine(BIG, environment={"HF_HUB_OFFLINE": "1", "HF_HOME": str(t)})),
        "fail", "data.id openai/gsm8k is not in"),
}  # fmt: skip


def whole_model(folder: Path, *absent: str) -> Path:
    """A checkpoint of two shards, less the `absent` ones."""
    folder.mkdir(parents=True)
    shards = {name: f"model-{name}.safetensors" for name in ("a", "b")}
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for name, file in shards.items():
        if name not in absent:
            (folder / file).write_bytes(b"\0" * 1000)
    return folder
