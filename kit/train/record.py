"""Files that a run writes while it trains: config.json, metrics.jsonl, completions, the ledger, the log line.

Only the main process writes. Every line is flushed, so `tail -f` and `launch.watch` see a step as soon as it ends.
"""

import math
import os
import platform
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kit.core.checksum import line_of
from kit.core.config.load import to_dict
from kit.core.config.schema import Config
from kit.core.errors import failure_of
from kit.core.file_kinds import METRICS, STEP
from kit.core.installed import installed_versions
from kit.core.ledger import read_ledger
from kit.core.measured import PACKAGES, never_measured_here
from kit.core.run_directory import RunDir, write_record
from kit.core.run_files import read_lines
from kit.data.own_format import format_hash
from kit.environments.load import source_hashes
from reward import function_of, is_own
from reward.own import imported, source_hash
from reward.sandbox import isolation_level


def versions() -> dict[str, str]:
    """Installed versions of the packages a result depends on."""
    return {"python": platform.python_version()} | installed_versions(PACKAGES)


def machine() -> dict[str, Any]:
    """CPU and, if present, GPU of this process."""
    import torch

    facts: dict[str, Any] = {"processor": platform.machine(), "cores": os.cpu_count(), "gpus": []}
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts["cuda"] = torch.version.cuda
    return facts


def unmeasured() -> str | None:
    """`never_measured` for the installed versions and this process's kind of device."""
    import torch

    return never_measured_here(torch.cuda.get_device_capability() if torch.cuda.is_available() else None)


def git_revision() -> str | None:
    """The commit of this checkout, with `+dirty` if files differ from it; None outside a checkout.

    An installed kit may lie inside a checkout of something else, whose commit says nothing about it.
    """
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision = git("rev-parse", "HEAD") if git("ls-files", Path(__file__).name) else None
    return f"{revision}+dirty" if revision and git("status", "--porcelain") else revision


def code_sandbox(config: Config) -> dict | None:
    """The isolation around model-written code; None if no reward and no tool runs any."""
    if "python" not in config.environment.tools and not any(
        getattr(function_of(name), "executes_code", False) for name in config.reward.functions
    ):
        return None
    return isolation_level()


def write_config(config: Config, run: RunDir, processes: int) -> None:
    """Write `config.json`: the resolved configuration, machine, versions and commit."""
    run.path.mkdir(parents=True, exist_ok=True)
    write_record(
        run.config_file,
        {
            "config": to_dict(config),
            "versions": versions(),
            "never_measured": unmeasured(),
            "machine": machine(),
            "processes": processes,
            "code_sandbox": code_sandbox(config),
            "own_rewards": {name: source_hash(function_of(name)) for name in config.reward.functions if is_own(name)},
            **({"own_loss": source_hash(imported(config.train.loss, "train.loss"))} if config.train.loss else {}),
            **format_hash(config),
            **({"own_environment": source_hashes(config)} if config.environment.is_given else {}),
            "git_revision": git_revision(),
            "seed": config.run.seed,
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        },
    )


def drop_steps_after(path: Path, step: int) -> None:
    """Remove lines of a step above `step` from a jsonl file, and a last line truncated by a crash. `BadInput` if a
    line is damaged."""
    if not path.exists():
        return
    kept = [line_of(row) for row in read_lines(path, STEP, may_be_growing=True) if row["step"] <= step]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(f"{line}\n" for line in kept))
    os.replace(temporary, path)


def note_resume(run: RunDir, step: int, **facts: Any) -> None:
    """Append to `resumes.jsonl` that the run goes on behind `step`, with `facts` about it and the ledger's later
    lines: problems that were drawn before the run ended and that are sampled again."""
    again = [
        {"step": entry.step, "problem_ids": entry.problem_ids}
        for entry in read_ledger(run.ledger_file)
        if entry.step > step and entry.problem_ids
    ]
    _append(run.resumes_file, {"time": time.time(), "step": step, **facts, "sampled_again": again})


