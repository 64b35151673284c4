"""Remerge where vLLM repacks weights for its kernels: FP8 for Marlin (W8A16), INT4 for Marlin and for its CPU kernel
(W4A16). A fold is bit-equal to a fresh load of the merged weight, of INT4 to one of what `python -m merge` stores.

vLLM's own loading code runs; its two CUDA kernels are replaced by the definitions that vLLM tests them against.
"""

import pytest
import torch

from bench.marlin_check import FP8, INT4, held_weight, load, make_layer
from kit.core.cards import GENERATIONS, W4A16, W8A8, W8A16
from kit.core.processor import INPUTS_IN_16_BITS
from kit.rollout.server.amx import allow_amx
from kit.rollout.server.remerge import linear_product, write_weight
from tests import int4_kernel

E4M3 = torch.float8_e4m3fn
SHAPE = (128, 192)  # Marlin pads 192 inputs to 256; INT4 has groups of 64 in them


@pytest.fixture(scope="module", autouse=True)
def marlin_on_a_cpu():
    """Marlin's repack and the FP8 rounding in PyTorch."""
    from vllm import _custom_ops as ops
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels.linear.scaled_mm import MarlinFP8ScaledMMLinearKernel
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import get_weight_perm, marlin_weights

    def repack(b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, **_: object) -> torch.Tensor:
        shifts = num_bits * torch.arange(32 // num_bits)[None, :, None]
        codes = (b_q_weight[:, None, :] >> shifts & 2**num_bits - 1).view(size_k, size_n)
        return marlin_weights(codes, size_k, size_n, num_bits, get_weight_perm(num_bits))

    def quantize(weight: torch.Tensor, scale: torch.Tensor) -> tuple:
        return (weight.float() / scale).clamp(-448, 448).to(E4M3), scale

    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(VllmConfig()):
        for name, value in INPUTS_IN_16_BITS.items():
            patch.setenv(name, value)
        allow_amx()
        patch.setattr(ops, "gptq_marlin_repack", repack, raising=False)
        patch.setattr(ops, "scaled_fp8_quant", quantize)
        patch.setattr(MarlinFP8ScaledMMLinearKernel, "is_supported", classmethod(lambda *_: (True, None)))
        yield


def weight_of(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return (0.03 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [*FP8, *INT4])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_fold_is_what_a_fresh_load_of_the_merged_weight_packs(kind, dtype, has_bias):
    bias = torch.arange(SHAPE[0]).to(dtype) if has_bias else None
    layer, fresh = (make_layer(kind, SHAPE, dtype, bias) for _ in range(2))
    load(layer, weight_of(1, dtype))
    before = {name: one.clone() for name, one in layer.named_parameters()}
    places = {name: one.data_ptr() for name, one in layer.named_parameters()}
    merged = weight_of(2, dtype)
    for _ in range(2):  # the second fold finds what the first left
        write_weight(layer, merged.clone())
    found, expected = dict(layer.named_parameters()), dict(load(fresh, merged).named_parameters())
    codes = "weight_packed" if kind in INT4 else "weight"
    assert found.keys() == expected.keys() and found[codes].dtype == torch.int32
    assert all(torch.equal(one, expected[name]) for name, one in found.items() if name != "weight_shape")
    assert {name: one.data_ptr() for name, one in found.items()} == places  # CUDA graphs read these addresses
    assert not torch.equal(found[codes], before[codes])
    write_weight(layer, weight_of(1, dtype))
    assert all(torch.equal(one, before[name]) for name, one in layer.named_parameters())
    assert linear_product([layer]) == (W4A16 if kind in INT4 else W8A16)


def test_a_fold_multiplies_by_the_numbers_of_the_format(monkeypatch):
    """vLLM's CPU kernel, or its definition where the processor lacks it, on what vLLM packed for it."""
    int4_kernel.install(monkeypatch.setattr)
    layer = load(make_layer("w4a16", SHAPE, torch.bfloat16, None), weight_of(1, torch.bfloat16))
    write_weight(layer, merged := weight_of(2, torch.bfloat16))
    found = layer.quant_method.apply(layer, torch.eye(SHAPE[1], dtype=torch.bfloat16)).T
    assert torch.equal(found, held_weight("w4a16", merged)), "the product with the unit matrix is the weight"


def test_a_fold_keeps_the_scratch_tensor_of_older_kernels(monkeypatch):
    """vLLM 0.26 gives a layer a `workspace`, whose address is in CUDA graphs; 0.31 has none."""
    layer = make_layer(FP8[0], SHAPE, torch.bfloat16, None)
    loading = layer.quant_method.process_weights_after_loading

    def with_workspace(some: torch.nn.Module) -> None:
        loading(some)
        some.workspace = torch.zeros(8, dtype=torch.int32)

    monkeypatch.setattr(layer.quant_method, "process_weights_after_loading", with_workspace)
    scratch = load(layer, weight_of(1, torch.bfloat16)).workspace
    write_weight(layer, weight_of(2, torch.bfloat16))
    assert layer.workspace is scratch


def test_a_fold_keeps_the_scratch_tensor_inside_an_older_kernel(monkeypatch):
    """vLLM 0.26 gives the kernel object of a W4A16 layer its `workspace`, anew each time it repacks."""
    layer = make_layer("w4a16_marlin", SHAPE, torch.bfloat16, None)
    loading = type(layer.scheme.kernel).process_weights_after_loading

    def with_workspace(kernel: object, some: torch.nn.Module) -> None:
        loading(kernel, some)
        kernel.workspace = torch.zeros(8, dtype=torch.int32)

    monkeypatch.setattr(type(layer.scheme.kernel), "process_weights_after_loading", with_workspace)
    scheme, kernel = layer.scheme, layer.scheme.kernel
    scratch = load(layer, weight_of(1, torch.bfloat16)).scheme.kernel.workspace
    write_weight(layer, weight_of(2, torch.bfloat16))
    assert layer.scheme is scheme and scheme.kernel is kernel and kernel.workspace is scratch


def test_vllm_chooses_the_products_of_the_table(monkeypatch):
    """From its own list of kernels in its own order, given which of them a GPU of each capability can run."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.platforms import PlatformEnum, current_platform

    first = {"MarlinFP8": 75, "CutlassFP8Scaled": 89, "PerTensorTorch": 89, "ChannelWiseTorch": 89, "TritonFp8": 75}
    first |= {"CutlassFp8Block": 90, "DeepGemm": 90}
    lists = {"fp8_per_block": linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]}
    lists["fp8_per_tensor"] = lists["fp8_per_channel"] = linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CUDA]
    keys = {"fp8_per_block": fp8.kFp8Static128BlockSym, "fp8_per_tensor": fp8.kFp8StaticTensorSym}
    keys |= {"fp8_per_channel": fp8.kFp8StaticChannelSym}
    for row in (row for row in GENERATIONS if row.is_covered):
        number = 10 * row.capability[0] + row.capability[1]
        for kernel in {*lists["fp8_per_block"], *lists["fp8_per_tensor"]}:
            runs = any(kernel.__name__.startswith(name) and number >= least for name, least in first.items())
            monkeypatch.setattr(kernel, "is_supported", classmethod(lambda *_, runs=runs: (runs, "")))
            monkeypatch.setattr(kernel, "can_implement", classmethod(lambda *_: (True, None)))
        for weights, kernels in lists.items():
            chosen = linear.choose_scaled_mm_linear_kernel(
                keys[weights], {current_platform._enum: kernels}, number, quantization="fp8_w8a8"
            )
            product = W8A16 if chosen.__name__.startswith("Marlin") else W8A8
            if weights == "fp8_per_channel" and product == W8A16:
                assert weights not in row.served, "vLLM raises: its inputs would stay in 16 bits"
            else:
                assert row.served[weights] == product, (row.number, weights, chosen.__name__)
