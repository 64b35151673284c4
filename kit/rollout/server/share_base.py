"""The server's half of `server.share_base`: a vLLM worker that lets a trainer map its base instead of loading one.

Loaded with `--worker-extension-cls kit.rollout.server.share_base.ShareBase`. The worker describes the memory of its
weights by their Hugging Face names (kit/weights/shared_memory.py): the FP8 codes and scales of each layer inside
vLLM's fused ones, biases, norms, embeddings. Nothing is copied on a GPU; on a CPU the weights move into a file in
memory once. vLLM never writes to them again: adapters are served unmerged.

Covers dense models in `fp8_per_channel` on one GPU, or on a CPU whose kernel keeps the codes as they are. vLLM stores
a layer's codes transposed, (in, out) with strides (1, in), and pads sizes to multiples of 16 for CUTLASS; a kernel
that repacks them (AMX with FP8, Marlin) is refused. Written for vllm 0.26 to 0.31.
"""

from typing import TYPE_CHECKING, Any

from kit.rollout.server.remerge import find_linears, language_model
from kit.rollout.server.shard import Linear
from kit.rollout.server.vllm_types import ModelRunner

if TYPE_CHECKING:
    import torch

SCALE = "weight_scale"


class ShareBase:
    """A method that vLLM adds to its worker; called through `collective_rpc`."""

    model_runner: ModelRunner  # the worker's

    def share_base(self) -> dict:
        """Describe the memory of the base; {"error": why} if its layout cannot be shared."""
        from kit.weights.shared_memory import describe, move_to_file

        try:
            model = language_model(self.model_runner.model)
            base_tensors(model, find_linears(model))  # a layout that is refused stays where it is
            if not hasattr(self, "_file"):
                self._file = move_to_file(model.parameters())
            return describe(base_tensors(model, find_linears(model)), self._file)
        except Exception as error:
            return {"error": f"its base cannot be shared: {type(error).__name__}: {error}"}


def base_tensors(model: "torch.nn.Module", linears: list[Linear]) -> "dict[str, torch.Tensor]":
    """Views of a worker's weights by the names that the trainer has for them: `<layer>.weight` (codes (out, in)) and
    `<layer>.weight_scale` ((out, 1) float32) of linear layers, other parameters under their own names.

    `ValueError` for a layer that is not stored as codes and one scale per output channel, and for several devices.
    """
    found: dict[str, Any] = {}
    fused = set()
    for linear in linears:
        fused |= {f"{linear.name}.{name}" for name in ("weight", SCALE, "bias")}
        codes, scale = stored_codes(linear)
        bias = getattr(linear.layer, "bias", None)
        for part in linear.parts:
            rows = slice(part.row, part.row + part.rows)
            found |= {f"{part.name}.weight": codes[rows], f"{part.name}.{SCALE}": scale[rows]}
            if bias is not None:
                found[f"{part.name}.bias"] = bias.data[rows]
    for name, parameter in model.named_parameters():
        name = name.replace(".base_layer.", ".")  # inside a LoRA layer
        if name not in fused and parameter.numel():
            found[name] = parameter.data
    if len(devices := {str(one.device) for one in found.values()}) > 1:
        raise ValueError(f"its weights are on {' and '.join(sorted(devices))}: start it without offloading")
    return found


def stored_codes(linear: Linear) -> "tuple[torch.Tensor, torch.Tensor]":
    """(codes (rows, columns) float8_e4m3fn, scale (rows, 1) float32) of a worker's linear layer, as views.

    `ValueError`, with the layout, for any other than that of vLLM's `fp8_per_channel`.
    """
    import torch

    weight, scale = linear.layer.weight.data, getattr(linear.layer, SCALE, None)
    is_transposed = weight.ndim == 2 and weight.stride(0) == 1 and weight.dtype == torch.float8_e4m3fn
    if scale is None or not is_transposed or weight.shape[0] < linear.columns or weight.shape[1] < linear.rows:
        raise ValueError(
            f"{linear.name} is stored as {weight.dtype} {tuple(weight.shape)} with strides {weight.stride()}, where "
            f"FP8 codes ({linear.columns}, {linear.rows}) with strides (1, {linear.columns}) were expected: this "
            "kernel of vLLM has a layout of its own"
        )
    if scale.dtype != torch.float32 or scale.numel() < linear.rows:
        raise ValueError(
            f"{linear.name} has {scale.numel()} scales in {scale.dtype} for {linear.rows} output channels. Set "
            "server.weights to fp8_per_channel"
        )
    return weight.t()[: linear.rows, : linear.columns], scale.data.reshape(-1, 1)[: linear.rows]
