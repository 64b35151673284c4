"""Check the machine before a run: report what is wrong, with the numbers, and how to fix it.

    python -m launch.doctor
    python -m launch.doctor --config RUN.yaml --launcher accelerate_configs/ddp.yaml
    python -m launch.doctor --only vllm nccl
    python -m launch.doctor --json
    python -m launch.doctor --measured

--config adds the checks of that run: its keys, ports, GPUs, disk, model and data. Anything that may crash or hang
(imports, kernels, vLLM, NCCL) runs in child processes with a time limit. Exit code 0 when no check failed (warnings do
not count), 1 when one did, 2 for bad input.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036  the imports below fail on older versions
    sys.exit("error: Python 3.11 or newer is needed. Use the environment of make install: .venv/bin/python")

from kit.core.errors import CHECK_FAILED, DONE, BadInput, Interrupted, command_parser, run_command
from kit.core.measured import tables
from launch.checks import gpu, host, packages, run
from launch.checks.children import stopped
from launch.checks.machine import Machine, Row, cores

Check = Callable[[Machine], Iterator[Row]]
# In report order. The second entry marks checks that take seconds (child processes, network) and run concurrently.
CHECKS: dict[str, tuple[Check, bool, str]] = {
    "python": (host.python, False, "version of the interpreter"),
    "platform": (host.platform, False, "system, cores, vector instructions"),
    "memory": (host.memory, False, "free memory of the host or container"),
    "limits": (host.limits, False, "ulimits: open files, locked memory, core dumps"),
    "shm": (host.shm, False, "free space of /dev/shm, for the number of processes of the run"),
    "disk": (
        lambda machine: host.disk(machine, run.disk_needs(machine)),
        False,
        "space, inodes, writing and locking for run directory, base, hub cache, temporary files",
    ),
    "environment": (host.environment, False, "variables that slow a run down or redirect it"),
    "compiler": (host.compiler, False, "g++, Python.h, ninja, a lock that a killed compile left"),
    "packages": (packages.packages, False, "installed versions against requirements*.txt"),
    "measured": (packages.measured, False, "whether figures of the kit were measured with these versions"),
    "conflicts": (packages.conflicts, False, "requirements between packages; packages that break others"),
    "gpu": (gpu.gpu, False, "BF16, FP8, NVFP4 by capability; MIG; other processes"),
    "config": (run.settings, False, "keys that contradict each other; what the run directory holds"),
    "servers": (run.servers, False, "keys, GPUs, API key and base of the rollout servers"),
    "gpus": (run.gpus_needed, False, "GPUs of trainer and servers against those of the machine"),
    "ports": (run.ports, False, "free, or served by this run's replicas already"),
    "hub": (run.hub, True, "model and data: local, cached, or served by the hub"),
    "model": (
        run.model,
        True,
        "checks of the recipe on the run's model and this machine, from the model's config alone",
    ),
    "sharing": (run.sharing, True, "server.share_base: memory of one process mapped by another"),
    "rewards": (run.rewards, True, "the run's rewards, tried on references of its data"),
    "torch": (gpu.torch, True, "build against driver; a matmul on every device, in BF16 and FP8"),
    "imports": (packages.imports, True, "every pinned package, in a child process"),
    "bitsandbytes": (gpu.bitsandbytes, True, "NF4 round trip, layer, adapter gradient"),
    "vllm": (gpu.vllm, True, "one token from a small model in the server's weights, log-probs compared"),
    "nccl": (gpu.nccl, True, "a sum over all GPUs and its bandwidth; gloo without GPUs"),
}
# Start order of those checks: the longest first.
LONGEST = ("vllm", "imports", "model", "rewards", "bitsandbytes", "nccl", "sharing", "torch", "hub")
MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL", "skip": "skip"}


def main() -> int:
    flags, machine = read_arguments(sys.argv[1:])
    if flags.list:
        for name, (_, _, about) in CHECKS.items():
            print(f"{name:<13} {about}")
        return DONE
    if flags.measured:
        print(tables(), end="")
        return DONE
    started = time.monotonic()
    rows = []
    try:
        for row in run_checks(machine, flags.only or [*CHECKS], flags.quick):
            rows.append(row)
            if not flags.json:
                show(row)
    except KeyboardInterrupt:
        raise Interrupted("interrupted: nothing is left running") from None
    seconds = time.monotonic() - started
    failed = [row for row in rows if row.status == "fail"]
    if flags.json:
        facts = [{key: getattr(row, key) for key in ("name", "status", "found", "fix")} for row in rows]
        print(json.dumps({"ok": not failed, "seconds": round(seconds, 1), "checks": facts}, indent=2))
    else:
        count = {status: sum(row.status == status for row in rows) for status in MARKS}
        print(
            f"{count['ok']} ok, {count['warn']} warnings, {count['fail']} failed, {count['skip']} skipped "
            f"in {seconds:.1f} s"
        )
    return CHECK_FAILED if failed else DONE


def read_arguments(words: list[str]) -> tuple[argparse.Namespace, Machine]:
    """The flags, and the machine with the run's configuration; `BadInput` if that cannot be read."""
    parser = command_parser("launch.doctor", __doc__)
    parser.add_argument("--config", help="YAML of a run; its keys can be given as --group.key value")
    parser.add_argument(
        "--launcher", help="accelerate config of that run (accelerate_configs); default as in launch.up"
    )
    parser.add_argument("--only", nargs="+", choices=[*CHECKS], metavar="CHECK", help="run only these checks")
    parser.add_argument("--quick", action="store_true", help="skip the check that starts vLLM")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--logs", help="directory for the logs of the child processes")
    parser.add_argument("--list", action="store_true", help="list the checks and exit")
    parser.add_argument(
        "--measured", action="store_true", help="print which figures were measured with which versions, and exit"
    )
    flags, overrides = parser.parse_known_args(words)
    if overrides and not flags.config:
        raise BadInput(f"unknown argument {overrides[0]}. Keys of a run (--group.key value) need --config.")
    config = accelerate = None
    try:
        if flags.config:
            from kit.core.config.load import load_config

            config = load_config(flags.config, overrides, tuple(vars(flags)))
        if flags.launcher:
            from launch.starting.trainer_command import read_accelerate

            accelerate = read_accelerate(flags.launcher)
    except ImportError as error:
        which = "--launcher" if config or not flags.config else "--config"
        raise BadInput(f"{which} cannot be read: {error}. Install the requirements: make install.") from None
    if flags.logs:
        Path(flags.logs).mkdir(parents=True, exist_ok=True)
    return flags, Machine(
        config=config,
        config_words=shlex.join(["--config", flags.config, *overrides]) if flags.config else "",
        launcher=flags.launcher,
        accelerate=accelerate,
        environment=dict(os.environ),
        logs=Path(flags.logs).resolve() if flags.logs else None,
    )


