"""Start a complete run, its rollout servers and its trainer, and end them together.

    python -m launch.up --config RUN.yaml
    python -m launch.up --config RUN.yaml --resume
    python -m launch.up --config RUN.yaml --overwrite
    python -m launch.up --config RUN.yaml --restarts 5
    python -m launch.up --config RUN.yaml --dry_run

Checks the configuration as the recipe does, writes the dequantized base if it is missing, starts one replica per URL
in rollout.server_urls, and the trainer on the other GPUs while the replicas load; a trainer that shares their GPUs
starts once they answer. With rollout.backend in_process there is only the trainer. Ctrl-C, SIGTERM and SIGHUP end the
trainer, then the servers; a second Ctrl-C kills at once. The first process that dies ends the run with its reason;
with --restarts N a server that fails is started again, and so is a trainer that the machine failed, N times in all.
Keys of the YAML can be given as --group.key value. Exit code: 0 done, 1 a process or a check failed, 2 bad input,
128 + signal when stopped.
"""

import contextlib
import os
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.config.run_checks import check_run_directory
from kit.core.config.schema import Config
from kit.core.errors import DONE, BadInput, CheckFailed, command_parser, run_command
from kit.core.health import alerts
from kit.core.measured import warning
from kit.core.metrics_log import MetricsLog, mean, series
from kit.core.one_line import printable
from kit.core.run_directory import RunDir, base_directory
from kit.core.run_state import Restarted, continuing_flags, read_restarts, record_standstill
from kit.plan.layout import fits
from kit.plan.placement import Placement, place
from kit.rollout.protocol import Info
from kit.rollout.restart_requests import WAIT_S
from launch.replicas import Replicas, Running, Stopped, read_end
from launch.server import check_answer
from launch.server_key import own_key
from launch.starting.jobs import Job, JobFailed, kill_trees, leash
from launch.starting.restarts import LONGEST_DELAY_S, MOST_RESTARTS, KeptReplicas, Restarts, may_resume, why_it_ended
from launch.starting.stall import StallWatch, StoodStill
from launch.starting.trainer_command import (
    Command,
    Launcher,
    base_command,
    check_elsewhere,
    choose_launcher,
    environment_of,
    gpus_to_plan,
    process_count,
    read_launcher,
    trainer_command,
)
from launch.starting.view import Status, View
from launch.vllm_command import (
    Installed,
    Plan,
    check_base,
    check_ports,
    gpu_gib,
    installed_vllm,
    plans,
    unmeasured,
    visible_cards,
)

POLL_S = 0.2
FOLLOWED_S = 3.0  # a trainer may fail because of a server that takes a moment to end
ENDS = 10  # maximum number of steps at each end for the summary's mean reward


@dataclass
class Start:
    """The processes that a checked configuration starts, and their arguments."""

    config: Config
    arguments: list[str]  # --config X.yaml and the overrides
    resume: bool
    launcher: Launcher
    placement: Placement
    vllm: Installed | None  # None: the trainer generates
    run: RunDir
    base: Command | None  # None: it exists, or nothing needs it
    trainer: Command
    servers: list[Plan]  # without a base, minus options that depend on its files
    memory: str = ""  # launch.plan's estimate
    logs: Path | None = None  # for a dry run, which does not touch the run's directory
    is_elsewhere: bool = False  # planned for the GPUs that the lists name, on a machine without any
    restarts: int = 0  # how often failed processes are started again

    @property
    def shared_gpus(self) -> list[str]:
        """GPUs that trainer and replicas have in common."""
        return [gpu for gpu in self.placement.trainer if gpu in self.placement.servers]

    @property
    def is_one_unit(self) -> bool:
        """Whether trainer and replicas share memory, so that neither can be started again beside the other."""
        return bool(self.shared_gpus) or self.config.server.share_base

    def trainer_again(self) -> Command:
        """The trainer's command, to continue what it did so far."""
        words = [word for word in self.trainer.words if word not in ("--resume", "--overwrite")]
        # Killed before it had its base, a start with --overwrite has set the old run aside.
        flags = continuing_flags(self.run) or [word for word in self.trainer.words if word == "--overwrite"]
        return Command([*words, *flags], self.trainer.environment)

    @property
    def check(self) -> Command | None:
        """The recipe's own checks; None for a resumed run, whose configuration has already passed them."""
        if self.resume:
            return None
        if self.is_elsewhere:
            return check_elsewhere(self.config, self.trainer, len(self.placement.trainer))
        return Command([*self.trainer.words, "--dry_run"], self.trainer.environment)

    def log(self, name: str) -> Path:
        return (self.logs or self.run.logs) / f"{name}.log"


