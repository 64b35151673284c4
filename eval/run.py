"""Measure the matrix {base, grpo} x {nf4, bf16, fp8, w4a16} on a run's held-out problems; see README.md."""

import argparse
import contextlib
import dataclasses
import gc
import importlib.metadata
import json
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval import artifacts, compare, report
from eval.artifacts import POLICIES, Sources
from eval.problems import held_out, problems_hash
from eval.score import Record, as_rows, score, summarize
from eval.stats import minimum_detectable_effect
from recipes.parts.config import Config, load_config, resolve
from recipes.parts.errors import DONE, BadInput
from recipes.parts.rundir import RunDir, write_json

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "compressed-tensors", "math-verify", "scipy", "numpy")


@dataclass(frozen=True)
class Plan:
    """A checked evaluation: everything that can be refused without weights has been."""

    run: RunDir
    out: Path
    config: Config
    formats: list[str]
    sources: Sources
    problems: list[Any]
    base: Path | None

    @property
    def max_new_tokens(self) -> int:
        return measurement(self.config)["max_new_tokens"]

    @property
    def reference(self) -> str:
        """The format that the minimum detectable effect is stated for: the gate's where it is measured."""
        wanted = self.config.eval.gate.format
        return wanted if wanted in self.formats else self.formats[0]


def measurement(config: Config) -> dict:
    """How a configuration measures: its eval group without the gate, the length of completions resolved."""
    values = dataclasses.asdict(config.eval)
    del values["gate"]
    return values | {"max_new_tokens": config.eval.max_new_tokens or config.rollout.max_completion_length}


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m eval",
        description=__doc__,
        epilog="Other commands: python -m eval gate --run … (promote or not), python -m eval report --run … (redraw). "
        "Keys of the run's configuration can be given as --group.key value.",
        allow_abbrev=False,
    )
    parser.add_argument("--run", required=True, help="run directory, e.g. runs/tiny")
    parser.add_argument("--formats", nargs="+", help="columns of the matrix; default eval.formats")
    parser.add_argument("--max_problems", type=int, help="held-out problems per cell; default eval.max_problems")
    parser.add_argument("--batch_size", type=int, help="prompts generated together; default eval.batch_size")
    parser.add_argument("--base", type=Path, help="the original checkpoint, when it is not where base.json says")
    parser.add_argument("--out", type=Path, help="where eval.json, eval.md, eval.png go; default: the run directory")
    parser.add_argument("--config", help="YAML to take instead of the run's own configuration")
    parser.add_argument("--dry_run", action="store_true", help="check everything, load no weights")
    return parser.parse_known_args(argv)


def run_config(run: RunDir, overrides: list[str], file: str | None = None) -> Config:
    """The run's own configuration (or that of a YAML) with command-line overrides."""
    if file is not None:
        return load_config(file, overrides)
    return resolve(run.config(), overrides, str(run.config_file))


def make_plan(arguments: argparse.Namespace, overrides: list[str]) -> Plan:
    """The checked plan; `BadInput` and `CheckFailed` before any weight is loaded."""
    run = RunDir.open(arguments.run)
    flags = {"eval.max_problems": arguments.max_problems, "eval.batch_size": arguments.batch_size}
    overrides = overrides + [f"--{key}={value}" for key, value in flags.items() if value is not None]
    config = run_config(run, overrides, arguments.config)
    if not config.eval.temperature >= 0:
        raise BadInput(f"eval.temperature ({config.eval.temperature}) must be 0 (greedy) or above.")
    if config.eval.batch_size < 1 or config.eval.bootstrap_samples < 100:
        raise BadInput(
            f"eval.batch_size ({config.eval.batch_size}) must be at least 1 and eval.bootstrap_samples "
            f"({config.eval.bootstrap_samples}) at least 100."
        )
    formats = artifacts.check_formats(arguments.formats or config.eval.formats)
    sources = artifacts.find_sources(run, formats)
    problems = held_out(config.data, config.eval.max_problems)
    base = None  # the original checkpoint is only needed for the nf4 cells
    if "nf4" in formats:
        from merge.verify import base_directory

        base = base_directory(run, arguments.base, weights=not arguments.dry_run)
    return Plan(run, Path(arguments.out or run.path), config, formats, sources, problems, base)


def main(argv: list[str] | None = None) -> int:
    """Check, measure every cell, compare, write eval.json, eval.md and eval.png; 0 when all was measured."""
    arguments, overrides = parse_arguments(argv)
    plan = make_plan(arguments, overrides)
    print(
        f"eval {plan.run.path}: {len(plan.problems)} held-out problems, {{{', '.join(POLICIES)}}} "
        f"x {{{', '.join(plan.formats)}}}, up to {plan.max_new_tokens} new tokens, adapter "
        f"v{plan.sources.adapter_version}",
        flush=True,
    )
    with contextlib.suppress(BadInput):  # a run without adapters can still compare merged checkpoints
        newest = plan.run.newest_adapter()
        if plan.sources.adapter_version is not None and newest != plan.run.adapter_dir(plan.sources.adapter_version):
            print(f"note: {newest} is newer than the adapter that was merged; merge again to measure it", flush=True)
    if arguments.dry_run:
        for rate in (0.05, 0.2):
            effect = compare.points(minimum_detectable_effect(len(plan.problems), rate))
            print(f"with disagreement on {rate:.0%} of the problems, {effect} points are detectable at 80 % power")
        return DONE
    result = evaluate(plan, sys.argv[1:] if argv is None else argv)
    report.print_summary(result)
    print(f"written: {plan.out / 'eval.json'}, eval.md, eval.png; completions in {plan.out / 'eval'}", flush=True)
    return DONE


