"""Remerge into weights that vLLM repacks for its kernels, on one GPU from compute capability 7.5 on: FP8 for Marlin's
(W8A16), INT4 for Marlin's and for those that vLLM chooses here, on Hopper Machete's (W4A16).

    python bench/marlin_check.py               # half a minute
    python bench/marlin_check.py --kinds w4a16 w4a16_marlin

For each kind, in BF16 (where the GPU has it) and FP16, with and without bias: folds a weight into a loaded layer and
compares every parameter with those of a fresh load, bit for bit, and the layer's output with the product of the
weight that it holds. A fresh load of W4A16 is that of the codes and scales that `python -m merge` stores. Prints ms
and peak bytes per weight of a fold. Exit 1 if a case differs.

In a run, forced on a GPU that multiplies FP8 (compare `sampler_k3` in metrics.jsonl with and without the flag):

    python -m launch.up --config recipes/configs/grpo-qwen3_8b-nf4-fp8-gsm8k-2gpu.yaml \
        --server.weights fp8_per_tensor --server.force_w8a16 true --train.max_steps 3
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.core.cards import generation
from kit.core.formats import FORMATS, QuantFormat, fitted

SHAPE = (24576, 4096)  # (out, in) of gate and up of Qwen3-8B, fused
OFF = 0.1, 0.02  # largest error of an output, relative to the largest: of FP8 weights, of INT4's own numbers
FP8, INT4 = ("fp8_per_tensor", "fp8_per_block"), ("w4a16", "w4a16_marlin")


def make_layer(kind: str, shape: tuple[int, int], dtype: torch.dtype, bias: torch.Tensor | None) -> torch.nn.Module:
    """A layer of vLLM before its weight (out, in) is loaded, with its kernel: Marlin's, of `w4a16` vLLM's choice."""
    return (make_fp8 if kind in FP8 else make_int4)(kind, shape, dtype, bias)


def make_int4(kind: str, shape: tuple[int, int], dtype: torch.dtype, bias: torch.Tensor | None) -> torch.nn.Module:
    from vllm.model_executor import parameter
    from vllm.model_executor.kernels.linear import MarlinLinearKernel
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsLinearMethod,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16 as wna16

    parameter.get_tensor_model_parallel_rank, parameter.get_tensor_model_parallel_world_size = (lambda: 0), (lambda: 1)
    layer: Any = torch.nn.Module()
    group = int4_format(shape[1]).weight.block[1]
    layer.scheme = wna16.CompressedTensorsWNA16(strategy="group", num_bits=4, group_size=group, layer_name="")
    layer.quant_method, layer.tp_size = CompressedTensorsLinearMethod(None), 1
    layer.output_size, layer.input_size = shape
    choose = wna16.choose_mp_linear_kernel
    if kind == "w4a16_marlin":
        wna16.choose_mp_linear_kernel = lambda _: MarlinLinearKernel
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            layer.quant_method.create_weights(layer, shape[1], [shape[0]], shape[1], shape[0], dtype)
    finally:
        wna16.choose_mp_linear_kernel = choose
    layer.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias.clone(), requires_grad=False))
    return layer


def make_fp8(kind: str, shape: tuple[int, int], dtype: torch.dtype, bias: torch.Tensor | None) -> torch.nn.Module:
    from vllm.model_executor.kernels.linear.scaled_mm import MarlinFP8ScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.layers.quantization.online import fp8

    method_class, key = {
        "fp8_per_tensor": (fp8.Fp8PerTensorOnlineLinearMethod, fp8.kFp8StaticTensorSym),
        "fp8_per_block": (fp8.Fp8PerBlockOnlineLinearMethod, fp8.kFp8Static128BlockSym),
    }[kind]
    rows, columns = shape
    facts = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=key,
        activation_quant_key=fp8.kFp8DynamicTokenSym,
        weight_shape=shape,
        input_dtype=dtype,
        out_dtype=dtype,
    )
    method: Any = object.__new__(method_class)  # its constructor would choose this GPU's own kernel
    names = ["weight", "weight_scale", "input_scale", "input_scale_ub"]
    method.fp8_linear = MarlinFP8ScaledMMLinearKernel(facts, names)
    method.use_marlin, method.marlin_input_dtype, method.weight_block_size = True, None, [128, 128]
    layer: Any = torch.nn.Module()
    layer.quant_method, layer.orig_dtype, layer.tp_size = method, dtype, 1
    layer.input_size = layer.input_size_per_partition = columns
    layer.output_size = layer.output_size_per_partition = rows
    layer.logical_widths = [rows // 2, rows // 2]
    layer.weight_block_size = [128, 128] if kind == "fp8_per_block" else None
    layer.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias.clone(), requires_grad=False))
    return layer


def load(layer: Any, weight: torch.Tensor) -> torch.nn.Module:
    """Give a layer its weight as vLLM does when it loads a checkpoint."""
    if hasattr(layer, "scheme"):
        from merge.quantize import store

        stored = store(int4_format(weight.shape[1]), weight.to(torch.bfloat16), lambda *_: None)
        layer.weight_packed.data, layer.weight_scale.data = (
            stored["weight_packed"].to(weight.device),
            stored["weight_scale"].to(weight.device, layer.params_dtype),
        )
        layer.weight_shape.data = stored["weight_shape"].to(layer.weight_shape)  # vLLM's begins as it finds the memory
    else:
        layer.register_parameter("weight", torch.nn.Parameter(weight.clone(), requires_grad=False))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def int4_format(columns: int) -> QuantFormat:
    return fitted(FORMATS["w4a16"], [columns])


def held_weight(kind: str, merged: torch.Tensor) -> torch.Tensor:
    """Reference weight of the layer's product: the merged weight, rounded to INT4 for W4A16."""
    from kit.weights.quantize import fake_quantize_weight

    if kind not in INT4:
        return merged
    return fake_quantize_weight(merged.to(torch.bfloat16), int4_format(merged.shape[1]))


