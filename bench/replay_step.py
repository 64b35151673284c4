"""Replay a step whose gradient was not finite: which operation, which layer, which attention kernel.

    python bench/replay_step.py --run runs/NAME                # the newest file of its not_finite/
    python bench/replay_step.py --run runs/NAME --file not_finite/step-000080-process-0.safetensors --times 20

The run's base with the adapter of that step computes the loss of those rows (token ratio 1, KL with `train.beta`) and
its gradient, --times times with each of torch's attention kernels that supports the shapes. Columns: how often the
gradient was not finite, its largest norm, the layer where a non-finite gradient appeared first, and the operation that
torch's anomaly detection names. Exit 1 when any was not finite.
"""

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

KERNELS = ("as set", "MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION")


def load(run_path: Path, file: Path) -> tuple:
    """(policy with the adapter of `file`, the rows' tensors by chunk)."""
    import torch
    from safetensors.torch import load_file

    from kit.core.run_directory import RunDir
    from merge.verify import load_policy

    run, kept = RunDir.open(run_path), load_file(file)
    model = load_policy(run, run.newest_adapter()).train()
    device = next(model.parameters()).device
    for name, parameter in model.named_parameters():
        if f"adapter/{name}" in kept:
            parameter.data = kept[f"adapter/{name}"].to(device)
            parameter.requires_grad_(True)
    chunks: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in kept.items():
        if name.startswith("rows-"):
            chunk, _, key = name.partition("/")
            chunks.setdefault(chunk, {})[key] = value.to(device)
    return model, list(chunks.values())


def loss_of(model, rows: dict, beta: float):
    """Policy-gradient loss with ratio 1 plus the KL to the reference, averaged over the completions' tokens."""
    import torch

    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
    length = rows["completion_ids"].shape[1]
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=length + 1, use_cache=False).logits
    logps = logits[:, :-1].float().log_softmax(-1).gather(2, rows["completion_ids"][..., None])[..., 0]
    loss = -rows["advantages"][:, None] * (logps - logps.detach()).exp()
    if beta and "ref_per_token_logps" in rows:
        gap = rows["ref_per_token_logps"] - logps
        loss = loss + beta * (gap.exp() - gap - 1)
    return (loss * rows["completion_mask"]).sum() / rows["completion_mask"].sum()


def replay(model, chunks: list[dict], beta: float) -> tuple[float, str, str]:
    """(norm of the gradient, first layer with a non-finite gradient, what anomaly detection reports)."""
    import torch

    first: list[str] = []

    def hook(name: str):
        def look(module, inputs, outputs) -> None:
            if not first and any(part is not None and not part.isfinite().all() for part in inputs):
                first.append(name)

        return look

    names = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[0].endswith("layers")]
    hooks = [module.register_full_backward_hook(hook(name.rpartition("model.")[2])) for name, module in names]
    model.zero_grad()
    said = ""
    try:
        for rows in chunks:
            loss_of(model, rows, beta).backward()
        parts = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
        if not math.isfinite(norm := torch.stack(parts).norm().item()):
            said = operation(model, chunks, beta)
    finally:
        for one in hooks:
            one.remove()
    return norm, first[0] if first else "-", said or "-"


def operation(model, chunks: list[dict], beta: float) -> str:
    """Rerun with torch's anomaly detection, and return its message."""
    import torch

    model.zero_grad()
    try:
        with torch.autograd.set_detect_anomaly(True):
            for rows in chunks:
                loss_of(model, rows, beta).backward()
    except RuntimeError as error:
        return str(error).splitlines()[0][:90]
    return "finite with anomaly detection"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--file", type=Path, help="below the run; the newest of not_finite/ when not given")
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    found = sorted((options.run / "not_finite").glob("*.safetensors"))
    if options.file is None and not found:
        parser.error(f"{options.run}/not_finite has no file: every gradient of that run was finite")
    file = options.run / options.file if options.file else found[-1]
    beta = json.loads((options.run / "config.json").read_text())["config"]["train"]["beta"]
    model, chunks = load(options.run, file)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    spoiled = 0
    print(f"{file}: {sum(len(rows['completion_ids']) for rows in chunks)} rows")
    damaged = sorted({key for rows in chunks for key, value in rows.items() if not value.isfinite().all()})
    print(f"rows that are not finite themselves: {', '.join(damaged) or 'none'}")
    print(f"{'attention':<22} {'not finite':>10} {'norm':>10}  {'layer':<12} operation")
    for kernel in KERNELS:
        allowed = list(SDPBackend.__members__.values()) if kernel == "as set" else [getattr(SDPBackend, kernel)]
        try:
            with sdpa_kernel(allowed):
                results = [replay(model, chunks, beta) for _ in range(options.times)]
        except RuntimeError as error:
            print(f"{kernel:<22} {str(error).splitlines()[0][:80]}")
            continue
        bad = [result for result in results if not math.isfinite(result[0])]
        layer, said = (bad or results)[0][1:]
        norm = max((result[0] for result in results if math.isfinite(result[0])), default=math.nan)
        print(f"{kernel:<22} {len(bad):>10} {norm:>10.3g}  {layer:<12} {said}")
        spoiled += len(bad)
    return 1 if spoiled else 0


if __name__ == "__main__":
    sys.exit(main())