def server_plans(config: Config, vllm: Installed | None, placement: Placement) -> list[Plan]:
    """One plan per replica on the GPUs chosen for the replicas."""
    if vllm is None:
        return []
    if vllm.is_cpu:
        return plans(config, vllm, None)
    # The names are already in the order of server.gpus.
    unlisted = replace(config, server=replace(config.server, gpus=None))
    return plans(unlisted, vllm, list(placement.servers), gpu_gib(), visible_cards())


def prepare(
    config_path: str,
    overrides: list[str],
    launcher_path: str | None,
    resume: bool,
    ignore_plan: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    restarts: int = 0,
) -> Start:
    """Run every fast check; raises `BadInput` for a run that cannot work. A dry run on a machine without a GPU places
    the run on the GPUs that its configuration names."""
    if not 0 <= restarts <= MOST_RESTARTS:
        raise BadInput(f"--restarts ({restarts}) must be at least 0 and at most {MOST_RESTARTS:,}.")
    config = load_config(config_path, overrides)
    is_served = config.rollout.backend == "server"
    asked = read_launcher(launcher_path) if launcher_path else None
    visible, is_elsewhere = gpus_to_plan(config, asked, dry_run)
    vllm = None if not is_served else Installed("", is_cpu=False) if is_elsewhere else installed_vllm()
    placement = place(config, visible, bool(vllm and not vllm.is_cpu), not (asked and asked.is_cpu))
    launcher = asked or choose_launcher(len(placement.trainer))
    processes = process_count(launcher, len(placement.trainer))
    check_config(config, processes)
    run = check_run_directory(config, resume, processes, overwrite)
    trainer = trainer_command(config, config_path, overrides, launcher, placement)
    if resume or overwrite:
        trainer.words.append("--resume" if resume else "--overwrite")
    needs_base = is_served and not base_directory(config).exists()
    arguments = ["--config", config_path, *overrides]
    base = base_command(config_path, overrides, placement) if needs_base else None
    servers = server_plans(config, vllm, placement)
    if not is_elsewhere:
        check_ports(servers)
    if is_served and not base:
        check_base(config, config_path)
    planned = [*arguments, *(["--launcher", launcher_path] if launcher_path else [])]
    with environment_of(launcher.announces):
        memory = plan_elsewhere(planned) if is_elsewhere else plan_memory(config, ignore_plan or dry_run, planned)
    start = Start(config, arguments, resume, launcher, placement, vllm, run, base, trainer, servers, memory)
    return replace(start, is_elsewhere=is_elsewhere, restarts=restarts)


def plan_memory(config: Config, ignore_plan: bool, arguments: list[str]) -> str:
    """launch.plan's estimate for this machine; `BadInput` if the run does not fit, unless `ignore_plan`. `arguments`
    are those of launch.plan."""
    try:
        does_fit, told = fits(config)
    except BadInput as unknown:
        return f"not planned: {unknown}"
    if not does_fit and not ignore_plan:
        more = shlex.join(["python", "-m", "launch.plan", *arguments])
        raise BadInput(f"{told}\nDetails: {more}. --ignore_plan starts the run anyway.")
    return told.splitlines()[1]


def plan_elsewhere(arguments: list[str]) -> str:
    """Replacement for the memory estimate when the GPUs are on another machine."""
    plan = shlex.join(["python", "-m", "launch.plan", *arguments])
    return f"not planned, as there is no GPU here: {plan} --gpu h200:2"


