"""Does training for a format beat quantizing afterwards? Plain GRPO, quantization-aware GRPO, distillation; by seed.

    python -m eval.qat_study --config recipes/configs/grpo-tiny-nf4-cpu.yaml --launcher accelerate_configs/cpu.yaml
    python -m eval.qat_study --config recipes/configs/grpo-tiny-nf4-cpu.yaml --jobs 12 --cards 0 1 \\
        --model.dtype bfloat16                                                          # GPUs, several runs on each
    python -m eval.qat_study --config recipes/configs/grpo-smollm2_135m-nf4-sums-1gpu.yaml --jobs 6 --cards 0 \\
        --server.weights bf16 --server.gpu_memory_utilization 0.05                      # a server for every run

Per seed there is `ptq`: plain GRPO, merged into every format. Per seed and format there are `qat`, the same steps with
the format's numbers (grpo_qat.py), and `qad`, --distill_steps of on-policy distillation into the format
(distill_qat.py), which starts from plain GRPO's adapter with that adapter in full precision as its teacher. Each run
is merged into its format and evaluated on the same held-out problems, sampled with the same random numbers.

A difference is over the same problems and seeds: the mean over the seeds, with a 95 % bootstrap over the problems, and
a second interval over the seeds (Student's t), which also covers what another run would change. `kl` is from the
trained policy to the checkpoint, in nats per token; `steps` is how many steps the reward's curve takes to come within
.05 of its last ten. `k3` is the sampler's over the last ten steps (servers only), `step s` is the median time of a
step in seconds, `GiB` is the peak memory of a step on its GPU, or of the process without one; all are means over the
seeds.

Each step is the command that a user would type; its output goes to <out>/logs. If rollouts come from a server, each
run has its own, started by `launch.up`. Existing results are kept, so an interrupted study resumes. The table comes
last; it is also in study.md and study.json in --out, with the curves in rewards.svg. Keys of the configuration can be
given as --group.key value and hold for all runs.
"""

import argparse
import itertools
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from eval import plots
from eval.cells import read_records, records_file
from eval.stats import cluster_interval, paired_difference, runs_interval
from kit.core import own_code
from kit.core.config.load import load_config, to_dict
from kit.core.config.recipe import DISTILLATION, PLAIN, QUANTIZED
from kit.core.config.schema import Config
from kit.core.errors import DONE, BadInput, CheckFailed, run_command
from kit.core.file_kinds import EVALUATION
from kit.core.formats import TRAINED
from kit.core.run_directory import MANIFEST, RunDir, base_directory, manifest_as_written, write_json
from kit.core.run_files import read_optional
from kit.core.run_state import continuing_flags

ARMS = ("ptq", "qat", "qad")
NEAR, ENDS = 0.05, 10  # of a reward between 0 and 1; number of steps averaged


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m eval.qat_study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="YAML of the plain run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    formats = ["nvfp4a16", "w4a16", "fp8", "nvfp4"]
    parser.add_argument("--formats", nargs="+", choices=TRAINED, default=formats, help=f"default: {' '.join(formats)}")
    parser.add_argument("--distill_steps", type=int, default=40, help="steps of a distillation; default: 40")
    parser.add_argument("--distill_rate", default="1e-4", help="its learning rate; default: 1e-4")
    parser.add_argument("--samples", type=int, default=4, help="completions per held-out problem; default: 4")
    launcher = "accelerate_configs/one_gpu.yaml"
    parser.add_argument("--launcher", default=launcher, help=f"accelerate configuration; default: {launcher}")
    parser.add_argument("--jobs", type=int, default=1, help="commands at once; default: 1")
    parser.add_argument("--cards", nargs="+", default=[], help="GPUs that runs are spread over, as CUDA names them")
    parser.add_argument("--port", type=int, default=8700, help="of the first run's server; default: 8700")
    parser.add_argument("--out", type=Path, help="default: runs/<run.name>-qat-study")
    parser.add_argument("--dry_run", action="store_true", help="print the commands that are lacking, run none")
    return parser.parse_known_args(argv)


