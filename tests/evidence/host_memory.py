"""Host memory of a training step on a CPU by phase, beside what the plan says: peak resident GiB of the real recipe.

    OMP_NUM_THREADS=1 python tests/evidence/host_memory.py \
        --config recipes/configs/grpo-tiny-nf4-cpu.yaml --train.max_steps 2

Takes the keys of the recipe's command line, without a run directory. `after` is the kit as it is. `before` is the same
run with `rollout.keep_weights never` and TRL's own tiles in the log-prob head. Each side is a process of its own; a
phase's figure is the largest of its steps. Linux only: the peak is reset at every phase. With
MALLOC_MMAP_THRESHOLD_=1048576 in the environment glibc leaves no holes between activations; the plan then counts none.
"""

import argparse
import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from kit.policy.host_memory import peak_resident_gib, reset_peak_resident

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[2]
SIDES = ("before", "after")
LENGTHS = ("prompt", "completion")  # tokens of the longest row


def child(side: str, out: str, recipe: str, arguments: list[str]) -> None:
    """Run the recipe in this process; write {phase: peak resident GiB} and the longest row's lengths to `out`."""
    from kit.train import trainer
    from kit.train.figures import StepFigures

    found: dict[str, float] = {}
    phases = ["load"]  # the one under way; what is not timed is the update's

    def turn() -> None:
        found[phases[-1]] = max(found.get(phases[-1], 0.0), peak_resident_gib())
        reset_peak_resident()

    original = StepFigures.timed

    @contextlib.contextmanager
    def timed(self: StepFigures, phase: str) -> Iterator[None]:
        turn()
        phases[:] = [phase]
        try:
            with original(self, phase):
                yield
        finally:
            turn()
            phases[:] = ["update"]

    scored = trainer.PolicyTrainer.compute_loss

    def compute_loss(self: trainer.PolicyTrainer, model: Any, inputs: dict, **others: Any) -> "torch.Tensor":
        for key in LENGTHS:
            found[key] = max(found.get(key, 0), inputs[f"{key}_ids"].shape[1])
        return scored(self, model, inputs, **others)

    StepFigures.timed, trainer.PolicyTrainer.compute_loss = timed, compute_loss
    if side == "before":
        trainer.use_host_tiles = lambda device: None
        arguments = [*arguments, "--rollout.keep_weights", "never"]
    sys.argv = [recipe, *arguments]
    try:
        runpy.run_path(recipe, run_name="__main__")
    finally:
        turn()
        Path(out).write_text(json.dumps(found))


def planned(arguments: list[str], measured: dict[str, float]) -> dict[str, float]:
    """What the plan expects of a CPU process with rows as long as the measured ones, {phase: GiB}."""
    from kit.core.config.load import load_config
    from kit.plan import memory
    from kit.plan.gpus import parse_gpus
    from kit.plan.shapes import config_shape

    place = arguments.index("--config")
    config = load_config(arguments[place + 1], arguments[:place] + arguments[place + 2 :])
    config.rollout.max_prompt_length = measured["prompt"]
    config.rollout.max_completion_length = measured["completion"]
    card, _ = parse_gpus("cpu")
    phases = memory.trainer_phases(config_shape(config), config, card)
    return {name: memory.process_memory(parts, card).expected for name, parts in phases.items()}


def measure(side: str, recipe: str, arguments: list[str]) -> dict[str, float]:
    """{phase: peak resident GiB} of one run of the recipe, and its seconds by phase in the last step."""
    with tempfile.TemporaryDirectory() as folder:
        out, run = Path(folder) / "found.json", Path(folder) / "run"
        command = [sys.executable, __file__, "--child", side, str(out), "--recipe", recipe, *arguments]
        subprocess.run([*command, "--run.output_dir", str(run)], cwd=ROOT, check=True, stdout=sys.stderr)
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        return json.loads(out.read_text()) | {key: last[key] for key in ("seconds", "loss", "grad_norm")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--recipe", default="recipes/grpo_qlora.py")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    arguments = ["--config", options.config, *arguments]
    if options.child:
        child(*options.child, options.recipe, arguments)
        return
    found = {side: measure(side, options.recipe, arguments) for side in options.sides}
    plan = planned(arguments, found[options.sides[-1]])
    if options.json:
        print(json.dumps({"threads": os.environ.get("OMP_NUM_THREADS"), "plan": plan, "measured": found}))
        return
    print(f"| phase | {' | '.join(f'{side}, GiB' for side in found)} | plan, GiB |")
    print(f"|---|{'---|' * (len(found) + 1)}")
    names = {"reference": "log-probs"}
    for phase in ("load", "rollout", "reference", "update"):
        row = [f"{one[phase]:.2f}" if phase in one else "" for one in found.values()]
        expected = plan.get(names.get(phase, phase))
        print(f"| {phase} | {' | '.join(row)} | {'' if expected is None else f'{expected:.2f}'} |")
    for side, one in found.items():
        lengths = " + ".join(str(one[key]) for key in LENGTHS)
        print(f"{side}: {lengths} tokens, seconds {one['seconds']}, loss {one['loss']}, grad_norm {one['grad_norm']}")


if __name__ == "__main__":
    main()
