"""GPU checks of `launch.doctor`: driver, torch, bitsandbytes, vLLM, collectives."""

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kit.core.cards import PART_OF_CARD, Generation, generation
from kit.core.config.card_rules import describe, multiplies, server_faults, trainer_faults
from kit.core.formats import FORMATS, packed_format
from kit.core.processor import multiplies_int4
from launch.checks.children import Outcome, reason, run_step
from launch.checks.machine import Gpu, Machine, Row, fail, ok, skip, split_message, warn
from launch.checks.packages import install_command

# Oldest driver of each CUDA major version; within a major version, newer builds run on older drivers.
# https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/ table "minimum required driver version".
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
IN_USE_GIB = 1.0
TORCH_LIMIT_S, ROUND_TRIP_LIMIT_S, VLLM_LIMIT_S, COLLECTIVE_LIMIT_S = 60.0, 90.0, 150.0, 75.0
WRONG_BF16, WRONG_FP8 = 0.02, 0.10
# Settings to try when the GPUs cannot exchange data, cheapest first, and the diagnosis if one helps.
NCCL_CURES = {
    "NCCL_NVLS_ENABLE": ("0", "NVLink multicast is not usable here"),
    "NCCL_P2P_DISABLE": ("1", "direct access between the GPUs is broken (IOMMU or ACS); slower without"),
    "NCCL_SHM_DISABLE": ("1", "/dev/shm is too small or not shared; slower without"),
}


def gpu(machine: Machine) -> Iterator[Row]:
    """The GPUs, what their compute capability supports, MIG, and other processes on them."""
    if not machine.all_gpus:
        if machine.which("nvidia-smi"):
            yield fail(
                "nvidia-smi is installed and shows no GPU",
                "run nvidia-smi and read its message; in a container start it with --gpus all; after a driver update "
                "reboot",
            )
        else:
            yield skip("no NVIDIA GPU (no nvidia-smi): everything runs on the CPU")
        return
    listed = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None and len(machine.gpus) < len([part for part in listed.split(",") if part.strip()]):
        known = ", ".join(one.index for one in machine.all_gpus)
        what = f"CUDA_VISIBLE_DEVICES={listed} shows {len(machine.gpus)} GPUs; this machine has {known}"
        yield fail(what, "unset CUDA_VISIBLE_DEVICES")
    elif listed is not None and not machine.gpus:
        yield warn(f"CUDA_VISIBLE_DEVICES={listed!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    for (label, capability, gib), count in Counter(
        (one.name, one.capability, round(one.total_gib)) for one in machine.gpus
    ).items():
        yield from _capability(machine, label, f"{count} × {label}, {gib} GiB", capability)
    if len({one.name for one in machine.gpus}) > 1:
        found = f"different GPUs: {', '.join(one.name for one in machine.gpus)}; a job over all waits for the slowest"
        same = [one.index for one in machine.gpus if one.name == machine.gpus[0].name]
        yield warn(found, f"export CUDA_VISIBLE_DEVICES={','.join(same)}")
    for one in machine.gpus:
        if one.is_split:
            what = f"GPU {one.index} is split (MIG): a process sees one slice of it, and slices cannot use NCCL"
            yield warn(what, f"sudo nvidia-smi -i {one.index} -mig 0, or launch one process per slice")
        elif one.used_gib > IN_USE_GIB:
            yield warn(*_in_use(machine, one))


def _capability(machine: Machine, name: str, what: str, capability: tuple[int, int]) -> Iterator[Row]:
    config = machine.config
    if capability == (0, 0):
        yield warn(f"{what}: the driver does not report its compute capability", "update the NVIDIA driver")
        return
    row = generation(capability)
    found = f"{what}, compute capability {capability[0]}.{capability[1]}: {describe(row)}"
    if not row.is_covered or "bfloat16" not in row.dtypes or not row.trainer_fp8:
        yield warn(found, _fix_of(row))
    else:
        yield ok(found)
    if config is None:
        return
    for fault in dict.fromkeys([*trainer_faults(config, name, capability), *server_faults(config, name, capability)]):
        yield fail(*split_message(fault))
    if newer := [one for one in config.eval.formats if not multiplies(FORMATS[one], row)]:
        fix = f"take {', '.join(newer)} out of eval.formats, or use formats whose activations stay in 16 bits"
        yield warn(f"{name} does not multiply in {', '.join(newer)}", fix)


