"""Run the whole study on one model: does the gain of GRPO survive each format, over several seeds?

    python -m recipes.study --config recipes/configs/grpo-tiny-nf4-cpu.yaml --launcher accelerate_configs/cpu.yaml
    python -m recipes.study --config recipes/configs/grpo-qwen2.5_1.5b-nf4-gsm8k-1gpu.yaml --seeds 0 1 2 --serving

Per seed: train, merge {base, grpo} into every format, diagnose the layers, evaluate, gate, and with --serving time the
deployed formats in vLLM; then one page per run (report.html) and one table over the seeds (study.md, study.json).
Each step is the command a user would type and is printed before it runs; existing results are kept, so an interrupted
study continues where it stopped. Keys of the configuration can be given as --group.key value.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.core import own_code
from kit.core.config.load import load_config, to_dict
from kit.core.config.recipe import recipe_of
from kit.core.config.schema import Config
from kit.core.errors import CHECK_FAILED, DONE, BadInput, run_command
from kit.core.file_kinds import EVALUATION, SERVING
from kit.core.formats import FORMATS
from kit.core.run_directory import MANIFEST, RunDir, manifest_as_written, write_json
from kit.core.run_files import read_object, read_optional
from kit.core.run_state import continuing_flags
from launch.starting.trainer_command import ONE_GPU, in_checkout
from recipes.quickstart import mean_reward, step

POLICIES = ("base", "grpo")
Command = tuple[str, list[str], tuple[int, ...]]


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run per seed (run.seed)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, help="default: eval.formats of the configuration")
    parser.add_argument("--launcher", default=in_checkout(ONE_GPU), help="accelerate configuration")
    parser.add_argument("--serving", action="store_true", help="time the formats of the first seed in vLLM")
    parser.add_argument("--batches", nargs="+", default=["1", "4", "16", "64", "256"], help="of --serving")
    parser.add_argument("--out", type=Path, help="where study.md and study.json go; default: runs/<run.name>-study")
    parser.add_argument("--dry_run", action="store_true", help="print the commands, run none")
    return parser.parse_known_args(argv)


class Study:
    """One configuration, its seeds, and the commands that remain to be run."""

    def __init__(self, options: argparse.Namespace, overrides: list[str]):
        self.options, self.overrides = options, overrides
        self.config: Config = load_config(options.config, overrides, tuple(vars(options)))
        self.formats = [name for name in FORMATS if name in (options.formats or self.config.eval.formats)]
        if "bf16" not in self.formats:
            raise BadInput(
                "the study needs bf16 among its formats: survival is the gain in a format minus that in bf16."
            )
        if len(set(options.seeds)) != len(options.seeds):
            raise BadInput(f"--seeds names a seed twice: {options.seeds}.")
        self.runs = {seed: self.config.run.directory.with_name(self.name(seed)) for seed in options.seeds}
        self.out = options.out or self.config.run.directory.with_name(f"{self.config.run.name}-study")
        self.own_code = own_code.flags(to_dict(self.config))

    def name(self, seed: int) -> str:
        return f"{self.config.run.name}-seed{seed}"

    def commands(self, seed: int) -> Iterator[Command]:
        """Yield (name, arguments of python, accepted exit codes) for what this seed lacks, checked before each one."""
        run, place = RunDir(self.runs[seed]), str(self.runs[seed])
        given = ["--run", place, *self.own_code]
        if not is_trained(run, self.config.train.max_steps):
            own = ["--run.name", self.name(seed), "--run.seed", str(seed), "--run.output_dir", place]
            launch = ["-m", "accelerate.commands.launch", "--config_file", self.options.launcher]
            own += continuing_flags(run)
            train = [
                *launch,
                in_checkout(recipe_of(self.config)),
                "--config",
                self.options.config,
                *self.overrides,
                *own,
            ]
            yield f"seed {seed}: GRPO", train, (DONE,)
        # The nf4 cells of the evaluation are the NF4 base with and without the adapter: nothing is merged for them.
        if merged := [name for name in self.formats if name != "nf4" and not is_merged(run, name)]:
            yield f"seed {seed}: merge", ["-m", "merge", *given, "--format", *merged], (DONE,)
        if not (run.path / "diagnostics.json").is_file():
            yield f"seed {seed}: layers", ["-m", "merge", "diagnose", *given, "--tokens"], (DONE,)
        if not is_evaluated(run, self.formats):
            yield f"seed {seed}: eval", ["-m", "eval", *given, "--formats", *self.formats], (DONE,)
        yield f"seed {seed}: gate", ["-m", "eval", "gate", *given], (DONE, CHECK_FAILED)
        served = [name for name in self.formats if name != "nf4"]  # its cells are the run's NF4 base, not a checkpoint
        if self.options.serving and seed == self.options.seeds[0] and not is_served(run, served):
            serve = ["-m", "eval.serving", "--run", place, "--formats", *served, "--batches", *self.options.batches]
            # A format that this machine's vLLM does not serve is reported and skipped.
            yield f"seed {seed}: serving", serve, (DONE, CHECK_FAILED)
        yield f"seed {seed}: report", ["-m", "eval", "report", "--run", place], (DONE,)


def is_trained(run: RunDir, steps: int) -> bool:
    return (run.adapter_dir(steps) / MANIFEST).is_file()


def is_merged(run: RunDir, name: str) -> bool:
    return all((run.merged / policy / name / MANIFEST).is_file() for policy in POLICIES)


def is_evaluated(run: RunDir, formats: list[str]) -> bool:
    return run.eval_file.is_file() and set(formats) <= set(read_object(run.eval_file, EVALUATION)["matrix"]["grpo"])


def is_served(run: RunDir, formats: list[str]) -> bool:
    result = read_optional(run.path / "serving.json", SERVING)
    return set(formats) <= {*result.get("formats", ()), *result.get("failed", ())}


def collect(runs: dict[int, Path], formats: list[str]) -> dict:
    """Measurements of the runs by seed, with mean and range over the seeds; fractions, not percent."""
    seeds: dict[str, Any] = {}
    for seed, path in runs.items():
        run = RunDir(path)
        result, rows = read_object(run.eval_file, EVALUATION), run.metrics()
        manifests = {name: manifest_as_written(run.merged / "grpo" / name) for name in formats if name != "nf4"}
        seeds[str(seed)] = {
            "run": str(path),
            "reward": [mean_reward(rows[:10]), mean_reward(rows[-10:])],
            "n": result["n"],
            "matrix": {policy: {name: result["matrix"][policy][name] for name in formats} for policy in POLICIES},
            "gain": {name: result["gain"][name] for name in formats},
            "gain_survival": {name: result["gain_survival"][name] for name in formats if name != "bf16"},
            "promoted": {name: manifest.get("promoted", False) for name, manifest in manifests.items()},
            "versions": result["versions"],
        }
    figures = {
        "base": lambda one, name: one["matrix"]["base"][name]["accuracy"],
        "grpo": lambda one, name: one["matrix"]["grpo"][name]["accuracy"],
        "gain": lambda one, name: one["gain"][name]["difference"],
        "survival": lambda one, name: one["gain_survival"][name]["difference"] if name != "bf16" else 0.0,
    }
    over_seeds = {
        name: {
            key: {"mean": statistics.mean(values), "min": min(values), "max": max(values)}
            for key, figure in figures.items()
            if (values := [figure(one, name) for one in seeds.values()])
        }
        for name in formats
    }
    return {"seeds": seeds, "over_seeds": over_seeds, "formats": formats}


def markdown(result: dict) -> str:
    """One table over the seeds and one row per seed and format; percent and points."""
    seeds = result["seeds"]
    machine = next(iter(seeds.values()))["versions"]
    lines = [f"# Study over {len(seeds)} seeds", "", f"`{' '.join(result['command'])}`, {result['date']},"]
    lines += [", ".join(f"{name} {version}" for name, version in machine.items()) + ".", ""]
    lines += ["Mean over the seeds and their range; survival = gain in the format minus gain in bf16.", ""]
    lines += ["| format | base | GRPO | gain | survival |", "|---|---|---|---|---|"]
    for name, row in result["over_seeds"].items():
        cells = [_range(row[key], key in ("gain", "survival")) for key in ("base", "grpo", "gain", "survival")]
        lines.append(f"| {name} | " + " | ".join(cells if name != "bf16" else [*cells[:3], "–"]) + " |")
    lines += ["", "Each seed, 95 % intervals (Wilson; paired bootstrap over problems for gain and survival):", ""]
    lines += ["| seed | reward | format | base | GRPO | gain | survival | promoted |", "|" + "---|" * 8]
    for seed, one in seeds.items():
        for name in result["formats"]:
            base, grpo = (one["matrix"][policy][name] for policy in POLICIES)
            survival = one["gain_survival"].get(name)
            cells = [_level(base), _level(grpo), _change(one["gain"][name]), _change(survival) if survival else "–"]
            promoted = {True: "yes", False: "no"}.get(one["promoted"].get(name), "–")
            reward = f"{one['reward'][0]:.2f} → {one['reward'][1]:.2f}"
            lines.append(f"| {seed} | {reward} | {name} | " + " | ".join(cells) + f" | {promoted} |")
    return "\n".join(lines) + "\n"


def _range(found: dict, signed: bool) -> str:
    sign = "+" if signed else ""
    mean, low, high = (format(100 * found[key], f"{sign}.1f") for key in ("mean", "min", "max"))
    return f"{mean} ({low} to {high})"


def _level(cell: dict) -> str:
    low, high = cell["interval"]
    return f"{100 * cell['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _change(found: dict) -> str:
    low, high = found["interval"]
    return f"{100 * found['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def main(argv: list[str] | None = None) -> int:
    options, overrides = parse_arguments(argv)
    study = Study(options, overrides)
    seconds: dict[str, float] = {}
    for seed in options.seeds:
        for name, command, accepted in study.commands(seed):
            if options.dry_run:
                print("$ python " + " ".join(command), flush=True)
            else:
                step(name, [sys.executable, *command], seconds, accepted)
    if options.dry_run:
        return DONE
    result = collect(study.runs, study.formats)
    command = ["python", "-m", "recipes.study", *(sys.argv[1:] if argv is None else argv)]
    result |= {"command": command, "date": time.strftime("%Y-%m-%d"), "seconds": seconds}
    study.out.mkdir(parents=True, exist_ok=True)
    write_json(study.out / "study.json", result)
    (study.out / "study.md").write_text(markdown(result))
    print(markdown(result), flush=True)
    print(f"written: {study.out / 'study.md'}, study.json; one page per seed: <run>/report.html", flush=True)
    return DONE


if __name__ == "__main__":
    run_command(main)
