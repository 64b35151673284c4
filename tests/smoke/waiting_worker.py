"""One of two processes whose default group gives up after six seconds, while the main process works longer."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))

from torch import distributed

from kit.core.config.load import load_config
from kit.core.errors import CheckFailed
from kit.core.run_directory import RunDir
from kit.rollout.client import ServerRollout


def long_work() -> str:
    time.sleep(8)
    return "done"


def failing_work() -> str:
    raise CheckFailed("the replica is gone")


def main() -> None:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=6))
    config = load_config("recipes/configs/grpo-tiny-nf4-cpu.yaml", ["--rollout.request_timeout_s=7"])
    rollout = ServerRollout(config, None, RunDir(Path(sys.argv[1])))
    processes = SimpleNamespace(is_main_process=distributed.get_rank() == 0)
    found = [rollout._in_main_process(processes, long_work)]
    group = rollout._waiting
    try:
        rollout._in_main_process(processes, failing_work)
    except CheckFailed as error:
        found.append(str(error))
    is_same = rollout._waiting is group
    said = " ".join(map(str, ("FOUND", distributed.get_rank(), distributed.get_backend(group), is_same, *found)))
    os.write(1, f"{said}\n".encode())  # at once: the processes share their output
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