class Study:
    """The runs of one call and the commands that are still missing."""

    def __init__(self, options: argparse.Namespace, overrides: list[str]):
        self.options, self.overrides, self.ports = options, overrides, itertools.count(options.port)
        self.config: Config = load_config(options.config, overrides, tuple(vars(options)))
        if not Path(options.launcher).is_file():
            raise BadInput(f"--launcher {options.launcher} does not exist. They are in accelerate_configs.")
        if self.config.policy.quant_cfg is not None:
            raise BadInput(f"{options.config} sets policy.quant_cfg; the study starts from the plain run's YAML.")
        if len(set(options.seeds)) != len(options.seeds):
            raise BadInput(f"--seeds names a seed twice: {options.seeds}.")
        if self.config.eval.temperature == 0 and options.samples > 1:
            raise BadInput("eval.temperature is 0, so all --samples are the same. Set it, or --samples 1.")
        self.out: Path = options.out or self.config.run.directory.with_name(f"{self.config.run.name}-qat-study")

    def run(self, arm: str, seed: int, name: str | None = None) -> RunDir:
        return RunDir(self.out / (f"{arm}-{seed}" if name is None else f"{arm}-{name}-{seed}"))

    def train(self, arm: str, seed: int, name: str | None) -> None:
        """Train what is left of one run."""
        run, steps = self.run(arm, seed, name), self.config.train.max_steps
        recipe = PLAIN
        keys: dict[str, object] = {}
        if name is not None:
            recipe, keys = QUANTIZED, {"policy.quant_cfg": name}
        if arm == "qad":
            recipe, steps = DISTILLATION, self.options.distill_steps
            teacher = self.run("ptq", seed).adapter_dir(self.config.train.max_steps)
            keys |= {"policy.init_adapter": teacher, "distill.teacher_adapter": teacher}
            keys |= {"train.max_steps": steps, "train.learning_rate": self.options.distill_rate}
        if not (run.adapter_dir(steps) / MANIFEST).is_file():
            keys |= {"run.name": run.path.name, "run.seed": seed, "run.output_dir": run.path}
            if self.config.rollout.backend == "server":
                # The plan counts the card as empty, so it cannot tell whether a server that starts beside others fits.
                words = ["-m", "launch.up", "--launcher", self.options.launcher, "--ignore_plan"]
                keys |= {"rollout.server_urls": f"['http://127.0.0.1:{next(self.ports)}']"}
                if self.options.cards:
                    keys |= dict.fromkeys(("train.gpus", "server.gpus"), f"[{self.card(run)}]")
            else:
                words = ["-m", "accelerate.commands.launch", "--config_file", self.options.launcher]
                words += ["--gpu_ids", "all"] if self.options.cards else []  # all of CUDA_VISIBLE_DEVICES
                words.append(recipe)
            words += ["--config", self.options.config, *self.overrides]
            words += [f"--{key}={value}" for key, value in keys.items()]
            self.command(run, "train", words + continuing_flags(run))

    def card(self, run: RunDir) -> str:
        """The GPU of a run, the same for all of its commands."""
        return self.options.cards[sum(map(ord, run.path.name)) % len(self.options.cards)]

    def judge(self, arm: str, seed: int, name: str | None) -> None:
        """Merge and evaluate a trained run, skipping what is already done."""
        run = self.run(arm, seed, name)
        formats = self.options.formats if name is None else [name]
        wanted = ["bf16", *formats]
        given = ["--run", str(run.path), *own_code.flags(to_dict(self.config))]
        if lacking := [one for one in wanted if not (run.merged / "grpo" / one / MANIFEST).is_file()]:
            # The base's checkpoint of an interrupted merge may be there without the policy's.
            words = ["-m", "merge", *given, "--overwrite", "--format", *lacking]
            self.command(run, "merge", words)
        known = read_optional(run.eval_file, EVALUATION).get("matrix", {}).get("grpo", {})
        if not set(formats) <= known.keys():
            words = ["-m", "eval", *given, "--formats", "bf16", *formats]
            self.command(run, "eval", [*words, "--samples", str(self.options.samples)])

    def train_and_judge(self, arm: str, seed: int, name: str) -> None:
        self.train(arm, seed, name)
        self.judge(arm, seed, name)

    def command(self, run: RunDir, what: str, words: list[str]) -> None:
        """Run one command, or print it with --dry_run; `CheckFailed` with its log if it fails."""
        if self.options.dry_run:
            print(shlex.join(["python", *words]), flush=True)
            return
        log = self.out / "logs" / f"{run.path.name}-{what}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{run.path.name}: {what}", flush=True)
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        if self.options.cards and "launch.up" not in words:  # which assigns GPUs to its processes itself
            environment["CUDA_VISIBLE_DEVICES"] = self.card(run)
        with open(log, "w") as file:
            code = subprocess.run([sys.executable, *words], env=environment, stdout=file, stderr=file).returncode
        if code != DONE:
            print(failure := f"{run.path.name}: {what} ended with exit code {code}; log {log}.", flush=True)
            raise CheckFailed(failure)

    def everything(self) -> list[str]:
        """Do all runs and return what failed.

        A distillation starts once the plain run that it starts from is trained, and is skipped if that failed.
        """
        seeds, formats = self.options.seeds, self.options.formats
        # All runs share the base's directory, and if two write it at once, the second is refused.
        if self.config.rollout.backend == "server" and not base_directory(self.config).exists():
            words = ["-m", "merge", "base", "--config", self.options.config, *self.overrides]
            self.command(RunDir(self.out), "base", words)
        with ThreadPoolExecutor(1 if self.options.dry_run else self.options.jobs) as pool:
            plain = {pool.submit(self.train, "ptq", seed, None): seed for seed in seeds}
            runs = [pool.submit(self.train_and_judge, "qat", seed, name) for seed in seeds for name in formats]
            for trained in as_completed(plain):
                if trained.exception() is None:
                    runs.append(pool.submit(self.judge, "ptq", plain[trained], None))
                    runs += [pool.submit(self.train_and_judge, "qad", plain[trained], name) for name in formats]
            return [str(error) for one in [*plain, *runs] if (error := one.exception()) is not None]