def run_checks(machine: Machine, names: list[str], quick: bool = False) -> Iterator[Row]:
    """Yield rows in the order of CHECKS; the fast checks one by one, those with child processes concurrently."""
    wanted = [name for name in CHECKS if name in names and not (quick and name == "vllm")]

    def is_beside(name: str) -> bool:
        # Bandwidth between GPUs is measured while nothing else runs on them.
        return CHECKS[name][1] and not (name == "nccl" and len(machine.gpus) > 1)

    # Two checks keep two cores busy. More at once pay off on a GPU host, where each waits for its device.
    pool = ThreadPoolExecutor(max(2, min(6, int(cores()) // 2)))
    try:
        slow = {name: pool.submit(run_check, machine, name) for name in LONGEST if name in wanted and is_beside(name)}
        for name in CHECKS:
            if name in slow:
                yield from slow[name].result()
            elif name in wanted:
                yield from run_check(machine, name)
            elif quick and name == "vllm" and name in names:
                yield Row("skip", "--quick", name=name)
    finally:
        with stopped():
            pool.shutdown(wait=True, cancel_futures=True)


def run_check(machine: Machine, name: str) -> list[Row]:
    """Rows of a check. An exception in the check becomes a failed row, never a traceback."""
    try:
        return [replace(row, name=name) for row in CHECKS[name][0](machine)]
    except Exception as error:
        where = error.__traceback__
        while where and where.tb_next:
            where = where.tb_next
        place = f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}" if where else "unknown place"
        said = (str(error).splitlines() or [""])[0]
        fix = f"python -m launch.doctor --only {name} --logs doctor-logs, and report its output"
        return [Row("fail", f"the check itself failed at {place}: {type(error).__name__}: {said}", fix, name)]


def show(row: Row) -> None:
    print(f"{MARKS[row.status]} {row.name:<13} {row.found}", flush=True)
    if row.fix:
        print(f"{'':<19}fix: {row.fix}", flush=True)


if __name__ == "__main__":
    run_command(main)