def describe(start: Start) -> str:
    """Describe what will start where, in a few lines."""
    placement, config = start.placement, start.config
    on = f"GPU {', '.join(placement.trainer)}" if placement.trainer else "the CPU"
    count = process_count(start.launcher, len(placement.trainer))
    lines = [f"run      {config.run.name} -> {start.run.path}", f"memory   {start.memory}"]
    if start.vllm:
        what = "is missing and written first" if start.base else "exists"
        lines.append(f"base     {base_directory(config)} {what}")
    for plan in start.servers:
        gpus = f"GPU {', '.join(plan.gpus)}" if plan.gpus else "the CPU"
        lines.append(f"server   {plan.url} on {gpus}, log {_short(plan.log)}")
    if start.servers:
        lines.append(f"KV cache {start.servers[0].kv_cache}")
    lines.append(
        f"trainer  {count} process{'es' * (count > 1)} on {on} by {start.launcher.path}, log "
        f"{_short(start.log('trainer'))}"
    )
    if shared := start.shared_gpus:
        asleep = "sleep while the trainer updates" if config.server.sleep else "stay in memory"
        lines.append(f"         shares GPU {', '.join(shared)} with the replicas, which {asleep}")
    if start.restarts:
        lines.append(f"restarts at most {start.restarts}")
    if start.is_elsewhere:
        lines.append("unchecked there is no GPU here: memory, ports, vLLM, and what train.gpus and server.gpus name")
    elif text := unmeasured(bool(placement.trainer or placement.servers)):
        lines.append(warning(text))
    return "\n".join(lines)


def _short(path: Path) -> str:
    """A path relative to the working directory if it lies below it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def print_commands(start: Start) -> None:
    """Print the exact commands in order, each to be typed in a terminal of its own or after the one before."""
    steps: list[tuple[str, str]] = []
    if start.check:
        steps.append(("the checks of the recipe", start.check.text))
    if start.base:
        steps.append(("the dequantized base", start.base.text))
    for plan in start.servers:
        steps.append((f"the server at {plan.url}, until it answers", Command(plan.command, plan.environment).text))
    steps.append(("the trainer", start.trainer.text))
    for name, text in steps:
        print(f"\n# {name}\n{text}")
    if start.base and not start.vllm.is_cpu and start.config.server.kv_cache_gib is None:
        print("\n# --gpu-memory-utilization is lowered by the share of the NF4 copy once the base exists.")
    print(flush=True)


class Signals:
    """Record the first SIGINT, SIGTERM or SIGHUP; a second SIGINT or SIGTERM kills the processes of `pids` at once."""

    def __init__(self, pids: Callable[[], list[int]]):
        self.pids = pids
        self.received: int | None = None
        self._terminals = [number for number in (1, 2) if os.isatty(number)]  # isatty is false once closed
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            self._give_up_terminals()
        if self.received is None:
            self.received = number
        elif number != signal.SIGHUP:  # a closed terminal sends it twice
            kill_trees(self.pids())

    def _give_up_terminals(self) -> None:
        """Redirect output to /dev/null once the terminal is gone and every write to it fails."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in self._terminals:
            os.dup2(nowhere, number)
        os.close(nowhere)

    def check(self) -> None:
        """Raise `Stopped` once a signal has arrived."""
        if self.received is not None:
            raise Stopped


class ServerFailed(Exception):
    """A replica failed that shares memory with the trainer."""


