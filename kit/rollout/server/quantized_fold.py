"""`server.quant_cfg`: a rollout server's weights quantized to a deployment format, Q(dequantize(NF4) + s·B·A).

Every Hugging Face layer of a worker is quantized as defined in `kit/weights/quantize.py`, which is what
`python -m merge` writes. There are two ways to serve the result:

- BF16 weights that hold the quantized numbers (w4a16, nvfp4a16, nvfp4, fp8_static): what a reader of the exported
  checkpoint computes with. Formats with static activations also quantize the inputs (`quantized_inputs.py`).
- vLLM's own FP8 (fp8, fp8_block), which also quantizes the activations. By itself it would use float32 scales where
  the export has BF16 ones. So it gets the quantized numbers in float32: the largest of every block is 448 times the
  exported scale, which leads it to the exported scales and codes.

If a weight is split over workers, its scale is that of the whole weight: the workers take the maximum of their peaks.
Imports torch and vLLM inside functions.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.core.checkpoint_files import read_header
from kit.core.formats import TRAINED, QuantFormat
from kit.core.limits import FOLD_CHUNK
from kit.core.run_files import find_fault, parse
from kit.rollout.protocol import INPUT_PEAKS, QUANT_CFG, WEIGHTS
from kit.rollout.server.packed_layers import weights_of

if TYPE_CHECKING:
    import torch

    from kit.rollout.server.shard import Linear


def format_of(vllm_config: Any) -> QuantFormat | None:
    """Format that a server was started for; `ValueError` if its weights are stored as another format's."""
    name = (getattr(vllm_config, "additional_config", None) or {}).get(QUANT_CFG)
    if name is None:
        return None
    if name not in TRAINED:
        raise ValueError(f"--additional-config names the format {name!r}, not one of {', '.join(TRAINED)}")
    fmt, held = TRAINED[name], weights_of(vllm_config.model_config) or "bf16"
    if held not in fmt.servers:
        raise ValueError(f"{name} is served as {' or '.join(fmt.servers)}, the server was started as {held}")
    return fmt


def check(linears: "list[Linear]", fmt: QuantFormat) -> None:
    """`ValueError` if this worker's shards cannot have the scales of the whole weights."""
    for linear in linears:
        for part in linear.parts:
            sizes = ((part.rows, part.first_out), (linear.columns, part.first_in))
            for (size, first), block, what in zip(sizes, fmt.weight.block, ("outputs", "inputs"), strict=True):
                if block and (size % block or first % block):
                    raise ValueError(
                        f"{part.name} has {size} {what} from {first} on here, and {fmt.name} has a scale for every "
                        f"{block} of them. Lower server.tensor_parallel, or use another format"
                    )
        if fmt.by_vllm and linear.layer.tp_size > 1 and not _vllm_compares_shards():
            raise ValueError(
                f"this vLLM takes the FP8 scales of each shard for itself, so {fmt.name} would be other numbers. Set "
                "server.tensor_parallel to 1, or install vLLM 0.31"
            )
        if fmt.needs_calibration and not hasattr(linear.layer, "input_peak"):
            raise ValueError(
                f"{linear.name} does not quantize its inputs, as {fmt.name} does. Start the server with "
                "--worker-extension-cls kit.rollout.server.quantized_inputs.RemergeQuantizedInputs"
            )


def _vllm_compares_shards() -> bool:
    from vllm.model_executor.layers.quantization.utils import quant_utils

    return hasattr(quant_utils, "amax_for_tp_weight_quant")


def quantized(linear: "Linear", weight: "torch.Tensor", fmt: QuantFormat, dtype: "torch.dtype") -> "torch.Tensor":
    """Fake-quantize a worker's merged weight (rows, columns) to `fmt`, in `dtype`, or in float32 if vLLM quantizes it.

    Every worker calls this for the same layers in the same order.
    """
    import torch

    from kit.weights.quantize import weight_peak

    # Merging rounds to BF16, whatever dtype the trainer computes in, and quantizes that.
    weight = weight.to(torch.bfloat16)
    value = torch.empty(weight.shape, dtype=torch.float32 if fmt.by_vllm else dtype, device=weight.device)
    shards = [slice(part.row, part.row + part.rows) for part in linear.parts]
    peaks = [weight_peak(weight[rows], fmt) for rows in shards]
    if peaks[0] is not None:
        if fmt.shares_peak:
            peaks = [torch.stack(peaks).amax(0)] * len(peaks)
        if linear.layer.tp_size > 1:
            peaks = [_largest_of_workers(peak, linear.layer) for peak in peaks]
    for rows, peak in zip(shards, peaks, strict=True):
        quantize_rows(weight[rows], fmt, peak, out=value[rows])
    return value


def _largest_of_workers(peak: "torch.Tensor", layer: Any) -> "torch.Tensor":
    """Peak of the whole weight. Per-channel peaks need a reduction only if the weight is split by inputs."""
    is_cut = layer.input_size != getattr(layer, "input_size_per_partition", layer.input_size)
    return _largest(peak.clone()) if peak.numel() == 1 or is_cut else peak


def _largest(peak: "torch.Tensor") -> "torch.Tensor":
    """Reduce to the maximum over all workers, in place."""
    import torch
    from vllm.distributed import get_tp_group

    torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX, group=get_tp_group().device_group)
    return peak


def quantize_rows(weight: "torch.Tensor", fmt: QuantFormat, peak: "torch.Tensor | None", out: "torch.Tensor") -> None:
    """Write a weight (rows, columns) with this peak, fake-quantized to `fmt`, to `out`, some rows at a time."""
    from kit.weights.quantize import fake_quantize_weight

    step = fmt.weight.block[0] or 1
    count = max(step, FOLD_CHUNK // weight.shape[1] // step * step)
    for start in range(0, len(weight), count):
        rows = slice(start, start + count)
        own = peak[rows] if peak is not None and peak.ndim == 2 else peak
        out[rows] = fake_quantize_weight(weight[rows].to(out.dtype), fmt, own)


def read_input_peaks(directory: Path, linears: "list[Linear]") -> dict[str, float]:
    """Read {layer: largest |input|} from an adapter's file; `ValueError` unless it has every layer of the worker."""
    peaks = parse(read_header(directory / WEIGHTS).metadata.get(INPUT_PEAKS, "{}").encode())
    if fault := find_fault(peaks, dict[str, float]):
        raise ValueError(f"{INPUT_PEAKS} of {directory / WEIGHTS} cannot be read: {fault}")
    names = [part.name for linear in linears for part in linear.parts]
    if missing := [name for name in names if peaks.get(name, 0) <= 0]:
        raise ValueError(
            f"{len(missing)} of {len(names)} layers have no range of their inputs from calibration, first {missing[0]}"
        )
    return peaks


def set_input_peak(linear: "Linear", peaks: dict[str, float]) -> None:
    """Set the range by which the layer quantizes its inputs, in place; 0 leaves inputs unquantized. Fused layers have
    one input and use the largest of their calibrated peaks."""
    if hasattr(linear.layer, "input_peak"):
        linear.layer.input_peak.fill_(max(peaks.get(part.name, 0.0) for part in linear.parts))