def shares(run: RunDir, name: str) -> dict[str, float]:
    """{problem: share of right completions among its decided ones}, for held-out problems that have some."""
    found: dict[str, list[bool]] = {}
    for record in read_records(records_file(run.path / "eval", "grpo", name)):
        if record.correct is not None:
            found.setdefault(record.problem_id, []).append(record.correct)
    return {problem: statistics.mean(right) for problem, right in found.items()}


def means(*sides: Iterable[dict[str, float]]) -> list[np.ndarray]:
    """For each side, the mean share over its seeds of every problem that all tables have, ordered by problem id."""
    rows = [list(tables) for tables in sides]
    common = sorted(set.intersection(*(set(table) for tables in rows for table in tables)))
    return [np.array([statistics.mean(table[one] for table in tables) for one in common]) for tables in rows]


def curve(rewards: list[float]) -> dict[str, float]:
    """Mean reward over the first and the last steps, and the step at which it came near its end."""
    last = statistics.mean(rewards[-ENDS:])
    means = [statistics.mean(rewards[max(0, end - ENDS) : end]) for end in range(1, len(rewards) + 1)]
    near = next(step for step, mean in enumerate(means, 1) if mean >= last - NEAR)
    return {"first": statistics.mean(rewards[:ENDS]), "last": last, "steps": near}


def costs(steps: list[dict[str, Any]]) -> dict[str, float | None]:
    """The sampler's k3 over the last steps (None for in-process rollouts), the median step time, the peak memory."""
    k3 = [value for step in steps[-ENDS:] if (value := step["sampler_k3"]) is not None]
    return {
        "k3": statistics.mean(k3) if k3 else None,
        "step_s": statistics.median(step["seconds"]["step"] for step in steps),
        "peak_gib": max((value for step in steps for value in step["peak_gib"].values()), default=None),
    }