def fold_check(kind: str, dtype: torch.dtype, has_bias: bool) -> tuple[bool, str]:
    """Whether a fold on the GPU is what a fresh load packs, and a line of figures."""
    from kit.rollout.server.remerge import write_weight

    rows, columns = SHAPE
    first, merged = (0.03 * torch.randn(rows, columns, device="cuda", dtype=dtype) for _ in range(2))
    bias = torch.randn(rows, device="cuda", dtype=dtype) if has_bias else None
    layer: Any = load(make_layer(kind, SHAPE, dtype, bias), first)
    write_weight(layer, merged.clone())  # compiles what is compiled
    torch.cuda.synchronize()
    held, started = torch.cuda.memory_allocated(), time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    write_weight(layer, merged)
    torch.cuda.synchronize()
    took, peak = time.perf_counter() - started, torch.cuda.max_memory_allocated() - held
    fresh = dict(load(make_layer(kind, SHAPE, dtype, bias), merged).named_parameters())
    other = [name for name, one in layer.named_parameters() if not torch.equal(one, fresh[name])]
    x = torch.randn(32, columns, device="cuda", dtype=dtype)
    held = held_weight(kind, merged).float()
    exact = torch.nn.functional.linear(x.float(), held, None if bias is None else bias.float())
    found = layer.quant_method.apply(layer, x, layer.bias).float()
    off = ((found - exact).abs().max() / exact.abs().max()).item()
    kernel = layer.scheme.kernel if kind in INT4 else layer.quant_method.fp8_linear
    ok = not other and off < OFF[kind in INT4]
    bits = f"OTHER BITS of {', '.join(other)}" if other else "same bits"
    told = f"{type(kernel).__name__}, {bits}, output {off:.3f} off"
    told += f", fold {1e3 * took:.1f} ms"
    return ok, f"{told}, {peak / merged.numel():.1f} bytes a weight beside the merged one"


def main() -> int:
    from vllm.config import VllmConfig, set_current_vllm_config

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--kinds", nargs="+", choices=(*FP8, *INT4), default=[*FP8, *INT4])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU; tests/unit/test_marlin.py checks the same on a CPU")
        return 2
    dtypes = [torch.bfloat16, torch.float16]
    if "bfloat16" not in generation(torch.cuda.get_device_capability()).dtypes:
        dtypes.remove(torch.bfloat16)
    failed = 0
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        for kind in options.kinds:
            for dtype in dtypes:
                for has_bias in (False, True):
                    ok, line = fold_check(kind, dtype, has_bias)
                    failed += not ok
                    print(f"{kind} {dtype} bias {has_bias}: {line}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
