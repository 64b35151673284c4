"""Checks of the directory that a run starts or resumes in, before any weight is loaded."""

import os
import shlex
from pathlib import Path

from kit.core.config import elastic_rules, sharding_rules
from kit.core.config.checks import is_main_process, uses_deepspeed
from kit.core.config.load import config_from_dict, to_dict
from kit.core.config.recipe import check_resumed_format
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir, checkpoint_step, manifest_as_written
from kit.core.run_state import END, LOCK, REPLACED, describe_overwrite, last_end, trainer_pid

# Names that files in `logs` start with: logs of servers and of launch.up's commands, progress of trainers.
LOGS = ("server", "check", "base", "trainer", "progress", "stacks", "failed")
# A resumed run may change these and no others: they decide how the run executes, not what is learned.
FREE_ON_RESUME = (
    *("run.output_dir", "train.max_steps", "train.save_steps", "train.keep_checkpoints", "watch", "launch", "eval"),
    *("rollout.server_urls", "rollout.request_timeout_s", "rollout.server_wait_s", "rollout.max_sampler_k3"),
    *("rollout.sync", "rollout.transport", "rollout.retries", "rollout.max_in_flight", "rollout.canary_prompts"),
    *("rollout.max_canary_delta", "rollout.keep_weights", "server", "train.max_gpu_gib", "train.gpus"),
    *(
        "train.recompute",
        "train.recompute_fraction",
        "train.recompute_offload",
        "train.keep_logits",
        "train.keep_weights",
    ),
    *("train.micro_batch_tokens", "train.share_prompts", "train.packed_attention", "policy.embeddings"),
    "train.sequence_parallel",
    "model.attn_implementation",
    *("reward.timeout_s", "reward.workers", "reward.max_unknown_fraction"),
    *("reward.try_references", "reward.answer_form"),
    *("environment.tool_timeout_s", "environment.episode_timeout_s", "environment.max_unknown_fraction"),
    "policy.quant_cfg",  # the name only; check_resumed_format ensures that the format is the run's
    *elastic_rules.DIVISION,  # the step's completions stay as many: elastic_rules.faults
)


def check_run_directory(config: Config, resume: bool, processes: int, overwrite: bool = False) -> RunDir:
    """The run directory, ready to be written.

    Raises `BadInput` if it holds another run (or none to resume), or if a process on this machine trains in it. A
    directory holds a run once `base.json` exists; leftovers of a failed start, of rollout servers and of launch.up do
    not count. With `overwrite` any run may be there: its contents are listed, and `setup.started` deletes them once
    the new run has its base.
    """
    run = RunDir(config.run.directory)
    if resume and overwrite:
        raise BadInput("--resume continues a run and --overwrite starts it anew. Give one of them.")
    if run.path.exists() and not run.path.is_dir():
        raise BadInput(f"{run.path} is a file. Set run.output_dir to a directory.")
    if is_main_process() and (pid := trainer_pid(run)) is not None:  # other ranks may get here once it trains
        raise BadInput(
            f"{run.path} is being trained in by process {pid}. Wait until it ends, or start another run with "
            "--run.name NAME."
        )
    if not run.base_file.exists():
        _check_no_run(run, resume, overwrite)
        run.replaces = overwrite and (run.path / REPLACED).exists()
        return run
    if overwrite:
        _check_overwrite(config, run)
        run.replaces = True
        return run
    if not any(run.checkpoints.glob("step-*")):
        end = last_end(run)
        why = f": {end.error}" if end and end.error else ", or runs on another machine now"
        raise BadInput(
            f"{run.path} holds a run that stopped before its first checkpoint and cannot be resumed{why.rstrip('.')}. "
            "Start over with --overwrite, or start another run with --run.name NAME."
        )
    if not resume:
        raise BadInput(
            f"{run.path} holds a run already. Continue it with --resume, start another with --run.name NAME, or "
            "delete this one and start over with --overwrite."
        )
    before = run.facts()
    # A key newer than the run meant its default.
    known = config_from_dict(before["config"], str(run.config_file))
    changed = _changed_keys(to_dict(known), to_dict(config))
    steps = before["config"]["train"]["max_steps"]
    if config.train.max_steps != steps and not config.train.lr_scheduler.startswith("constant"):
        changed.append(f"train.max_steps was {steps}, is {config.train.max_steps}, which changes the whole schedule")
    elif config.train.max_steps != steps and config.policy.quant_noise_start:
        changed.append(f"train.max_steps was {steps}, is {config.train.max_steps}, which changes the noise stages")
    changed += elastic_rules.faults(known, config, before.get("processes", processes), processes)
    if changed:
        raise BadInput(
            f"--resume: {run.path} was started with other settings: {'; '.join(changed[:5])}. Resume with the same "
            "config (saving, watch, eval, server addresses and limits may change), or start another run."
        )
    check_resumed_format(config, run)
    checkpoint = run.newest_checkpoint()
    splits = sharding_rules.announced() or ("DeepSpeed" if uses_deepspeed() else None)
    trained_by = manifest_as_written(checkpoint).get("processes", before.get("processes", processes))
    if fault := elastic_rules.split_fault((checkpoint / "optimizer.pt").exists(), splits, trained_by, processes):
        raise BadInput(f"--resume: {run.path}: {fault}, or start another run from its adapter (policy.init_adapter).")
    made = checkpoint_step(checkpoint)
    if config.train.max_steps < made:
        raise BadInput(
            f"--resume: {run.path} has made {made} steps, train.max_steps is {config.train.max_steps}. Raise it."
        )
    return run


