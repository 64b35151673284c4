"""A run with a fault every 50 steps beside the same run without: is anything lost, repeated or left behind?

    python bench/soak.py                        # 2,000 steps and 40 faults
    python bench/soak.py --steps 100 --every 20 --out DIR
    python bench/soak.py --server vllm --steps 200

Both runs are `python -m launch.up` with a small model and one rollout server. The server samples with random numbers
of the prompt and the adapter's version (bench/soak_replica.py), so both runs must end with the same ledger, the same
reward in every step and the same adapter, bit for bit. With `--server vllm` the server is vLLM, whose samples depend
on how its requests meet: then the ledger must be equal, and the mean reward of the last steps within the noise.

The faults, in an order of `--seed`, are those of bench/soak_faults.py: processes killed and stopped, a network that
fails, answers that are not what was asked for, a clock that steps, a full disk, a reward that hangs. `launch.up` has
`--restarts`; what ends it nevertheless is continued with `--resume`, as whoever looks after the run would. Prints two
tables last and exits with 1 if the runs differ, a process is left, or a figure grows. Wants /dev/shm for itself:

    unshare --mount sh -c 'mount -t tmpfs tmpfs /dev/shm && python bench/soak.py'
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.soak_faults import STOPPED, Fault, Target, planned
from kit.core.errors import DONE, BadInput, CheckFailed, run_command
from kit.core.run_directory import RunDir, read_manifest
from kit.core.run_files import read_json
from tests.disk import small_disk
from tests.processes import free_port

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "recipes" / "configs" / "grpo-tiny-nf4-cpu.yaml"
MODEL = "--hidden 64 --layers 2 --limit 4 --problems 400 --heldout 40 --steps 200 --processes 1"
# Keys of a run with vLLM: the numbers that the kit's servers usually hold, and a start that may take a minute.
VLLM = {
    "model.dtype": "bfloat16",
    "server.weights": "fp8_per_channel",
    "server.vllm": "{block_size: 32}",
    "server.max_num_seqs": 16,
    "rollout.server_wait_s": 600,
    "rollout.request_timeout_s": 25,
}
LOOK_S = 0.2
SAMPLE_S = 1.0
DISK_FULL_S = 90.0  # a full disk is emptied after this, or once the trainer has ended
DISK_BYTES = 512 << 20
LONGEST_S = 400.0  # without a new step: the fault was not survived
RESTARTS = 4  # that launch.up may make for each fault
TRIES = 3  # starts in a row that made no new step
COMPARED = ("reward", "loss", "kl", "grad_norm", "sampler_k3")  # of each step
LAST = 100  # steps of the mean reward at either end
WINDOWS = 8  # fewer show no trend


@dataclass(frozen=True)
class Figure:
    """One measured figure: how it is read from the samples of a window, and how much it may grow over the run."""

    name: str
    unit: str
    value: Callable[[list[dict]], float | None]
    share: float = 0.0  # of its mean
    most: float = 0.0  # or this much


def median_of(key: str) -> Callable[[list[dict]], float | None]:
    def value(samples: list[dict]) -> float | None:
        found = [one[key] for one in samples if one.get(key) is not None]
        return statistics.median(found) if found else None

    return value


def per_step(key: str) -> Callable[[list[dict]], float | None]:
    """Median of what a step added to `key`, between samples that were the first with a new step of one trainer."""

    def value(samples: list[dict]) -> float | None:
        pairs = itertools.pairwise(samples)
        new = [
            two for one, two in pairs if two["step"] > one["step"] and two["trainer"] == one["trainer"] and two[key]
        ]
        found = [
            (two[key] - one[key]) / (two["step"] - one["step"])
            for one, two in itertools.pairwise(new)
            if one["trainer"] == two["trainer"]
        ]
        return statistics.median(found) if found else None

    return value


FIGURES = (
    Figure("trainer, resident", "MiB", median_of("trainer_mib"), share=0.05),
    Figure("replica, resident", "MiB", median_of("replica_mib"), share=0.05),
    Figure("launch.up, resident", "MiB", median_of("up_mib"), share=0.05),
    Figure("trainer, file handles", "", median_of("trainer_fds"), most=1),
    Figure("replica, file handles", "", median_of("replica_fds"), most=2),
    Figure("trainer, threads", "", median_of("trainer_threads"), most=1),
    Figure("replica, threads", "", median_of("replica_threads"), most=2),
    Figure("/dev/shm, files", "", median_of("shm_files"), most=0.5),
    Figure("/dev/shm", "KiB", median_of("shm_kib"), most=64),
    Figure("checkpoints", "", median_of("checkpoints"), most=0.5),
    Figure("newest checkpoint", "KiB", median_of("checkpoint_kib"), share=0.05),
    Figure("adapters waiting for a sync", "", median_of("synced"), most=0.5),
    Figure("trainer, processor time a step", "ms", per_step("trainer_ms"), share=0.10),
    Figure("step, wall clock", "ms", median_of("step_ms"), share=0.25),
)


class Soak:
    """One model and port for all runs of a soak; everything is below `folder`."""

    def __init__(self, folder: Path, server: str = "numpy", steps: int = 2000, stall_s: float = 30.0):
        self.folder, self.server, self.steps, self.stall_s = folder, server, steps, stall_s
        self.port, self.model = free_port(), folder / "model"

    def make_model(self) -> None:
        """A small model that answers a third of its problems right, the same on every CPU."""
        words = [sys.executable, "-m", "tests.float64_base", "--out", str(self.model), *MODEL.split()]
        subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    def arguments(self, run: RunDir) -> list[str]:
        keys: dict[str, Any] = {
            "run.output_dir": run.path,
            "model.path": self.model,
            "data.path": self.model,
            "rollout.backend": "server",
            "rollout.server_urls": f"['http://127.0.0.1:{self.port}']",
            "rollout.server_wait_s": 180,
            "rollout.request_timeout_s": 15,
            "rollout.group_size": 8,
            "rollout.max_completion_length": 24,
            "server.base": self.folder / "base",
            "server.weights": "bf16",  # stands for weights without quantization: float32, as model.dtype
            "reward.functions": "[bench.soak_reward:boxed]",
            "reward.options": "{}",
            "reward.request_timeout_s": 5,
            "policy.lora_rank": 4,
            "policy.lora_alpha": 8,
            "train.per_device_train_batch_size": 16,
            "train.max_steps": self.steps,
            "train.save_steps": 10,
            "train.learning_rate": "1e-4",
            "launch.stall_s": self.stall_s,
            "watch.completions_every": 50,
        }
        keys |= VLLM if self.server == "vllm" else {}
        return ["--config", str(CONFIG), *(f"--{key}={value}" for key, value in keys.items())]

    def environment(self, target: Target) -> dict[str, str]:
        paths = [str(ROOT / "bench" / "soak_start"), os.environ.get("PYTHONPATH")]
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "SOAK_FOLDER": str(target.folder),
            "SOAK_CLOCK": str(target.folder / "clock"),
            "SOAK_SERVER": self.server,
        }

    def run(self, name: str, faults: list[Fault]) -> "Ran":
        """Train to the end with these faults; `CheckFailed` if the run cannot be brought there."""
        folder = self.folder / name
        if folder.exists():
            raise BadInput(f"{folder} exists: remove it, or name another directory by --out.")
        folder.mkdir()
        with small_disk(folder / "disk", DISK_BYTES) as disk:
            target = Target(RunDir(disk.folder / "run"), folder, disk)
            target.set_clock(0.0)
            ran = Following(self, target, faults).to_the_end()
            shutil.copytree(target.run.path, folder / "run")  # beyond the disk
        return ran


@dataclass
class Ran:
    """A run that ended: its files, samples of its processes, and what its faults did."""

    run: RunDir
    seconds: float
    faults: list[Fault]
    samples: list[dict]
    ups: int
    left: list[str]  # processes that outlived it

    def save(self, folder: Path, name: str) -> None:
        facts = asdict(self) | {"run": str(self.run.path)}
        (folder / f"{name}.json").write_text(json.dumps(facts))

    @classmethod
    def load(cls, folder: Path, name: str) -> "Ran":
        facts = read_json(folder / f"{name}.json")
        faults = [Fault(**one) for one in facts.pop("faults")]
        return cls(**facts | {"run": RunDir(folder / name / "run"), "faults": faults})

    @property
    def rows(self) -> list[dict]:
        return read_lines(self.run.metrics_file)

    @property
    def ledger(self) -> list[dict]:
        return read_lines(self.run.ledger_file)

    @property
    def adapter(self) -> str:
        return read_manifest(self.run.newest_adapter(), "adapter", deep=True)["tensor_hash"]


class Following:
    """Start `launch.up`, again when it ends early, cause the faults when they are due, and sample the processes."""

    def __init__(self, soak: Soak, target: Target, faults: list[Fault]):
        self.soak, self.target, self.waiting, self.had = soak, target, [*faults], faults
        self.active: Fault | None = None
        self.samples: list[dict] = []
        self.step, self.new_step_at = 0, time.monotonic()
        self.pids: dict[str, int | None] = dict.fromkeys(STOPPED)  # the newest ones
        self.up: subprocess.Popen | None = None
        self.ups, self._sampled = 0, 0.0
        self._rows = Tail(target.run.metrics_file)

    def to_the_end(self) -> Ran:
        started, fruitless = time.monotonic(), 0
        try:
            while True:
                before = self.step
                code, said = self.once()
                if code == DONE:
                    break
                cause = next((line for line in said.splitlines() if line.startswith("error: ")), said[-300:])
                print(f"  launch.up ended with {code} after step {self.step}: {cause[:300]}", flush=True)
                if self.active:
                    self.active.causes.append(cause)
                    self.active.ups += 1
                fruitless = fruitless + 1 if self.step == before else 0
                if fruitless == TRIES:
                    raise CheckFailed(f"{TRIES} starts of launch.up in a row made no step. The last one said:\n{said}")
        finally:
            if self.up is not None and self.up.poll() is None:
                kill_below(self.up.pid)
        seconds = time.monotonic() - started
        return Ran(
            RunDir(self.target.folder / "run"),
            seconds,
            self.had,
            self.samples,
            self.ups,
            left_over(self.target.folder),
        )

    def once(self) -> tuple[int, str]:
        """One start of `launch.up`: its exit code and output."""
        is_saved = any(self.target.run.checkpoints.glob("step-*"))
        log = self.target.folder / f"up-{self.ups}.log"
        words = [sys.executable, "-m", "launch.up", *self.soak.arguments(self.target.run)]
        words += ["--restarts", str(RESTARTS * len(self.had))]
        words += ["--launcher", "cpu"] if self.soak.server == "numpy" else []  # also on a machine with GPUs
        flag = ["--resume"] if is_saved else ["--overwrite"] if self.ups else []
        with open(log, "w") as file:
            self.up = subprocess.Popen(
                [*words, *flag],
                cwd=ROOT,
                env=self.soak.environment(self.target),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.ups += 1
        while self.up.poll() is None:
            self.look()
            time.sleep(LOOK_S)
        self.look()
        return self.up.returncode, log.read_text()

    def look(self) -> None:
        """Note new steps, sample, end a fault or begin the next one."""
        now = time.monotonic()
        for row in self._rows.new():
            if row["step"] > self.step:
                self.step, self.new_step_at = row["step"], now
                self.step_ms = 1000 * row["seconds"]["step"]
        for role in STOPPED:
            pid = self.target.pid(role)
            if pid is not None and pid != self.pids[role]:
                self.pids[role], self._rows.at = pid, 0
                if self.active:
                    self.active.new[role] += 1
        if now - self._sampled > SAMPLE_S:
            self._sampled = now
            self.samples.append(self.sample())
        if self.active:
            self.follow(self.active, now)
        elif self.waiting and self.step >= self.waiting[0].step and self.target.start(self.waiting[0]):
            fault = self.active = self.waiting.pop(0)
            fault.began = now
            of = f", {fault.times} x {fault.action}" if fault.kind.startswith("network") else ""
            print(f"step {self.step}: {fault.kind}{of}", flush=True)
        if now - self.new_step_at > LONGEST_S:
            self.up.send_signal(signal.SIGKILL)
            raise CheckFailed(f"no new step for {LONGEST_S:g} s after step {self.step}: {self.active}")

    def follow(self, fault: Fault, now: float) -> None:
        """End a fault that is over: it had its effect, and steps were made since."""
        if not psutil.pid_exists(fault.met["trainer"]) or now - fault.began > DISK_FULL_S:
            self.target.stop(fault)
        if fault.effect is None and self.target.had_effect(fault):
            fault.effect = self.step
        # One step more than that: its own line may have been on its way.
        if fault.effect is not None and self.step > fault.effect + 1:
            self.target.stop(fault)
            fault.seconds = self.new_step_at - fault.began
            new = ", ".join(f"new {role}s {count}" for role, count in fault.new.items())
            print(f"  over after {fault.seconds:.0f} s: {new}, launch.up resumed {fault.ups}", flush=True)
            self.active = None

    def sample(self) -> dict:
        """Figures of this moment; None for a process that is not there."""
        run, shm = self.target.run, Path("/dev/shm")
        found: dict[str, Any] = {"at": time.monotonic(), "step": self.step, "trainer": self.pids["trainer"]}
        found["step_ms"] = getattr(self, "step_ms", None)
        for role, pid in (*self.pids.items(), ("up", self.up.pid)):
            found |= {f"{role}_{name}": value for name, value in figures_of(pid).items()}
        found["shm_files"] = sum(1 for _ in shm.iterdir())
        found["shm_kib"] = shutil.disk_usage(shm).used / 1024
        found["checkpoints"] = len(list(run.checkpoints.glob("step-*")))
        found["checkpoint_kib"] = size_kib(max(run.checkpoints.glob("step-*"), default=None))
        found["synced"] = len(list((run.path / "sync").glob("*/v*")))
        return found


class Tail:
    """Complete lines of a growing file that may be cut back and started again, each as its object."""

    def __init__(self, file: Path):
        self.file, self.at = file, 0

    def new(self) -> Iterator[dict]:
        try:
            with open(self.file, "rb") as file:
                if os.fstat(file.fileno()).st_size < self.at:
                    self.at = 0
                file.seek(self.at)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self.at += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):  # the rest of a line, after a cut that was not seen
                yield json.loads(line)


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def size_kib(folder: Path | None) -> float | None:
    """Size of a folder's files; None while it is being written or removed."""
    try:
        return sum(file.stat().st_size for file in folder.iterdir()) / 1024
    except (OSError, AttributeError):
        return None