def collect(study: Study) -> dict[str, Any]:
    """By format and arm: accuracy by seed, its mean and interval, the difference to `ptq`, KL, curve and costs."""
    options, samples = study.options, study.config.eval.bootstrap_samples
    found: dict[str, Any] = {}
    for name in ["bf16", *options.formats]:
        plain: dict[int, dict[str, float]] = {}
        for arm in ARMS if name != "bf16" else ("ptq",):
            runs = {seed: study.run(arm, seed, None if arm == "ptq" else name) for seed in options.seeds}
            runs = {seed: run for seed, run in runs.items() if run.eval_file.is_file()}
            if not runs:
                continue
            tables = {seed: shares(run, name) for seed, run in runs.items()}
            plain = tables if arm == "ptq" else plain
            (mean,) = means(tables.values())
            verify = [manifest_as_written(run.merged / "grpo" / name).get("verify") or {} for run in runs.values()]
            row: dict[str, Any] = {"accuracy": float(mean.mean()), "seeds": [*runs]}
            row["interval"] = list(cluster_interval(mean, options.samples * len(runs)))
            row["by_seed"] = [statistics.mean(table.values()) for table in tables.values()]
            row["kl"] = [one.get("mean_kl") for one in verify]
            steps = [run.metrics() for run in runs.values()]
            row["rewards"] = [[step["reward"] for step in one] for one in steps]
            row["curve"] = [curve(rewards) for rewards in row["rewards"]]
            row["costs"] = [costs(one) for one in steps]
            if arm != "ptq" and (both := tables.keys() & plain.keys()):
                one, other = means(*([one[seed] for seed in both] for one in (tables, plain)))
                row["change"] = paired_difference(one, other, samples, study.config.eval.seed)
                each = [float(np.subtract(*means([tables[one]], [plain[one]])).mean()) for one in both]
                row["change"]["over_seeds"] = list(runs_interval(each)) if len(each) > 1 else None
            found.setdefault(name, {})[arm] = row
    return found


def markdown(found: dict[str, Any], head: str) -> str:
    names = ["format", "arm", "accuracy", "by seed", "minus ptq", "over seeds", "kl", "reward", "steps"]
    names += ["k3", "step s", "GiB"]
    lines = [head, "", f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for name, arms in found.items():
        for arm, row in arms.items():
            change, shown, seeds = row.get("change"), "–", "–"
            if change:
                shown = f"{100 * change['difference']:+.1f} {points(change['interval'], '+')}"
                seeds = points(change["over_seeds"], "+") if change["over_seeds"] else "–"
            kl = max((value for value in row["kl"] if value is not None), default=None)
            rewards = " ".join(f"{one['first']:.2f} → {one['last']:.2f}" for one in row["curve"])
            cells = [name, arm, f"{100 * row['accuracy']:.1f} {points(row['interval'])}"]
            cells += [" ".join(f"{100 * value:.1f}" for value in row["by_seed"]), shown, seeds]
            cells += [f"{kl:.1e}" if kl is not None else "–", rewards]
            cells.append(" ".join(str(one["steps"]) for one in row["curve"]))
            for key, form in (("k3", ".1e"), ("step_s", ".2f"), ("peak_gib", ".2f")):
                held = [one[key] for one in row["costs"] if one[key] is not None]
                cells.append(format(statistics.mean(held), form) if held else "–")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Any], steps: int, file: Path) -> None:
    """Draw the rewards of every run by format; a distillation continues where plain GRPO ended, after `steps`."""
    named = {"ptq": ("plain GRPO", 0), "qat": ("GRPO for the format", 0), "qad": ("then distilled into it", steps)}
    panels = {
        name: {label: (before, arms[arm]["rewards"]) for arm, (label, before) in named.items() if arm in arms}
        for name, arms in found.items()
        if name != "bf16"
    }
    if panels:
        file.write_bytes(plots.svg(plots.reward_curves(panels)))


def points(interval: list[float], sign: str = "") -> str:
    low, high = (format(100 * value, f"{sign}.1f") for value in interval)
    return f"[{low}, {high}]"


def main(argv: list[str] | None = None) -> int:
    options, overrides = parse_arguments(argv)
    study, started = Study(options, overrides), time.perf_counter()
    study.config.model.check_path()
    failed = study.everything()
    if options.dry_run:
        return DONE
    found = collect(study)
    command = " ".join(["python", "-m", "eval.qat_study", *(sys.argv[1:] if argv is None else argv)])
    head = (
        f"`{command}`, {time.strftime('%Y-%m-%d')}, {time.perf_counter() - started:.0f} s, {len(options.seeds)} seeds"
    )
    write_json(study.out / "study.json", {"command": command, "formats": found, "failed": failed})
    (study.out / "study.md").write_text(markdown(found, head))
    draw(found, study.config.train.max_steps, study.out / "rewards.svg")
    print(markdown(found, head), flush=True)
    if failed:
        raise CheckFailed("; ".join(failed))
    return DONE


if __name__ == "__main__":
    run_command(main)