def _check_no_run(run: RunDir, resume: bool, overwrite: bool) -> None:
    """Raise `BadInput` unless a run may be started in this directory, which holds none."""
    aside = run.path / REPLACED
    if aside.exists() and not overwrite:
        raise BadInput(
            f"a start with --overwrite was killed in {run.path}; the previous run is in {aside}. Start with "
            f"--overwrite again, or move it back: mv {shlex.quote(str(aside))}/* {run.as_argument}/"
        )
    if resume:
        raise BadInput(f"--resume: {run.path} holds no started run. Leave --resume out to start one.")
    held = next(place for place in (run.path, *run.path.absolute().parents) if place.exists())
    if not (held.is_dir() and os.access(held, os.W_OK)):
        raise BadInput(f"{run.path} cannot be created: {held} is not a writable directory. Set run.output_dir.")
    if (
        run.path.exists()
        and not aside.exists()
        and not all(_is_left_before_a_run(entry) for entry in run.path.iterdir())
    ):
        raise BadInput(f"{run.path} exists and is not a run directory. Set run.output_dir to another place.")


def _is_left_before_a_run(entry: Path) -> bool:
    """Whether this may come from a failed start, or from the run's servers or launch.up, which start first."""
    if entry.name == "logs":
        return all(file.name.startswith(LOGS) for file in entry.iterdir())
    return entry.name in ("config.json", "restarts.jsonl", LOCK, END)


def _check_overwrite(config: Config, run: RunDir) -> None:
    """Print what `--overwrite` deletes; raise `BadInput` if the new run would start from some of it."""
    used = {
        "policy.init_adapter": config.policy.init_adapter,
        "policy.quant_cfg": config.policy.quant_cfg,
        "distill.teacher": config.distill.teacher,
        "distill.teacher_adapter": config.distill.teacher_adapter,
        "model.path": config.model.path,
        "data.path": config.data.path,
        "data.eval_path": config.data.eval_path,
        "server.base": config.server.base,
    }
    own = run.path.resolve()
    for key, value in used.items():
        if value and Path(value).exists() and Path(value).resolve().is_relative_to(own):
            raise BadInput(f"--overwrite would delete {value}, which {key} names. Move it elsewhere first.")
    if is_main_process() and (told := describe_overwrite(run)):
        print(told, flush=True)


def _changed_keys(before: dict, after: dict, prefix: str = "") -> list[str]:
    changed = []
    for key in sorted(before.keys() | after.keys()):
        name, old, new = f"{prefix}{key}", before.get(key), after.get(key)
        if name in FREE_ON_RESUME or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict) and name != "train.trl":
            changed += _changed_keys(old, new, f"{name}.")
        else:
            changed.append(f"{name} was {old!r}, is {new!r}")
    return changed