def add_counts(parts: Iterable[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """The sum of {reward function: {reason: rewards that could not be computed}}."""
    total: dict[str, Counter[str]] = defaultdict(Counter)
    for part in parts:
        for name, reasons in part.items():
            total[name].update(reasons)
    return {name: dict(reasons) for name, reasons in total.items()}


def unknown_so_far(metrics_file: Path) -> dict[str, dict[str, int]]:
    """`unknown_rewards` of the last step of a metrics file whose lines are all complete; empty if it has none."""
    rows = read_lines(metrics_file, METRICS, may_be_growing=True) if metrics_file.exists() else []
    return rows[-1].get("unknown_rewards") or {} if rows else {}


class Recorder:
    """Appends to the run directory; holds no state that a resumed run would need."""

    def __init__(self, run: RunDir, config: Config):
        self.run, self.config = run, config
        run.logs.mkdir(parents=True, exist_ok=True)

    def say(self, line: str) -> None:
        """Print one line and append it to logs/trainer.log, unless stdout is that file already (launch.up)."""
        print(line, flush=True)
        log = self.run.logs / "trainer.log"
        if not _prints_go_to(log):
            _append_line(log, line)

    def ledger(self, step: int, problem_ids: list[str], **more: Any) -> None:
        """Record the problems of a step, in order, before it generates; with dynamic sampling also those of a round,
        and `more` about it (`resampling.py`)."""
        _append(self.run.ledger_file, {"step": step, "problem_ids": problem_ids, **more})

    def step(self, record: dict) -> None:
        """Write one line of metrics.jsonl (non-finite numbers become null) and print the step."""
        _append(self.run.metrics_file, _finite(record))
        self.say(step_line(record))

    def wants_completions(self, step: int) -> bool:
        """Whether to write a generating step's completions: the first, and the first at or after each multiple."""
        every, apart = self.config.watch.completions_every, self.config.train.num_iterations
        return bool(every) and (step == 1 or step // every != (step - apart) // every)

    def completions(self, step: int, rows: list[dict]) -> None:
        """Write a sample of a step's completions, whole groups first to last, capped per step."""
        self.run.completions.mkdir(exist_ok=True)
        path = self.run.completions / f"step-{step:06d}.jsonl"
        path.unlink(missing_ok=True)
        for row in rows[: self.config.watch.completions_per_step]:
            _append(path, _finite(row))


def keep_traceback(run: RunDir, error: BaseException) -> Path:
    """Append an error's traceback to logs/trainer.log and return that path; the terminal gets only the message."""
    log = run.logs / "trainer.log"
    _append_line(log, "".join(traceback.format_exception(error)).rstrip())
    return log


def step_line(record: dict) -> str:
    """The step as one line of fixed order, e.g. for `tail -f logs/trainer.log | grep reward`; in a distillation it
    includes the divergence from the teacher, in supervised fine-tuning loss and token accuracy."""

    def show(key: str, digits: int) -> str:
        value = record.get(key)
        return "n/a" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"

    seconds = record["seconds"]
    if "token_accuracy" in record:
        heldout = f"heldout_loss {show('heldout_loss', 4)} " if record.get("heldout_loss") is not None else ""
        return (
            f"step {record['step']}/{record['total_steps']} loss {show('loss', 4)} token_accuracy "
            f"{show('token_accuracy', 3)} {heldout}learning_rate {record['learning_rate'] or 0:.2e} grad_norm "
            f"{show('grad_norm', 3)} tokens/s {show('update_tokens_per_s', 0)} seconds {seconds['step']:.2f}"
        )
    reward = f"step {record['step']}/{record['total_steps']} reward {show('reward', 3)} std {show('reward_std', 3)} "
    ends = (
        f"truncated {show('truncated_fraction', 2)} length {show('completion_length', 1)} "
        f"grad_norm {show('grad_norm', 3)} seconds {seconds['step']:.2f} (rollout {seconds['rollout']:.2f} "
    )
    if "divergence" in record:
        return (
            f"{reward}divergence {show('divergence', 5)} entropy {show('entropy', 3)} {ends}"
            f"teacher {seconds.get('teacher', 0.0):.2f} update {seconds['update']:.2f})"
        )
    return (
        f"{reward}kl {show('kl', 5)} entropy {show('entropy', 3)} zero_spread {show('zero_spread_fraction', 2)} "
        f"clipped {show('clip_fraction', 3)} {ends}update {seconds['update']:.2f})"
    )


def _prints_go_to(path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), path.stat())
    except (OSError, ValueError):  # no such file, or prints are captured without one
        return False


def _append(path: Path, value: dict) -> None:
    _append_line(path, line_of(value))


def _append_line(path: Path, line: str) -> None:
    try:
        with open(path, "a") as file:
            file.write(f"{line}\n")
    except OSError as error:
        raise failure_of(error)(
            f"writing {path} failed: {error}. Free some space, then continue with --resume."
        ) from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
