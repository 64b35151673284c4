"""`policy.quant_cfg` on one GPU: gradients of every format, milliseconds and memory of a decoder layer's products.

    python bench/qat_check.py               # on one GPU; --part errors: no clock
    python bench/qat_check.py --rehearse    # small shapes on a CPU

errors: outputs and gradients of q, k and v with one input against autograd through full-size float32 weights, each
quantized by the reference implementations in PyTorch, straight-through (kit/weights/quantize.py). block: the seven
linear layers of a Qwen3-8B decoder layer, forward and backward, LoRA of rank 16 in float32 on all, autocast, by peft's
path and in every format; with the weights' peaks known, as they are except once per optimizer step, and without.

A failed case is reported and the others continue. The tables come last; exit 1 when a bound is missed.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.linear_check import SHAPES, adapted, run_block
from bench.linear_kernels import case, make_layer, relative, run_parts

SMALL = {"q_proj": (256, 256), "k_proj": (128, 256), "v_proj": (128, 256), "o_proj": (256, 256)}
SMALL |= {"gate_proj": (512, 256), "up_proj": (512, 256), "down_proj": (256, 512)}
PARTS = ("errors", "block")
PEAK = 4.5  # of static inputs; some values of a normal distribution exceed it
MOST_ERROR = 0.02  # relative, of BF16 products of equal numbers
MOST_FP8_ERROR = 0.03  # y of FP8 codes, whose input is not rounded to BF16 first
MOST_TIME = 1.3  # times peft's path, at the most tokens

tables: list[str] = []


def quantized(names: Any, shapes: dict, fmt: Any, device: str) -> Any:
    """Layers with an adapter that compute in `fmt`; None for peft's path."""
    import torch

    from kit.policy.quantized_linear import use_quantized_linears

    torch.manual_seed(0)
    held = torch.nn.ModuleDict({name: adapted(make_layer(shapes[name], torch.bfloat16, device)) for name in names})
    for parameter in held.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if fmt is not None:
        use_quantized_linears(held, fmt)
        for module in held.values():
            module.product.input_peak = torch.tensor(PEAK, device=device)
    return held


def expected(held: Any, x: Any, gs: list, fmt: Any) -> dict[str, Any]:
    """Outputs and gradients by autograd through full-size weights in float32."""
    import torch

    from kit.weights import quantize, stored_weight

    def straight(value: Any, as_quantized: Any) -> Any:
        return value + (as_quantized - value).detach()

    x, weights = x.float().requires_grad_(), []
    for module in held.values():
        module.zero_grad()
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        weights.append(stored_weight.weight_in_torch(module.base_layer).float() + module.scaling["default"] * (b @ a))
    merged = [weight.detach().bfloat16().float() for weight in weights]
    peaks = [quantize.weight_peak(weight, fmt) for weight in merged]
    if fmt.shares_peak:
        peaks = [torch.stack(peaks).amax(0)] * len(peaks)
    rows = x
    if fmt.activation is not None:
        peak = torch.tensor(PEAK, device=x.device)
        rows = straight(x, quantize.fake_quantize_activation_in_torch(x.detach(), fmt.activation, peak))
    made = [quantize.fake_quantize_weight_in_torch(w, fmt, p) for w, p in zip(merged, peaks, strict=True)]
    ys = [rows @ straight(weight, one).t() for weight, one in zip(weights, made, strict=True)]
    torch.autograd.backward(ys, [g.float() for g in gs])
    return found(held, ys, x)


def found(held: Any, ys: list, x: Any) -> dict[str, Any]:
    values = {"dx": x.grad}
    for (name, module), y in zip(held.items(), ys, strict=True):
        values[f"y {name}"] = y.detach()
        values[f"dA {name}"] = module.lora_A["default"].weight.grad.clone()
        values[f"dB {name}"] = module.lora_B["default"].weight.grad.clone()
    return values


def check_errors(device: str, shapes: dict, tokens: int) -> None:
    import torch

    from kit.core.formats import TRAINED
    from kit.policy.fused_linear import SAME_INPUT

    lines = ["relative error against full-size straight-through, float32 | y | dx | dA | dB"]
    for name, fmt in TRAINED.items():
        with case(f"gradients of {name}, {tokens} tokens"):
            held = quantized(SAME_INPUT[0], shapes, fmt, device)
            x = torch.randn(1, tokens, shapes["q_proj"][1], device=device).bfloat16()
            gs = [torch.randn(1, tokens, shapes[one][0], device=device).bfloat16() for one in held]
            wanted = expected(held, x, gs, fmt)
            held.zero_grad()
            x.requires_grad_().grad = None
            with torch.autocast(x.device.type, torch.bfloat16):
                ys = [held[one](x) for one in held]
            assert ys[0].grad_fn is ys[2].grad_fn, "they are not one function"
            torch.autograd.backward(ys, gs)
            errors = {key: relative(value, wanted[key]) for key, value in found(held, ys, x).items()}
            worst = [max(error for key, error in errors.items() if key.startswith(kind)) for kind in ("y", "dx")]
            worst += [max(error for key, error in errors.items() if key.startswith(kind)) for kind in ("dA", "dB")]
            lines.append(" | ".join([name, *(f"{error:.5f}" for error in worst)]))
            bound = MOST_FP8_ERROR if name.startswith("fp8") else MOST_ERROR
            assert max(worst) < bound, f"{max(worst):.4f}, bound {bound}"
    tables.append("\n".join(lines))


def check_block(device: str, shapes: dict, tokens: list[int]) -> None:
    import torch

    from kit.core.formats import TRAINED
    from kit.policy import quantized_linear

    lines = ["seven linear layers, forward + backward | tokens | ms | x peft | peaks found anew, ms | peak GiB"]
    for number in tokens:
        x = torch.randn(number, shapes["q_proj"][1], device=device).bfloat16()
        outputs = ("k_proj", "v_proj", "up_proj", "down_proj")
        gradients = {name: 1e-4 * torch.randn(number, shapes[name][0], device=device).bfloat16() for name in outputs}
        plain = None
        for name in ("peft", *TRAINED):
            with case(f"block {name}, {number} tokens"):
                held = quantized(shapes, shapes, TRAINED.get(name), device)
                ms, peak = run_block(held, x, gradients, device)
                plain = plain or ms
                anew = 0.0
                if name != "peft":
                    held["q_proj"].register_forward_pre_hook(lambda *_, held=held: quantized_linear.forget_peaks(held))
                    anew = run_block(held, x, gradients, device)[0]
                row = f"{name} | {number:,} | {ms:.2f} | {ms / plain:.2f} | {anew:.2f} | {peak:.2f}"
                lines.append(row)
                timed = device != "cpu" and number == max(tokens)
                assert not timed or ms <= MOST_TIME * plain, f"{ms / plain:.2f} times peft's path, bound {MOST_TIME}"
    tables.append("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rehearse", action="store_true", help="small shapes on a CPU; no bound on a clock")
    options = parser.parse_args()
    import torch

    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("there is no GPU; --rehearse runs small shapes on a CPU")
    device, shapes, tokens = ("cpu", SMALL, [64]) if options.rehearse else ("cuda", SHAPES, [2048, 8192, 16384])
    parts = {
        "errors": lambda: check_errors(device, shapes, 64 if options.rehearse else 2048),
        "block": lambda: check_block(device, shapes, tokens),
    }
    run_parts(parts, options.part, options.rehearse, tables)


if __name__ == "__main__":
    main()