@dataclass
class Up:
    """One start of a complete run."""

    start: Start
    checks_only: bool = False
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.servers = Replicas([], look=self.look)
        self.kept: KeptReplicas | None = None  # once all replicas serve, with `restarts`
        self.signals = Signals(self.pids)
        self.stall = StallWatch(self.start.run, self.start.config.launch.stall_s)
        plain = Console(highlight=False, force_terminal=False)
        self.view = View(self.start.run, self.statuses, plain if self.checks_only else Console(highlight=False))
        earlier = read_restarts(self.start.run) if self.start.resume else []
        self.restarts = Restarts(self.start.run, self.start.restarts, self.view.say, earlier)
        self.resumed: Restarted | None = None  # the trainer's restart, until it makes a step

    def run(self) -> int:
        """Start, wait, end; return the exit code after completion or a stop by signal."""
        start = self.start
        try:
            with self.signals, self.view:
                if start.check:
                    self.step("check", start.check, "the recipe's own checks")
                if not self.checks_only:
                    self.everything()
        except Stopped:
            number = self.signals.received
            print(f"stopped by {signal.Signals(number).name}; all processes have ended. {what_is_left(start)}")
            return 128 + number
        finally:
            for line in self.restarts.summary():
                print(printable(line), flush=True)
        if not self.checks_only:
            print(summary(start), flush=True)
        return DONE

    def everything(self) -> None:
        """Write the base, start servers and trainer, and wait for the trainer to end."""
        start, config = self.start, self.start.config
        if start.base:
            self.step("base", start.base, f"dequantized base {base_directory(config)}")
        self.view.follow_steps(start.log("trainer"))
        manifest = check_base(config, start.arguments[1]) if start.vllm else {}
        found = server_plans(config, start.vllm, start.placement) if start.base else start.servers
        if start.base and found and found[0].kv_cache != start.servers[0].kv_cache:
            self.view.say(f"KV cache {found[0].kv_cache}")
        key = own_key(start.run) if found else contextlib.nullcontext()
        with key, Replicas(found, prefix=leash(), look=self.look) as self.servers:
            try:
                self.servers.start()
                for one in self.servers.running:
                    log = _short(one.plan.log)
                    self.view.say(f"server {one.plan.url}: started (pid {one.process.pid}), log {log}")
                if start.shared_gpus:  # vLLM measures the free memory of its GPUs while it starts
                    self.wait_for_servers(manifest)
                command = start.trainer
                while not self.train(command, manifest):
                    command = start.trainer_again()
                self.view.say("trainer: done")
            finally:
                if found:
                    self.view.say("servers: asked to end")

    def train(self, command: Command, manifest: dict) -> bool:
        """Run the trainer until it ends; return whether it is done. If not, it may be started again now: `restarts`
        has counted it, and what it needs is back."""
        start = self.start
        try:
            with self.job("trainer", self.with_allowance(command), start.placement.trainer) as trainer:
                self.view.say(f"trainer: started (pid {trainer.process.pid}), log {_short(trainer.log)}")
                # Before checking the trainer: it waits for the servers and fails when they do.
                self.wait_for_servers(manifest)
                if (code := self.wait(trainer)) == DONE:
                    self.note_progress(is_done=True)
                    return True
                raise self.cause(trainer.failure(code))
        except ServerFailed:
            pass
        except StoodStill as failed:
            if not start.restarts:
                raise
            self.resumed = self.restarts.begin("trainer", why_it_ended(failed), str(failed))
        except JobFailed as failed:
            if not start.restarts or not may_resume(failed, start.run):
                raise
            self.resumed = self.restarts.begin("trainer", why_it_ended(failed), str(failed))
        starts_at = time.monotonic() + self.restarts.delay_s
        while time.monotonic() < starts_at or self.must_end_trainer:
            self.look_at_servers()
            time.sleep(POLL_S)
        return False

    def with_allowance(self, command: Command) -> Command:
        """The trainer's command, with how long it may wait for a replica that is started again."""
        if not self.start.restarts or not self.servers.running:
            return command
        each = self.start.config.rollout.server_wait_s + LONGEST_DELAY_S
        wait_s = 0.0 if self.start.is_one_unit else self.start.restarts * each
        return Command(command.words, command.environment | {WAIT_S: f"{wait_s:g}"})

    def wait_for_servers(self, manifest: dict) -> None:
        """Wait until every replica answers as the configuration needs; a no-op once they have."""
        servers, config = self.servers, self.start.config
        if self.kept is not None:
            return

        def check(plan: Plan, info: Info) -> None:
            check_answer(config, manifest, plan, info)

        def check_first(plan: Plan, info: Info) -> None:
            check(plan, info)
            self.view.say(f"server {plan.url}: ready after {time.monotonic() - servers.started:.0f} s")

        if len(servers.serving) < len(servers.running):
            servers.wait_ready(config.rollout.server_wait_s, check_first)
        if self.start.restarts:
            self.kept = KeptReplicas(servers, self.restarts, config.rollout.server_wait_s, check)

    def look_at_servers(self) -> None:
        """Start replicas again that failed; without `restarts`, `CheckFailed` if one has ended."""
        if self.kept is None:
            self.servers.check_alive()
            return
        self.look()
        self.kept.look()

    def step(self, name: str, command: Command, what: str) -> None:
        """Run one command to completion before the servers start."""
        with self.job(name, command, self.start.placement.trainer) as job:
            self.view.say(f"{name}: {what}, log {_short(job.log)}")
            if (code := self.wait(job)) != DONE:
                raise job.failure(code)
        self.view.say(f"{name}: done after {time.monotonic() - job.started:.0f} s")

    @contextlib.contextmanager
    def job(self, name: str, command: Command, gpus: tuple[str, ...]):
        with Job(name, command, self.start.log(name).resolve(), gpus, self.view.update) as job:
            self.jobs.append(job)
            try:
                yield job
            finally:
                if job.process.poll() is None:
                    self.view.say(f"{name}: asked to end")

    def wait(self, job: Job) -> int:
        """Wait for a job and return its exit code; `Stopped` on a signal, `CheckFailed` if a server ends first or the
        job stands still, `ServerFailed` if one failed that must be started before the trainer."""
        while (code := job.ended()) is None:
            try:
                self.look_at_servers()
            except CheckFailed as failed:
                self.view.say(str(failed).partition(". ")[0])
                raise
            try:
                self.stall.check(job.name, job.process.pid)
            except StoodStill as failed:
                kill_trees([job.process.pid])  # asking a stopped process to end would only take longer
                job.process.wait()
                if job.name == "trainer":
                    record_standstill(self.start.run, str(failed))
                raise StoodStill(f"{failed} Its log is {job.log}. {what_is_left(self.start)}") from None
            if self.must_end_trainer:
                raise ServerFailed
            self.note_progress()
            time.sleep(POLL_S)
        self.view.update(at_once=True)
        if code != DONE:
            self.signals.check()
        return code

    def note_progress(self, is_done: bool = False) -> None:
        """Record that a resumed trainer made a step, or is done."""
        if self.resumed and (is_done or self.restarts.has_step_since(self.resumed)):
            self.restarts.is_back(self.resumed)
            self.resumed = None

    @property
    def must_end_trainer(self) -> bool:
        """Whether a replica failed that can only be started without a trainer beside it."""
        return bool(self.start.is_one_unit and self.kept and self.kept.failed)

    def look(self) -> None:
        self.signals.check()
        self.view.update()

    def cause(self, failed: JobFailed) -> Exception:
        """The trainer's failure, or the failure of a server that caused it."""
        deadline = time.monotonic() + FOLLOWED_S
        while self.servers.running and time.monotonic() < deadline:
            try:
                self.look_at_servers()
                if self.must_end_trainer:
                    return ServerFailed()
            except CheckFailed as first:
                return CheckFailed(f"{first}\nThe trainer followed: {str(failed).partition(' Its log is')[0]}")
            time.sleep(POLL_S)
        return failed

    def pids(self) -> list[int]:
        """The running processes that this command started."""
        processes = [one.process for one in self.jobs] + [one.process for one in self.servers.running]
        return [process.pid for process in processes if process.returncode is None]

    def statuses(self) -> list[Status]:
        """One row per process, servers first."""
        servers, now = self.servers, time.monotonic()

        def row(name: str, state: str, one: Job | Running, gpus: tuple[str, ...], started: float, log: Path) -> Status:
            ending = "ending" if self.signals.received is not None else state
            state = "ended" if one.process.poll() is not None else ending
            return Status(name, state, one.process.pid, gpus, now - started, log)

        rows = [
            row(
                f"server {one.plan.port}",
                "serving" if one.plan.url in servers.serving else "starting",
                *(one, one.plan.gpus or (), one.started, one.plan.log),
            )
            for one in servers.running
        ]
        trainers = [job for job in self.jobs if job.name == "trainer"]
        shown = [job for job in self.jobs if job.process.poll() is None or job in trainers[-1:]]
        return rows + [row(job.name, "running", job, job.gpus, job.started, job.log) for job in shown]


