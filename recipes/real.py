"""Run the whole path on a pretrained model: fetch, split SVAMP by content, GRPO with a server, merge, evaluate, gate.

    python -m recipes.real --problems svamp/test.jsonl   # what `make real PROBLEMS=svamp/test.jsonl` runs
    python -m recipes.real --steps 40                    # problems from the hub, more steps
    python -m recipes.real --problems svamp/test.jsonl --device cpu --dry_run

Each step is the command a user would type; it is printed before it runs. The model (`recipes.real_base`) and the split
(`recipes.split_problems`) are made once and reused, and both exist before anything is trained. Exit code: that of
the first step that fails, otherwise the gate's.
"""

import argparse
import shutil
import subprocess
from pathlib import Path

from kit.core.config.load import load_config
from kit.core.errors import BAD_INPUT, BadInput, run_command
from kit.core.run_directory import RunDir
from recipes.quickstart import Step, free_run, judging_steps, summary, walk

BASE, DATA = Path("models/smollm2-135m"), Path("data/svamp")
HUB = ["--id", "ChilleD/SVAMP", "--splits", "train+test"]
CONFIGS = {
    "cpu": "recipes/configs/grpo-smollm2_135m-nf4-svamp-cpu.yaml",
    "cuda": "recipes/configs/grpo-smollm2_135m-nf4-svamp-1gpu.yaml",
}


def found_device() -> str:
    """cuda if nvidia-smi works, by the rule that the Makefile uses to choose packages."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    return "cpu" if subprocess.run(["nvidia-smi"], capture_output=True).returncode else "cuda"


def preparing_steps(problems: str | None) -> list[Step]:
    """Steps that make what training needs and is still missing."""
    steps: list[Step] = []
    if not DATA.exists():
        source = HUB if problems is None else [problems]
        steps.append(("problems", ["-m", "recipes.split_problems", *source, "--out", str(DATA)], (0, BAD_INPUT)))
    if not BASE.exists():
        steps.append(("base model", ["-m", "recipes.real_base", "--out", str(BASE)], (0,)))
    return steps


def training_steps(options: argparse.Namespace) -> tuple[RunDir, list[Step]]:
    """The run's directory, and everything from GRPO to the gate."""
    file = CONFIGS[options.device or found_device()]
    config = load_config(file)
    path = free_run(config.run.name if options.seed == 0 else f"{config.run.name}-seed{options.seed}")
    chosen = ["--run.name", path.name, "--run.seed", str(options.seed)]
    if options.steps is not None:
        chosen += ["--train.max_steps", str(options.steps)]
    formats = tuple(name for name in config.eval.formats if name != "nf4")
    train = ("GRPO", ["-m", "launch.up", "--config", file, *chosen], (0,))
    return RunDir(path), [train, *judging_steps(path, formats, nf4=False)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--problems", help="SVAMP, or other problems, in one file (default: SVAMP from the hub)")
    parser.add_argument("--steps", type=int, help="GRPO steps (default: train.max_steps of the configuration)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the GRPO run")
    parser.add_argument("--device", choices=CONFIGS, help="default: cuda where nvidia-smi works")
    parser.add_argument("--dry_run", action="store_true", help="print the commands, run none")
    options = parser.parse_args()
    if options.steps is not None and options.steps < 1:
        raise BadInput(f"--steps ({options.steps}) must be at least 1.")
    if options.problems is not None and not Path(options.problems).is_file():
        raise BadInput(f"--problems {options.problems} is not a file.")
    seconds: dict[str, float] = {}
    run, steps = training_steps(options)
    for prepare in preparing_steps(options.problems):
        if walk([prepare], seconds, options.dry_run) == BAD_INPUT:
            raise BadInput(
                "nothing was trained, for want of problems. Copy SVAMP, one file with its 1,000 rows, and name it: "
                "make real PROBLEMS=svamp/test.jsonl"
            )
    code = walk(steps, seconds, options.dry_run)
    if not options.dry_run:
        print(summary(run, seconds), flush=True)
    return code


if __name__ == "__main__":
    run_command(main)