def _fix_of(row: Generation) -> str:
    if not row.is_covered:
        return "use a newer GPU"
    fixes = [] if "bfloat16" in row.dtypes else [f"--model.dtype {row.dtypes[0]}"]
    return " ".join([*fixes, "--server.weights bf16"])


def _in_use(machine: Machine, one: Gpu) -> tuple[str, str]:
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader"]
    rows = [line.split(", ") for line in (machine.run_tool(query) or "").splitlines()]
    holders = [row[1:] for row in rows if len(row) == 4 and row[0] == one.uuid]
    found = f"GPU {one.index}: {one.used_gib:.1f} of {one.total_gib:.0f} GiB are in use"
    if not holders:
        free = [other.index for other in machine.gpus if other.used_gib <= IN_USE_GIB]
        cure = f"export CUDA_VISIBLE_DEVICES={','.join(free)}" if free else "wait until they are free"
        return f"{found} by processes that are not visible from here (another container or user)", cure
    told = ", ".join(f"{row[1]} (pid {row[0]}, {row[2]})" for row in holders)
    return f"{found}: {told}", f"kill {' '.join(row[0] for row in holders)} (if nobody needs it)"


def torch_build() -> tuple[str, str | None]:
    """(version, CUDA version it was built for) of the installed torch, without importing it."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    text = Path(spec.origin).with_name("version.py").read_text() if spec and spec.origin else ""
    version, cuda = (re.search(rf"^{key}\b[^=]*= *'([^']+)'", text, re.M) for key in ("__version__", "cuda"))
    return version[1] if version else "", cuda[1] if cuda else None


def torch(machine: Machine, build: tuple[str, str | None] | None = None) -> Iterator[Row]:
    """Check the torch build against the driver, and a matrix product on every device."""
    version, cuda = build or torch_build()
    if not version:
        yield fail("torch is not installed", install_command(machine))
        return
    if fault := _build_fault(machine, version, cuda):
        yield fail(*fault)
        return
    if not machine.gpus:  # whether it loads is covered by the imports check
        yield ok(f"{version}, built for {'CUDA ' + cuda if cuda else 'CPU'}; no GPU to test")
        return
    yield from torch_rows(machine, run_step(machine, TORCH_LIMIT_S, "torch", "torch_devices"))


def _build_fault(machine: Machine, version: str, cuda: str | None) -> tuple[str, str] | None:
    if not machine.all_gpus:
        if cuda is None:
            return None
        return (
            f"torch {version} is built for CUDA {cuda} and there is no GPU",
            "make install DEVICE=cpu, or, in a container, start it with --gpus all",
        )
    if cuda is None:
        return f"torch {version} is built without CUDA and there are {len(machine.all_gpus)} GPUs", (
            "make install DEVICE=cuda"
        )
    driver, oldest = machine.all_gpus[0].driver, OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    if oldest and driver.split(".")[0].isdigit() and int(driver.split(".")[0]) < oldest:
        return (
            f"torch {version} is built for CUDA {cuda}, which needs driver {oldest} or newer; this is {driver}",
            f"sudo apt-get install nvidia-driver-{oldest} (then reboot)",
        )
    return None


def torch_rows(machine: Machine, outcome: Outcome) -> Iterator[Row]:
    """Rows of what `torch_devices` found."""
    facts = outcome.facts
    if outcome.fault:
        yield fail(reason(outcome), install_command(machine))
        return
    build = f"{facts['version']}, built for {'CUDA ' + facts['cuda'] if facts['cuda'] else 'CPU'}"
    if not facts["available"]:
        fix = "nvidia-smi -q | head; in a container start it with --gpus all; after a driver update reboot"
        yield fail(f"{build}: no CUDA device is usable: {facts.get('reason', 'torch gave no reason')}", fix)
        return
    if len(facts["devices"]) != len(machine.gpus):
        found = f"{build}: torch sees {len(facts['devices'])} GPUs, nvidia-smi {len(machine.gpus)}"
        yield warn(found, "echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L")
    broken = 0
    for index, device in enumerate(facts["devices"]):
        for kind, error in device["errors"].items():
            if isinstance(error, str) or error > (WRONG_FP8 if kind == "fp8" else WRONG_BF16):
                broken += 1
                told = error if isinstance(error, str) else f"is off by {error:.1%}"
                fix = f"unset {PART_OF_CARD}" if os.environ.get(PART_OF_CARD) else install_command(machine)
                yield fail(f"GPU {index} ({device['name']}): a {kind} product: {told}", fix)
    if not broken:
        driver = machine.gpus[0].driver
        yield ok(f"{build}, driver {driver}; {len(facts['devices'])} GPUs compute correct products")


def bitsandbytes(machine: Machine) -> Iterator[Row]:
    """Check NF4 on this device numerically."""
    outcome = run_step(machine, ROUND_TRIP_LIMIT_S, "bitsandbytes", "bitsandbytes_round_trip")
    yield bitsandbytes_row(machine, outcome)


def bitsandbytes_row(machine: Machine, outcome: Outcome) -> Row:
    facts = outcome.facts
    if outcome.fault:
        return fail(reason(outcome), _fix(machine, outcome, "python -m bitsandbytes"))
    return ok(
        f"NF4 on {facts['device']}: round trip {facts['error']:.1%} off, layer {facts['layer_error']:.2%} off, "
        f"adapter gradient cosine {facts['cosine']:.3f}",
    )


def vllm(machine: Machine) -> Iterator[Row]:
    """One token from vLLM with a small model, its weights quantized as on the rollout server."""
    config = machine.config
    weights: str | None = config.server.weights if machine.needs_server else "fp8_per_channel"
    served = generation(machine.gpus[0].capability).served if machine.gpus else {}
    if weights == "bf16" or (machine.gpus and weights not in served):
        weights = None
    if not machine.gpus and packed_format(weights) and not multiplies_int4():  # reported with the run's servers
        weights = None
    outcome = _vllm_outcome(machine, weights)
    # A hang would recur with unquantized weights.
    again = outcome.fault and weights and not outcome.fault.startswith("hangs")
    plain = _vllm_outcome(machine, None) if again else None
    yield from vllm_rows(machine, weights, outcome, plain)


def _vllm_outcome(machine: Machine, weights: str | None) -> Outcome:
    variables = {"VLLM_NO_USAGE_STATS": machine.environment.get("VLLM_NO_USAGE_STATS", "1"), "HF_HUB_OFFLINE": "1"}
    return run_step(machine, VLLM_LIMIT_S, "vllm", "vllm_token", weights, **variables)


def vllm_rows(machine: Machine, weights: str | None, outcome: Outcome, plain: Outcome | None) -> Iterator[Row]:
    """Rows of `vllm_token`; `plain` is the retry with unquantized weights after a failure."""
    facts = outcome.facts
    if outcome.fault:
        if plain and not plain.fault:
            yield fail(f"{weights}: {reason(outcome)}; bf16 works", "--server.weights bf16")
        else:
            yield fail(f"{weights or 'bf16'}: {reason(outcome)}", _vllm_fix(machine, outcome))
        return
    yield ok(
        f"{facts['version']} as {weights or 'bf16'}: ready in {facts['start_s']:.0f} s, one token, log-probs "
        f"{facts['delta']:.3f} nats from transformers'",
    )
    for variable, near in facts["unknown"].items():
        meant = f"; did you mean {near[0]}?" if near else ""
        yield warn(f"vLLM {facts['version']} reads no variable {variable}{meant}", f"unset {variable}")


def _vllm_fix(machine: Machine, outcome: Outcome) -> str:
    text = f"{outcome.fault} {outcome.log}".lower()
    if "compiler" in text or "python.h" in text:
        return "sudo apt-get install g++ python3-dev"
    if "out of memory" in text or "free memory" in text or "sigkill" in text:
        return "free memory (nvidia-smi shows who holds it), then python -m launch.doctor --only vllm"
    again = "python -m launch.doctor --only vllm --logs doctor-logs, and read doctor-logs/vllm.log"
    return _fix(machine, outcome, again)


def _fix(machine: Machine, outcome: Outcome, otherwise: str) -> str:
    broken = re.search(r"ImportError|ModuleNotFoundError|undefined symbol", outcome.fault)
    return install_command(machine) if broken else otherwise


def nccl(machine: Machine) -> Iterator[Row]:
    """NCCL all-reduce over all GPUs, verified, with bus bandwidth; gloo over two processes when there is no GPU."""
    if not machine.gpus:
        outcomes = _all_reduce(machine, 2, "gloo", 4, {})
        yield collective_row(machine, "gloo", outcomes, {})
        return
    if len(machine.gpus) == 1:
        yield skip("one GPU: nothing to exchange")
        return
    if any(one.is_split for one in machine.gpus):
        yield skip("the GPUs are split (MIG), and slices cannot use NCCL")
        return
    outcomes = _all_reduce(machine, len(machine.gpus), "nccl", 256, {})
    cures: dict[str, bool] = {}
    is_nccl = any(re.search(r"nccl|hangs|its process|time(d )?out", one.fault, re.I) for one in outcomes)
    for variable, (value, _) in NCCL_CURES.items() if is_nccl else ():
        again = _all_reduce(machine, len(machine.gpus), "nccl", 16, {variable: value})
        cures[variable] = not any(one.fault for one in again)
        if cures[variable]:
            break
    yield collective_row(machine, "nccl", outcomes, cures)


def _all_reduce(machine: Machine, world: int, backend: str, mib: int, more: dict[str, str]) -> list[Outcome]:
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder, ThreadPoolExecutor(world) as pool:

        def rank_of(rank: int) -> Outcome:
            step = ("all_reduce", rank, world, f"{folder}/store", backend, mib)
            return run_step(machine, COLLECTIVE_LIMIT_S, "nccl", *step, **more)

        return list(pool.map(rank_of, range(world)))


def collective_row(machine: Machine, backend: str, outcomes: list[Outcome], cures: dict[str, bool]) -> Row:
    """The row of an all-reduce; `cures` maps the NCCL_CURES that were tried to whether each helped."""
    world = len(outcomes)
    what = f"{world} {'GPUs' if backend == 'nccl' else 'processes on the CPU'} by {backend}"
    broken = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.fault}
    if not broken:
        facts = outcomes[0].facts
        return ok(f"{what}: sum of {facts['mib']} MiB correct, bus bandwidth {facts['gb_per_s']:g} GB/s")
    # The other ranks then wait for the first to fail until they time out.
    rank, first = min(broken.items(), key=lambda item: item[1].seconds)
    found = f"{what}: rank {rank}: {reason(first)}"
    if backend == "gloo":
        again = "export GLOO_SOCKET_IFNAME=lo, and python -m launch.doctor --only nccl"
        return fail(found, _fix(machine, first, again))
    if helps := next((variable for variable, helped in cures.items() if helped), None):
        value, why = NCCL_CURES[helps]
        return fail(f"{found}; with {helps}={value} it works: {why}", f"export {helps}={value}")
    tried = f" ({', '.join(cures)} did not help)" if cures else ""
    return fail(
        f"{found}{tried}",
        "NCCL_DEBUG=INFO python -m launch.doctor --only nccl --logs doctor-logs, and read doctor-logs/nccl.log",
    )