def what_is_left(start: Start) -> str:
    """Where a stopped run can continue."""
    again = shlex.join(["python", "-m", "launch.up", *start.arguments])
    try:
        return f"Newest checkpoint: {start.run.newest_checkpoint()}. Continue with: {again} --resume"
    except BadInput:
        if start.run.base_file.exists():
            none = f"No checkpoint yet (train.save_steps {start.config.train.save_steps})"
            return f"{none}. Start over with: {again} --overwrite"
        return "Nothing was trained yet."


def summary(start: Start) -> str:
    """Results of a run, from its files, and the commands to run next."""
    run, log = start.run, MetricsLog(start.run.metrics_file)
    log.poll()
    rewards = series(log.rows, "reward")
    few = max(1, min(ENDS, len(rewards) // 2))
    first, last = mean(rewards[:few]), mean(rewards[-few:])
    shown = ["n/a" if value is None else f"{value:.3f}" for value in (first, last)]
    told = next((line for line in reversed(read_end(start.log("trainer"))) if line.startswith("done: ")), "")
    try:
        adapter = str(run.newest_adapter())
    except BadInput:
        adapter = "none"
    return "\n".join(
        [
            f"{len(log.rows)} steps, reward {shown[0]} (first {few}) -> {shown[1]} (last {few}), adapter {adapter}",
            *([told] if told else []),
            *(line for alert in alerts(log.rows, run) for line in alert.lines),
            "next: " + "\n      ".join(judging_commands(run, start.config)),
        ]
    )


def judging_commands(run: RunDir, config: Config) -> list[str]:
    """Command lines that merge, evaluate and gate the run, each using the output of the one before."""
    measured = config.eval.formats
    needed = list(dict.fromkeys([*measured, config.eval.gate.format, "bf16"]))  # the gate compares with bf16
    merged = [name for name in needed if name != "nf4"]
    replaced = " --overwrite" if any(run.merged.glob("*/*")) else ""  # those of an earlier adapter
    chosen = "" if needed == measured else f" --formats {' '.join(needed)}"
    return [
        f"python -m merge --run {run.as_argument} --format {' '.join(merged)}{replaced}",
        f"python -m eval --run {run.as_argument}{chosen}",
        f"python -m eval gate --run {run.as_argument}",
    ]


def main() -> int:
    parser = command_parser("launch.up", __doc__)
    parser.add_argument("--config", required=True, help="YAML of the run (recipes/configs)")
    parser.add_argument(
        "--launcher", help="accelerate configuration of the trainer; default by device and number of GPUs"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run from its newest whole checkpoint")
    parser.add_argument(
        "--overwrite", action="store_true", help="start over: list and delete the contents of the run directory"
    )
    parser.add_argument("--dry_run", action="store_true", help="check everything, print the commands, then exit")
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start failed servers again, and a trainer that the machine failed, N times in all; default 0",
    )
    parser.add_argument("--ignore_plan", action="store_true", help="start even if launch.plan says it does not fit")
    flags, overrides = parser.parse_known_args()
    given = flags.config, overrides, flags.launcher, flags.resume, flags.ignore_plan, flags.overwrite, flags.dry_run
    start = prepare(*given, flags.restarts)
    print(describe(start), flush=True)
    if not flags.dry_run:
        return Up(start).run()
    print_commands(start)
    start.logs = Path(tempfile.mkdtemp(prefix="launch-up-"))
    code = Up(start, checks_only=True).run()
    shutil.rmtree(start.logs)  # a failed check keeps its log
    return code


if __name__ == "__main__":
    run_command(main)
