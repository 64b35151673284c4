"""One card: a vLLM engine with Qwen3-30B-A3B's shape in FP8: milliseconds of a sync of its experts, tokens per second.

    python bench/experts_server.py --out server.json                   # expert ranks 0, 4, 8
    python bench/experts_server.py --layers 4 --ranks 4 --out x.json   # shorter
    python bench/experts_server.py --ranks 4 --kv_gib 5 --out server.json \\
        --trainer "--expert_ranks 4 --levers '{\"policy.compute\": \"fused\"}' --out step.json"

Random weights (vLLM's dummy format) and random NF4 copies: the numbers of a sync do not depend on them. An adapter of
rank 16 on attention, and of `--ranks` on every expert, is written as a file and read, folded into all layers and
quantized, three times each, as `remerge_stage` and `remerge_activate` do it; the median counts. Tokens per second
before any fold and after the last: 256 requests of 256 prompt and 256 new tokens. `--routing` also returns the experts
of every token. `--trainer` then runs bench/experts_step.py with these arguments on the same card, and generates once
more beside it, while the card's memory is watched.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parent))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])

from experts_step import QWEN3_30B_A3B

from kit.core.lora import EXPERT_PARAMETERS, expert_wrappers
from kit.rollout.protocol import TENSORS
from kit.rollout.server.expert_layers import is_experts
from kit.rollout.server.remerge import Remerge, State, find_layers, nf4_code

ROUNDS, ATTENTION_RANK = 3, 16


class RandomCopy(Remerge):
    """The worker extension with a random copy of a base that is on no disk."""

    def random_copy(self) -> dict:
        import torch

        linears = [one for one in find_layers(self.model_runner.model) if not one.name.endswith("mlp.gate")]
        for one in linears:
            size = one.rows * one.columns
            one.packed = torch.randint(0, 256, (size // 2,), dtype=torch.uint8, device=self.device)
            one.absmax = torch.full((size // 64,), 0.05, device=self.device)
        self._remerge = State(linears, torch.bfloat16, nf4_code(self.device))
        return {"gib": sum(one.packed.nbytes + one.absmax.nbytes for one in linears) / 2**30}


def write_adapter(folder: Path, linears: list[Any], expert_rank: int) -> float:
    """Write a random adapter for a worker's layers; return its MB."""
    import torch
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}

    def add(module: str, rows: int, columns: int, rank: int) -> None:
        tensors[f"{TENSORS}{module}.lora_A.weight"] = torch.randn(rank, columns).mul_(0.01).bfloat16()
        tensors[f"{TENSORS}{module}.lora_B.weight"] = torch.randn(rows, rank).mul_(0.01).bfloat16()

    for one in linears:
        if not is_experts(one):
            for part in one.parts:
                add(part.name, part.rows, one.columns, ATTENTION_RANK)
        elif expert_rank:
            module, _, name = one.name.rpartition(".")
            experts = one.layer.global_num_experts
            key = expert_wrappers(module)[EXPERT_PARAMETERS.index(name)]
            add(key, one.rows // experts, one.columns, expert_rank * experts)
    config = {"r": ATTENTION_RANK, "lora_alpha": 32}
    if expert_rank:
        names = [f"experts.{name}" for name in EXPERT_PARAMETERS]
        config |= {"target_parameters": names, "rank_pattern": dict.fromkeys(names, expert_rank)}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return (folder / "adapter_model.safetensors").stat().st_size / 1e6


def speed(llm: Any) -> float:
    """Output tokens per second."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=256, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 5000 + 3 for j in range(256)]} for i in range(256)]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    if (experts := outputs[0].outputs[0].routed_experts) is not None:
        print(f"experts {experts.shape} {experts.dtype} of 256 + 256 tokens", flush=True)
    return sum(len(one.outputs[0].token_ids) for one in outputs) / (time.perf_counter() - started)


class Watched:
    """The lowest free memory of the card while the block runs."""

    def __enter__(self) -> "Watched":
        import torch

        self.lowest, self.total = torch.cuda.mem_get_info()
        self.ended = threading.Event()

        def watch() -> None:
            while not self.ended.wait(0.05):
                self.lowest = min(self.lowest, torch.cuda.mem_get_info()[0])

        self.thread = threading.Thread(target=watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    @property
    def peak_gib(self) -> float:
        return (self.total - self.lowest) / 2**30


def beside(llm: Any, arguments: str) -> dict[str, Any]:
    """Run a trainer's steps on the server's card, generating until it ends; peak GiB of the card, and speeds."""
    words = [sys.executable, str(Path(__file__).with_name("experts_step.py")), *shlex.split(arguments)]
    with Watched() as card:
        trainer = subprocess.Popen(words, env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
        speeds = []
        while trainer.poll() is None:
            speeds.append(speed(llm))
    return {
        "exit": trainer.returncode,
        "card_peak_gib": card.peak_gib,
        "card_gib": card.total / 2**30,
        "tok_s": speeds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 4, 8])
    parser.add_argument("--routing", action="store_true")
    parser.add_argument("--kv_gib", type=float, default=None, help="KV cache; default what 60 %% of the card leave")
    parser.add_argument("--trainer", default=None, help="arguments of bench/experts_step.py, run on the same card")
    options = parser.parse_args()
    import torch
    from transformers import Qwen3MoeConfig
    from vllm import LLM

    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        sizes = QWEN3_30B_A3B | {"num_hidden_layers": options.layers}
        config = Qwen3MoeConfig(**sizes, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16")
        config.save_pretrained(folder / "model")
        routers = [f"model.layers.{number}.mlp.gate" for number in range(options.layers)]
        llm = LLM(
            model=str(folder / "model"),
            skip_tokenizer_init=True,
            load_format="dummy",
            quantization="fp8_per_channel",
            quantization_config={"ignore": routers},
            max_model_len=1024,
            max_num_seqs=256,
            gpu_memory_utilization=0.6,
            enable_prefix_caching=False,
            worker_extension_cls="experts_server.RandomCopy",
            **({"enable_return_routed_experts": True} if options.routing else {}),
            **({"kv_cache_memory_bytes": int(options.kv_gib * 2**30)} if options.kv_gib else {}),
        )
        speed(llm)
        found: dict[str, Any] = {"tok_s_before": [speed(llm) for _ in range(ROUNDS)]}
        print(found, flush=True)
        found |= llm.collective_rpc("random_copy")[0]
        linears = llm.apply_model(find_layers)[0]
        linears = [one for one in linears if not one.name.endswith("mlp.gate")]
        for rank in options.ranks:
            mb = write_adapter(folder / f"rank{rank}", linears, rank)
            rounds = []
            for _ in range(ROUNDS):
                started = time.perf_counter()
                (answer,) = llm.collective_rpc("remerge_stage", args=("one", str(folder / f"rank{rank}")))
                torch.cuda.synchronize()
                staged = time.perf_counter()
                (fold,) = llm.collective_rpc("remerge_activate", args=("one",))
                if "error" in answer or "error" in fold:
                    raise SystemExit(f"{answer} {fold}")
                rounds.append((1000 * (staged - started), 1000 * (time.perf_counter() - staged)))
                llm.collective_rpc("remerge_discard", args=("one",))
            read, fold = (statistics.median(times) for times in zip(*rounds, strict=True))
            found[f"rank {rank}"] = {"mb": mb, "read_ms": read, "fold_ms": fold, "rounds": rounds}
            print(f"rank {rank}: {mb:.0f} MB, read {read:.0f} ms, fold {fold:.0f} ms", flush=True)
        found["tok_s_after"] = [speed(llm) for _ in range(ROUNDS)]
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        options.out.write_text(json.dumps(found, indent=1))
        if options.trainer:
            torch.cuda.empty_cache()
            found["beside"] = beside(llm, options.trainer)
        options.out.write_text(json.dumps(found, indent=1))
        print(json.dumps({key: value for key, value in found.items() if not key.startswith("rank")}), flush=True)


if __name__ == "__main__":
    main()
