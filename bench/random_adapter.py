"""A random adapter on every weight that a base has quantized, in peft's file format, and the weights that it makes."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

PREFIX = "base_model.model."
RANK, ALPHA = 4, 8


def random_adapter(
    weights: dict[str, torch.Tensor], names: list[str], size_a: float, size_b: float
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return (an adapter's tensors, {name: weight with its update, in BF16}) for the weights `names` (out, in).

    Per expert matrices become peft's stacked factors of fused experts: gate and up share A.
    """
    generator = torch.Generator(next(iter(weights.values())).device).manual_seed(1)

    def draw(*shape: int, size: float) -> torch.Tensor:
        value = torch.randn(*shape, device=generator.device, generator=generator)
        return (value * size).bfloat16()

    factors: dict[str, torch.Tensor] = {}
    merged: dict[str, torch.Tensor] = {}

    def update(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        merged[name] = (weights[name].float() + ALPHA / RANK * (b.float() @ a.float())).bfloat16()

    for name in (name for name in names if ".experts." not in name):
        rows, columns = weights[name].shape
        a, b = draw(RANK, columns, size=size_a), draw(rows, RANK, size=size_b)
        update(name, a, b)
        module = f"{PREFIX}{name.removesuffix('.weight')}"
        factors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    modules = sorted({name.partition(".experts.")[0] + ".experts" for name in names if ".experts." in name})
    for module in modules:
        count = len({name.split(".experts.")[1].partition(".")[0] for name in names if name.startswith(f"{module}.")})
        for key, parts in ((f"{module}.base_layer", ("gate_proj", "up_proj")), (module, ("down_proj",))):
            rows, columns = weights[f"{module}.0.{parts[0]}.weight"].shape
            a = draw(count, RANK, columns, size=size_a)
            b = draw(len(parts) * rows, RANK, count, size=size_b)
            for expert in range(count):
                for number, part in enumerate(parts):
                    mine = b[number * rows : (number + 1) * rows, :, expert]
                    update(f"{module}.{expert}.{part}.weight", a[expert], mine)
            factors[f"{PREFIX}{key}.lora_A.weight"] = a.reshape(count * RANK, columns)
            factors[f"{PREFIX}{key}.lora_B.weight"] = b.reshape(len(parts) * rows, RANK * count)
    return factors, merged


def save_adapters(factors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the adapter to `adapter`, and one that changes nothing to `zero`."""
    zero = {name: value * 0 if "lora_B" in name else value for name, value in factors.items()}
    config = {"r": RANK, "lora_alpha": ALPHA}
    if any(".experts." in name for name in factors):
        config["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    for place, tensors in (("adapter", factors), ("zero", zero)):
        (folder / place).mkdir()
        save_file(tensors, folder / place / "adapter_model.safetensors", {"format": "pt"})
        (folder / place / "adapter_config.json").write_text(json.dumps(config))
