"""One card: memory and seconds of the policy update of a mixture of experts, and what a step spends in the experts.

    python bench/experts_step.py --out step.json                       # Qwen3-30B-A3B's shape, NF4, random weights
    python bench/experts_step.py --expert_ranks 0 4 8 --out step.json  # by the rank of the adapter on experts
    python bench/experts_step.py --stock --layers 4 --out step.json    # BF16 base and peft's own wrappers, few layers
    python bench/experts_step.py --rehearse --out step.json            # the same path on a CPU, tiny

A step is forward, backward and AdamW, loss the mean log-prob of the completions, without a reference; median of 3
after 2 warm-ups. Adapter: rank 16 on attention, float32. One further step is profiled for the seconds by kind of
kernel. `--stock` keeps transformers' experts in BF16 and peft's wrappers, which write the updated experts at every
forward; `--layers` shortens the model, and the seconds are of that many layers. Exit 1 if a case failed for any reason
but memory.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parent))

import torch

from kit.core.config.load import load_config

CONFIG = Path(__file__).parents[1] / "recipes" / "configs" / "grpo-tiny-nf4-cpu.yaml"
WARM_UP, STEPS = 2, 3
QWEN3_30B_A3B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}
TINY = QWEN3_30B_A3B | {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 8}
TINY |= {"num_experts_per_tok": 2}


class Case:
    """A built model and its training step."""

    def __init__(self, options: argparse.Namespace, folder: Path, expert_rank: int, levers: dict[str, Any]):
        from peft import get_peft_model
        from trl.trainer.utils import add_fused_lm_head

        from kit.policy.adapted_experts import targets_as_named, use_adapted_experts
        from kit.policy.fused_linear import use_fused_linears
        from kit.policy.load import lora_config, set_adapter_dtype
        from kit.policy.recompute import use_recompute

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.rows, self.length = options.batch
        keys = {"model.path": folder, "model.dtype": str(self.dtype).removeprefix("torch."), "policy.lora_rank": 16}
        keys |= {"policy.expert_rank": expert_rank, "train.recompute": "full"} | levers
        self.config = load_config(CONFIG, [f"--{key}={value}" for key, value in keys.items()])
        torch.manual_seed(0)
        base = self.stock() if options.stock else self.ours()
        add_fused_lm_head(base, outputs=("log_probs", "entropy"))
        with targets_as_named():
            self.model = get_peft_model(base, lora_config(self.config.policy, base))
        set_adapter_dtype(self.model, "float32")
        if options.stock:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            use_adapted_experts(self.model)
            if self.config.policy.compute != "plain":
                use_fused_linears(self.model, self.config.policy.compute)
            use_recompute(self.model, self.config)
            self.model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
        self.model.enable_input_require_grads()
        self.model.train()
        self.trained = [one for one in self.model.parameters() if one.requires_grad]
        for name, one in self.model.named_parameters():
            if ".lora_B." in name:  # with zero, A has no gradient
                torch.nn.init.normal_(one, std=1e-3)
        self.ids = torch.randint(0, base.config.vocab_size, (self.rows, self.length), device=self.device)

    def ours(self) -> torch.nn.Module:
        from memory_child import random_nf4

        return random_nf4(self.config, 0.1)

    def stock(self) -> torch.nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(self.config.model.path), dtype=self.dtype
            )
        return model.requires_grad_(False)

    def step(self, optimizer: torch.optim.Optimizer) -> float:
        started = time.perf_counter()
        labels = self.ids.clone()
        labels[:, : self.length // 5] = -100
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
            logps = self.model(input_ids=self.ids, labels=labels, fused_lm_head=True).log_probs
        (-logps.float().mean()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def measure(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.trained, lr=1e-5, weight_decay=0.0, fused=self.device == "cuda")
        found: dict[str, Any] = {"trained_m": sum(one.numel() for one in self.trained) / 1e6}
        if self.device == "cuda":
            found["loaded_gib"] = torch.cuda.memory_allocated() / 2**30
        for _ in range(WARM_UP):
            self.step(optimizer)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found["step_s"] = statistics.median(self.step(optimizer) for _ in range(STEPS))
        found["tok_s"] = self.rows * self.length / found["step_s"]
        if self.device == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            found["kernels_s"] = kernels(lambda: self.step(optimizer))
        return found


# Kinds of kernels by what their names contain, first match first.
KINDS = {
    "grouped products": ("grouped", "GroupProblemShape", "GroupedGemm", "gemm_grouped"),
    "dequantization": ("dequantize", "Dequantize", "kDequant"),
    "attention": ("flash", "attention", "fmha", "cudnn_generated"),
    "other products": ("gemm", "nvjet", "cutlass", "sgemm", "xmma"),
    "sorting, gathering": ("index", "sort", "gather", "scatter", "Radix", "bincount", "histogram"),
}


def kernels(step: Any) -> dict[str, float]:
    """Seconds of a step by kind of kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
    found: dict[str, float] = {}
    others: dict[str, float] = {}
    for event in trace.key_averages():
        seconds = event.self_device_time_total / 1e6
        kind = next((kind for kind, parts in KINDS.items() if any(part in event.key for part in parts)), "other")
        found[kind] = found.get(kind, 0.0) + seconds
        if kind == "other":
            others[event.key[:90]] = others.get(event.key[:90], 0.0) + seconds
    largest = dict(sorted(others.items(), key=lambda pair: -pair[1])[:6])
    return found | {f"  other: {name}": seconds for name, seconds in largest.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--expert_ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--levers", type=json.loads, default={}, help="keys of the configuration, as JSON")
    parser.add_argument("--batch", type=lambda text: [int(part) for part in text.split("x")], default=[8, 1274])
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if options.rehearse:
        options.batch = [2, 32]
    sizes = dict(TINY if options.rehearse else QWEN3_30B_A3B)
    if options.layers:
        sizes["num_hidden_layers"] = options.layers
    failed, rows = 0, {}
    with tempfile.TemporaryDirectory() as folder:
        from transformers import Qwen3MoeConfig

        Qwen3MoeConfig(**sizes).save_pretrained(folder)
        for rank in options.expert_ranks:
            name = f"{'stock BF16' if options.stock else 'NF4'}, expert rank {rank}"
            try:
                case = Case(options, Path(folder), rank, options.levers)
                rows[name] = case.measure()
                del case
            except torch.OutOfMemoryError as error:
                rows[name] = {"error": str(error).splitlines()[0]}
            except Exception as error:
                rows[name], failed = {"error": f"{type(error).__name__}: {error}"}, 1
            gc.collect()
            torch.cuda.empty_cache()
            options.out.write_text(json.dumps({"sizes": sizes, "batch": options.batch, "rows": rows}, indent=1))
            print(name, json.dumps(rows[name], indent=1), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
