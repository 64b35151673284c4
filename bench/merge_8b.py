"""Merge an adapter into an 8B shape: seconds, including disk, and peak memory of the command.

    python bench/merge_8b.py                          # 36 layers, 8.2 B parameters; exits 1 above 60 s
    python bench/merge_8b.py --shape 32b --layers 2   # tensors as large as Qwen2.5-32B's: memory

Random weights, rank 16 on every linear layer, no verification. Prints a table last; exits 1 above the time (8B, all
layers) or above 2 x the largest tensor + 1 GiB of memory. Also works without a GPU, but slower.
"""

import argparse
import math
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "vocab_size": 151936},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "vocab_size": 152064},
}
LAYERS, MOST_SECONDS, SHARD, GIB = {"8b": 36, "32b": 64}, 60, 4 << 30, 2**30


def write_model(folder: Path, tokenizer_dir: Path, shape: str, layers: int) -> dict[str, tuple[int, ...]]:
    """Write a Qwen3 checkpoint of random BF16 weights in shards of 4 GiB, tensor by tensor; return the shapes."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config

    from kit.weights.shards import write_parts
    from kit.weights.write_base import plan_base

    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(folder)
    fixed = {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False, "dtype": "bfloat16"}
    config = Qwen3Config(**SHAPES[shape], **fixed, num_hidden_layers=layers, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(folder)
    shapes, sizes, shards = plan_base(config).shapes, [0], [[]]
    for name, size in shapes.items():
        if sizes[-1] + 2 * math.prod(size) > SHARD and shards[-1]:
            sizes.append(0)
            shards.append([])
        sizes[-1] += 2 * math.prod(size)
        shards[-1].append(name)
    files = {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards)}
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()

    def random(name: str) -> dict[str, torch.Tensor]:
        size = math.prod(shapes[name])
        return {name: noise.repeat(-(-size // noise.numel()))[:size].roll(len(name)).view(shapes[name])}

    write_parts(folder, files, random)
    return shapes


def write_run(folder: Path, model: Path, base: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a run directory for `model`: base.json of its dequantized base, and an adapter with random weights."""
    import torch
    from safetensors.torch import save_file

    from kit.core.run_directory import RunDir, publish, write_json, write_manifest
    from kit.core.run_files import read_json

    folder.mkdir()
    run, info = RunDir(folder), read_json(base / "base.json")
    write_json(run.config_file, {"config": {"model": {"id": "random", "path": str(model), "dtype": "bfloat16"}}})
    write_json(run.base_file, info)
    tensors = {}
    for module in info["quantized"]:
        rows, columns = shapes[f"{module}.weight"]
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(16, columns) / math.sqrt(columns)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, 16) * 1e-3
    with publish(run.adapter_dir(10)) as partial:
        save_file(tensors, partial / "adapter_model.safetensors")
        write_json(partial / "adapter_config.json", {"peft_type": "LORA", "r": 16, "lora_alpha": 32})
        write_manifest(partial, "adapter", version=10, step=10, base_hash=info["hash"])


def measured(arguments: list[str]) -> tuple[float, int]:
    """(seconds, peak resident bytes including all children) of a command; exits if it fails."""
    import psutil

    started, peak = time.perf_counter(), 0
    process = psutil.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            peak = max(peak, sum(p.memory_info().rss for p in [process, *process.children(recursive=True)]))
        except psutil.NoSuchProcess:
            continue
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} exits {process.returncode}")
    return time.perf_counter() - started, peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=Path("/tmp/merge8b"))
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--format", nargs="+", default=["bf16"])
    options = parser.parse_args()
    from path_8b import command

    work, layers = options.work, options.layers or LAYERS[options.shape]
    work.mkdir(parents=True)
    command("tiny", ["recipes/tiny_base.py", "--out", str(work / "tiny"), "--steps", "0"], work)
    shapes = write_model(work / "model", work / "tiny", options.shape, layers)
    largest = 2 * max(map(math.prod, shapes.values()))
    flags = ["--config", CONFIG, "--model.path", str(work / "model"), "--model.dtype", "bfloat16"]
    rows = {"merge base": measured(["-m", "merge", "base", *flags, "--out", str(work / "base")])}
    write_run(work / "run", work / "model", work / "base", shapes)
    for name in options.format:
        merge = ["-m", "merge", "--run", str(work / "run"), "--policy", "grpo", "--skip_verify", "--format", name]
        rows[f"merge {name}"] = measured(merge)
    total, bound = 2 * sum(map(math.prod, shapes.values())), 2 * largest + GIB
    print(f"{options.shape}, {layers} layers: {total / GIB:.1f} GiB in BF16, largest tensor {largest / GIB:.2f} GiB")
    print(f"{'command':<14} seconds  peak GiB (merge: at most {bound / GIB:.2f})")
    for what, (seconds, peak) in rows.items():
        print(f"{what:<14} {seconds:7.1f}  {peak / GIB:8.2f}")
    del rows["merge base"]
    whole = options.shape == "8b" and layers == LAYERS["8b"]
    slow = whole and rows.get("merge bf16", (0, 0))[0] > MOST_SECONDS
    return int(slow or any(peak > bound for _, peak in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
