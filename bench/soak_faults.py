"""The faults of bench/soak.py: what each does to a running run, and when it is over."""

import contextlib
import json
import os
import random
import signal
import struct
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.soak_network import lines_of
from bench.soak_reward import HANG
from kit.core.run_directory import RunDir
from kit.core.run_state import trainer_pid
from tests.disk import Disk

# Requests of /v1/rollout that a step makes, for faults of the network.
ACTIONS = ("generate", "stage", "activate", "score")
KILLED = ("replica", "trainer", "accelerate", "leash")
STOPPED = ("replica", "trainer")
NETWORK = ("error", "short", "few", "version", "slow", "cut", "lost")
KINDS = (
    *(f"kill {role}" for role in KILLED),
    *(f"stop {role}" for role in STOPPED),
    *(f"network {kind}" for kind in NETWORK),
    "clock +1 h",
    "clock -1 h",
    "disk full",
    "reward hangs",
)
HOUR_S = 3600.0


@dataclass
class Fault:
    """One fault, due once the run has taken `step` steps; the rest is what came of it."""

    number: int
    kind: str
    step: int
    action: str = "generate"  # of a network fault: which requests have it, and how many
    times: int = 1
    began: float = 0.0  # time.monotonic()
    met: dict[str, int | None] = field(default_factory=dict)  # pids of the trainer and the replica by then
    effect: int | None = None  # the newest step when its effect was seen
    seconds: float = 0.0  # until the next new step
    new: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STOPPED, 0))  # processes until then
    ups: int = 0  # starts of launch.up until then
    causes: list[str] = field(default_factory=list)  # what launch.up said when it ended


def planned(steps: int, every: int, seed: int, kinds: tuple[str, ...] = KINDS) -> list[Fault]:
    """A fault in each `every` steps at a step of its own, the kinds in an order of `seed`, each as often as any other
    but for one."""
    draw, faults, deck = random.Random(seed), [], []
    for number in range(steps // every):
        deck = deck or draw.sample(kinds, len(kinds))
        kind = deck.pop()
        name = kind.removeprefix("network ")
        # Whatever follows the fault should end before the next one: not in the last third.
        fault = Fault(number, kind, number * every + draw.randint(2, max(2, every * 2 // 3)))
        if name in ("few", "version"):
            fault.times = 1
        elif name in NETWORK:
            fault.action, fault.times = draw.choice(ACTIONS), draw.choice((1, 3))
        faults.append(fault)
    return faults


@dataclass
class Target:
    """The run that has the faults, and what it was started with."""

    run: RunDir
    folder: Path  # SOAK_FOLDER
    disk: Disk

    def pid(self, role: str) -> int | None:
        """Process of a role, None while there is none."""
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            if role == "replica":
                return int((self.folder / "server.pid").read_text())
            above = {"trainer": 0, "accelerate": 1, "leash": 2}[role]
            pid = trainer_pid(self.run)
            return pid and [pid, *(one.pid for one in psutil.Process(pid).parents())][above]
        return None

    def start(self, fault: Fault) -> bool:
        """Do it; False while there is no process to do it to."""
        what, _, which = fault.kind.partition(" ")
        fault.met = {role: self.pid(role) for role in STOPPED}
        if fault.met["trainer"] is None:
            return False
        if what in ("kill", "stop"):
            if (pid := self.pid(which)) is None or not psutil.pid_exists(pid):
                return False
            os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        elif what == "network":
            order = {"id": fault.number, "kind": which, "action": fault.action, "times": fault.times}
            replaced(self.folder / "network.json", json.dumps(order).encode())
        elif what == "clock":
            self.set_clock(self.clock() + (HOUR_S if "+" in which else -HOUR_S))
        elif what == "disk":
            self.disk.leave(4 << 10, 4 << 10, fault.met["trainer"])
        else:
            (self.folder / HANG).touch()
        return True

    def had_effect(self, fault: Fault) -> bool:
        """Whether requests had the fault, the clock has stepped, or the processes that it ends are others."""
        what = fault.kind.partition(" ")[0]
        if what == "network":
            return any(line.startswith(f"{fault.number} ") for line in lines_of(self.folder / "network.log"))
        now = {role: self.pid(role) for role in fault.met}
        return what == "clock" or any(now[role] not in (None, fault.met[role]) for role in now)

    def stop(self, fault: Fault) -> None:
        """End what would go on by itself."""
        if fault.kind == "disk full":
            self.disk.release(fault.met["trainer"] or 0)

    def clock(self) -> float:
        """Seconds by which the run's clock is off."""
        return struct.unpack("<d", (self.folder / "clock").read_bytes())[0]

    def set_clock(self, offset: float) -> None:
        with open(self.folder / "clock", "r+b" if (self.folder / "clock").exists() else "wb") as file:
            file.write(struct.pack("<d", offset))  # in place: the run's processes have mapped the file


def replaced(file: Path, data: bytes) -> None:
    """Write a file that another process may read at any time."""
    partial = file.with_suffix(".partial")
    partial.write_bytes(data)
    os.replace(partial, file)
