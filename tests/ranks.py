"""Trainer processes without a launcher: runs of recipes, each by some gloo processes forked from one that has imported
everything, which costs more than a tiny run.

The only argument is PLAN, a file with JSON: a list of {"processes", "arguments"} of recipes/grpo_qlora.py, and of
further keys of a run:

- "copy": [from, to], "remove": [paths]: before it starts
- "environment": {name: value}
- "kill": {"rank", "file", "text", "delay_s", "signal"}: once `text` is in `file`, which is removed before, and
  `delay_s` later, one process gets a signal, SIGKILL by default; with rank None, processes may fail by themselves

Written beside PLAN when a run has ended: `<number>.json` with the wait statuses by rank, the seconds from the signal
to the end of each rank, and `<number>-<rank>.txt` with what each wrote.
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

from tests.processes import free_port

LONGEST_S = 300


def start(run: dict, rank: int, port: int, output: Path) -> int:
    """The pid of a process that is one rank of a run."""
    if pid := os.fork():
        return pid
    os.setpgid(0, 0)
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run["processes"], "LOCAL_WORLD_SIZE": run["processes"]}
    os.environ |= {name: str(value) for name, value in world.items()} | run.get("environment", {})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = 1
    try:
        from kit.core.errors import run_command
        from recipes.grpo_qlora import main

        sys.argv = ["recipes/grpo_qlora.py", *run["arguments"]]
        run_command(main)
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def send(kill: dict, pids: list[int]) -> float:
    """Wait for the moment and send the signal; return when that was."""
    if kill["rank"] is None:
        return time.monotonic()
    file, text = Path(kill["file"]), kill["text"]
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until and not (file.exists() and text in file.read_text()):
        time.sleep(0.005)
    time.sleep(kill.get("delay_s", 0.0))
    os.kill(pids[kill["rank"]], kill.get("signal", signal.SIGKILL))
    return time.monotonic()


def run_all(plan: Path) -> None:
    for number, run in enumerate(json.loads(plan.read_text())):
        if "copy" in run:
            shutil.copytree(*run["copy"])
        for path in run.get("remove", ()):
            shutil.rmtree(path)
        port = free_port()
        if run.get("kill", {}).get("file"):
            Path(run["kill"]["file"]).unlink(missing_ok=True)
        outputs = [plan.with_name(f"{number}-{rank}.txt") for rank in range(run["processes"])]
        pids = [start(run, rank, port, output) for rank, output in enumerate(outputs)]
        began = send(run["kill"], pids) if "kill" in run else time.monotonic()
        ended: dict[int, tuple[int, float]] = {}
        halted = 1 if run.get("kill", {}).get("signal") == signal.SIGSTOP else 0
        while len(ended) < len(pids) - halted and time.monotonic() < began + LONGEST_S:
            for rank, pid in enumerate(pids):
                if rank not in ended and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    ended[rank] = os.waitstatus_to_exitcode(found[1]), time.monotonic() - began
            time.sleep(0.01)
        for rank, pid in enumerate(pids):
            if rank not in ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        result = {rank: {"code": code, "seconds": seconds} for rank, (code, seconds) in sorted(ended.items())}
        plan.with_name(f"{number}.json").write_text(json.dumps(result))
        if "kill" not in run and any(one["code"] for one in result.values()):
            sys.exit(f"run {number}: {result}\n{outputs[0].read_text()[-3000:]}")


if __name__ == "__main__":
    os.environ |= {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    import kit.train.trainer  # noqa: F401
    import recipes.grpo_qlora  # noqa: F401

    run_all(Path(sys.argv[1]))