def evaluate(plan: Plan, command: list[str]) -> dict:
    """Measure every cell of the plan and write the report; returns the content of eval.json."""
    records, matrix, pool = {}, {policy: {} for policy in POLICIES}, answer_pool(plan.config)
    (plan.out / "eval").mkdir(parents=True, exist_ok=True)
    try:
        for name in plan.formats:
            for policy in POLICIES:
                started = time.perf_counter()
                records[policy, name] = measure(plan, policy, name, pool)
                cell = {**summarize(records[policy, name]), "seconds": round(time.perf_counter() - started, 2)}
                if (policy, name) in plan.sources.artifacts:
                    cell["artifact_hash"] = plan.sources.artifacts[policy, name].hash
                matrix[policy][name] = cell
                print(report.cell_line(policy, name, cell), flush=True)
                write_records(plan, policy, name, records[policy, name])
    finally:
        pool.close()
    settings = plan.config.eval
    result = {
        "n": len(plan.problems),
        "problems_hash": problems_hash(plan.problems),
        "matrix": matrix,
        **(comparison := compare.compare(records, plan.formats, plan.reference, settings.bootstrap_samples)),
        "conclusion": compare.conclude(comparison, plan.formats, matrix),
        "base_hash": plan.sources.base_hash,
        "adapter_version": plan.sources.adapter_version,
        "adapter_hash": plan.sources.adapter_hash,
        "data": dataclasses.asdict(plan.config.data),
        "eval": measurement(plan.config) | {"formats": plan.formats},
        "engine": "transformers",
        "compute_dtype": compute_dtype(),
        "max_new_tokens": plan.max_new_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "bootstrap_samples": settings.bootstrap_samples,
        "versions": versions(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["python", "-m", "eval", *command],
    }
    # eval.json is what the gate reads, so it comes last: with it, everything is there.
    report.write_report(result, plan.out)
    write_json(plan.out / "eval.json", result)
    return result


def compute_dtype() -> str:
    """The dtype that cells are computed in on this machine: float32 on a CPU, bfloat16 on a GPU."""
    from merge.verify import default_device, scoring_dtype

    return str(scoring_dtype(default_device())).removeprefix("torch.")


def answer_pool(config: Config) -> Any:
    """The workers that compare answers, with the limits of the run's rewards."""
    from reward.pool import WorkerPool

    return WorkerPool(workers=config.reward.workers, timeout_s=config.reward.timeout_s)


def measure(plan: Plan, policy: str, name: str, pool: Any) -> list[Record]:
    """The records of one cell: its model is loaded, asked every problem, scored and let go."""
    import torch
    from transformers import AutoTokenizer

    from eval.generate import end_of_turn_token, generate, set_threads
    from recipes.parts.data import chat_messages

    place = plan.base if name == "nf4" else plan.sources.artifacts[policy, name].path
    tokenizer = AutoTokenizer.from_pretrained(place)
    end_of_turn_token(tokenizer)  # refused before minutes of loading
    model = load_cell(plan, policy, name)
    set_threads(sum(parameter.numel() for parameter in model.parameters()))
    conversations = [chat_messages(plan.config.data, problem) for problem in plan.problems]
    settings = plan.config.eval
    made = generate(
        model,
        tokenizer,
        conversations,
        plan.max_new_tokens,
        settings.batch_size,
        temperature=settings.temperature,
        seed=settings.seed,
    )
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return score(plan.problems, made, conversations, pool)


def load_cell(plan: Plan, policy: str, name: str) -> Any:
    """The model of one cell: NF4 with or without the adapter, or the merged checkpoint."""
    from merge.verify import load_for_scoring, load_policy

    if name == "nf4":
        return load_policy(plan.run, plan.sources.adapter if policy == "grpo" else None, base=plan.base)
    return load_for_scoring(plan.sources.artifacts[policy, name].path)


def write_records(plan: Plan, policy: str, name: str, records: list[Record]) -> None:
    """One JSON line per completion in <out>/eval/<policy>-<format>.jsonl, replaced whole."""
    version = plan.sources.adapter_version if policy == "grpo" else None
    final = plan.out / "eval" / f"{policy}-{name}.jsonl"
    partial = final.with_suffix(".partial")
    partial.write_text("".join(json.dumps({**row, "adapter_version": version}) + "\n" for row in as_rows(records)))
    partial.replace(final)


def versions() -> dict:
    """Versions of what the numbers depend on, and the machine they were measured on."""
    import torch

    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({platform.machine()})"
    return {"python": platform.python_version(), **found, "device": device}