def figures_of(pid: int | None) -> dict[str, float | None]:
    """Memory, handles, threads and processor time of a process."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return {
                "mib": process.memory_info().rss / 2**20,
                "fds": process.num_fds(),
                "threads": process.num_threads(),
                "ms": 1000 * (times.user + times.system),
            }
    except (psutil.Error, TypeError, ValueError):
        return dict.fromkeys(("mib", "fds", "threads", "ms"))


def kill_below(pid: int) -> None:
    """Kill a process and all that it started."""
    process = psutil.Process(pid)
    for one in [process, *process.children(recursive=True)]:
        one.kill()


def left_over(folder: Path) -> list[str]:
    """Processes of a run that has ended, by the environment that they inherited from it."""
    time.sleep(1.0)
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SOAK_FOLDER") == str(folder):
                found.append(f"{process.pid} {' '.join(process.cmdline())[-120:]}")
        except psutil.Error:
            continue
    return found


@dataclass(frozen=True)
class Trend:
    """A figure over a run, from the medians of its windows."""

    middle: float
    first: float
    last: float
    growth: float  # over the run, by least squares
    noise: float  # standard error of that
    allowed: float

    @property
    def is_flat(self) -> bool:
        return self.growth - 2 * self.noise <= self.allowed


def trend(figure: Figure, ran: Ran, every: int, steps: int) -> Trend | None:
    """None where nothing was measured. The first window, in which everything is loaded, is left out."""
    windows: dict[int, list[dict]] = {}
    for one in ran.samples:
        windows.setdefault(min(one["step"], steps - 1) // every, []).append(one)
    points = [
        ((number + 0.5) * every, value)
        for number, samples in sorted(windows.items())
        if number and (value := figure.value(samples)) is not None
    ]
    if len(points) < 3:
        return None
    x, y = zip(*points, strict=True)
    slope, intercept = statistics.linear_regression(x, y)
    rest = [b - slope * a - intercept for a, b in points]
    spread = sum((a - statistics.mean(x)) ** 2 for a in x)
    noise = (sum(one * one for one in rest) / max(1, len(rest) - 2) / spread) ** 0.5
    middle = statistics.median(y)
    return Trend(middle, y[0], y[-1], slope * steps, noise * steps, max(figure.share * middle, figure.most))


def reward_of(rows: list[dict]) -> tuple[float, float]:
    """Mean reward of the first and the last steps."""
    few = min(LAST, max(1, len(rows) // 4))
    rewards = [row["reward"] for row in rows]
    return statistics.mean(rewards[:few]), statistics.mean(rewards[-few:])


def differences(calm: Ran, faulty: Ran, steps: int, is_exact: bool) -> list[str]:
    """What the run with faults did otherwise, and what it lost, repeated or left behind."""
    found = []
    for name, ran in (("calm", calm), ("with faults", faulty)):
        for what, rows in (("metrics", ran.rows), ("ledger", ran.ledger)):
            if [row["step"] for row in rows] != list(range(1, steps + 1)):
                found.append(
                    f"the {what} of the run {name} have {len(rows)} lines and not steps 1 to {steps}, once each"
                )
        if ran.left:
            found.append(f"{len(ran.left)} processes outlived the run {name}: {ran.left}")
    if idle := [f"{fault.kind} at step {fault.step}" for fault in faulty.faults if not fault.seconds]:
        found.append(f"{len(idle)} faults had no effect, or no step after it: {', '.join(idle)}")
    if calm.ledger != faulty.ledger:
        found.append("the ledgers differ")
    bases = [read_json(ran.run.base_file)["hash"] for ran in (calm, faulty)]
    if bases[0] != bases[1]:
        found.append("the bases differ")
    if is_exact:
        if calm.adapter != faulty.adapter:
            found.append("the final adapters differ")
        values = [[[row.get(key) for key in COMPARED] for row in ran.rows] for ran in (calm, faulty)]
        pairs = enumerate(itertools.zip_longest(*values), start=1)
        if wrong := [step for step, pair in pairs if pair[0] != pair[1]]:
            found.append(
                f"{len(wrong)} steps have other figures ({', '.join(COMPARED)}), the first is step {wrong[0]}"
            )
    else:
        few = min(LAST, max(1, steps // 4))
        ends = [[row["reward"] for row in ran.rows[-few:]] for ran in (calm, faulty)]
        noise = (sum(statistics.variance(one) for one in ends) / few) ** 0.5
        apart = statistics.mean(ends[1]) - statistics.mean(ends[0])
        if abs(apart) > 3 * noise + 0.02:
            found.append(f"the mean reward of the last {few} steps is {apart:+.3f} away, noise {noise:.3f}")
    return found


def print_faults(ran: Ran) -> None:
    """What came of the faults, by kind."""
    print(
        "\n| fault | times | nothing was restarted | new replicas | new trainers | resumed by hand | s to a new step |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind in sorted({fault.kind for fault in ran.faults}):
        rows = [fault for fault in ran.faults if fault.kind == kind]
        alone = sum(not any(fault.new.values()) for fault in rows)
        new = " | ".join(str(sum(fault.new[role] for fault in rows)) for role in ("replica", "trainer"))
        seconds = ", ".join(f"{fault.seconds:.0f}" for fault in rows)
        print(f"| {kind} | {len(rows)} | {alone} | {new} | {sum(fault.ups for fault in rows)} | {seconds} |")


def print_figures(calm: Ran, faulty: Ran, every: int, steps: int) -> list[str]:
    """The table of the figures; return those that grow."""
    print("\n| figure | calm: first → last | growth over the run | with faults: first → last | growth | may grow |")
    print("|---|---|---|---|---|---|")
    grown = []
    for figure in FIGURES:
        cells = []
        for name, ran in (("calm", calm), ("with faults", faulty)):
            one = trend(figure, ran, every, steps)
            if one is None:
                cells += ["–", "–"]
                continue
            cells += [f"{one.first:.1f} → {one.last:.1f}", f"{one.growth:+.2f} ± {one.noise:.2f}"]
            if not one.is_flat:
                grown.append(f"{figure.name} of the run {name} grows by {one.growth:.3g}, may by {one.allowed:.3g}")
        allowed = f"{100 * figure.share:.0f} %" if figure.share else f"{figure.most:g}"
        unit = f" [{figure.unit}]" if figure.unit else ""
        print(f"| {figure.name}{unit} | {' | '.join(cells)} | {allowed} |")
    for label, read in (
        ("steps", lambda ran: str(len(ran.rows))),
        ("reward", lambda ran: " → ".join(f"{one:.4f}" for one in reward_of(ran.rows))),
        ("adapter", lambda ran: ran.adapter[:12]),
        ("adapters kept", lambda ran: str(len(list(ran.run.adapters.glob("v*"))))),
        ("seconds", lambda ran: f"{ran.seconds:.0f}"),
        ("starts of launch.up", lambda ran: str(ran.ups)),
        ("processes left", lambda ran: str(len(ran.left))),
    ):
        print(f"| {label} | {read(calm)} | | {read(faulty)} | | |")
    return grown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="steps from fault to fault")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the steps of the faults")
    parser.add_argument("--server", choices=("numpy", "vllm"), default="numpy")
    parser.add_argument("--stall_s", type=float, default=30.0, help="launch.stall_s of both runs")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), help="directory for everything")
    parser.add_argument("--part", choices=("all", "calm", "faulty", "report"), default="all", help="one run alone")
    options = parser.parse_args()
    folder = options.out.resolve()
    soak = Soak(folder, options.server, options.steps, options.stall_s)
    if options.part in ("all", "calm") and not soak.model.exists():
        folder.mkdir(parents=True, exist_ok=True)
        soak.make_model()
    faults = {"calm": [], "faulty": planned(options.steps, options.every, options.seed)}
    for name in faults if options.part == "all" else [options.part] if options.part in faults else []:
        print(f"{name}: {options.steps} steps, {len(faults[name])} faults", flush=True)
        soak.run(name, faults[name]).save(folder, name)
    if options.part == "calm":
        return DONE
    calm, faulty = Ran.load(folder, "calm"), Ran.load(folder, "faulty")
    print_faults(faulty)
    wrong = print_figures(calm, faulty, options.every, options.steps)
    wrong += differences(calm, faulty, options.steps, options.server == "numpy")
    print(f"\n{len(faulty.faults)} faults, {len(wrong)} differences")
    for line in wrong:
        print(f"  {line}")
    return int(bool(wrong))


if __name__ == "__main__":
    run_command(main)
