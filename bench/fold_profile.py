"""Time of a remerge inside the worker: reading the adapter, the fold, the quantization, the kernel launches.

    python bench/fold_profile.py --work /tmp/rollout8b     # after rollout_8b.py made the model and its base there

One engine in this process on the 8B shape's dequantized base, no trainer and no HTTP. Prints medians of five in ms and
PyTorch's profile of one activation. Needs CUDA and vllm.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from kit.rollout.server.remerge import Remerge, _vllm_context, merged_weights, write_weight


class Profiled(Remerge):
    """The worker extension with timers."""

    def fold_only(self, key: str) -> dict:
        """Compute the merged weights and drop them."""
        return self._clocked(lambda linear, weight: None, key)

    def fold_and_write(self, key: str) -> dict:
        return self._clocked(lambda linear, weight: write_weight(linear.layer, weight), key)

    def _clocked(self, use, key: str) -> dict:
        import torch

        state, begin, end = self._remerge, torch.cuda.Event(True), torch.cuda.Event(True)
        torch.cuda.synchronize()
        started = time.perf_counter()
        begin.record()
        with torch.inference_mode(), _vllm_context(self):
            for linear, weight in merged_weights(state, state.staged[key].factors, self.device):
                use(linear, weight)
        launched = time.perf_counter()
        end.record()
        torch.cuda.synchronize()
        return {
            "launches": 1e3 * (launched - started),
            "wall": 1e3 * (time.perf_counter() - started),
            "gpu": begin.elapsed_time(end),
        }

    def fold_tables(self, key: str) -> dict:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            self.remerge_activate(key)
        table = found.key_averages()
        return {
            "gpu": table.table(sort_by="self_cuda_time_total", row_limit=8, max_name_column_width=60),
            "cpu": table.table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=60),
        }


def write_adapter(base: Path, directory: Path, rank: int) -> None:
    """Write a random adapter for every layer that has an NF4 copy."""
    import torch
    from safetensors.torch import save_file

    from kit.rollout.server.adapter_check import checkpoint_shapes

    shapes, factors = checkpoint_shapes(base), {}
    for name in json.loads((base / "nf4" / "index.json").read_text()):
        module = name.removesuffix(".weight")
        rows, columns = shapes[module]
        factors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, columns).mul_(0.02).bfloat16()
        factors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, rank).mul_(0.002).bfloat16()
    directory.mkdir(exist_ok=True)
    save_file(factors, directory / "adapter_model.safetensors", {"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 2 * rank}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=Path("/tmp/rollout8b"))
    parser.add_argument("--weights", default="fp8_per_channel")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--copy", choices=("gpu", "host"), default="gpu")
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    base, adapter = options.work / "base", options.work / "random-adapter"
    write_adapter(base, adapter, options.rank)
    quantization = {} if options.weights == "bf16" else {"quantization": options.weights}
    llm = LLM(
        model=str(base),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=16,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        worker_extension_cls="fold_profile.Profiled",
        **quantization,
    )

    def call(method: str, *arguments: str) -> dict:
        (answer,) = llm.collective_rpc(method, args=arguments)
        if "error" in answer:
            raise SystemExit(answer["error"])
        return answer

    call("remerge_setup", str(base), options.copy)
    print(f"{options.weights}, rank {options.rank}, NF4 copy on {options.copy}, ms, median of 5:")
    for method in ("remerge_stage", "fold_only", "fold_and_write", "remerge_activate"):
        rows = []
        for _ in range(6):
            arguments = ("one", str(adapter)) if method == "remerge_stage" else ("one",)
            started = time.perf_counter()
            answer = call(method, *arguments)
            parts = {key: value for key, value in answer.items() if key in ("launches", "wall", "gpu")}
            rows.append(parts | {"call": 1e3 * (time.perf_counter() - started)})
        medians = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
        print(f"{method:<18}" + ", ".join(f"{key} {value:.1f}" for key, value in medians.items()))
    tables = call("fold_tables", "one")
    print(tables["gpu"], tables["cpu"], sep="\n")


if __name__ == "__main__":
    main()
