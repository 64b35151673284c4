"""Divergence of a distillation on a GPU: against float64, memory and time at Qwen3-8B's head, and the recipe.

    python bench/distill_check.py                       # one GPU, about three minutes
    python bench/distill_check.py --rehearse            # the path on a CPU: small, no figures worth keeping

values    reverse KL, forward KL and Jensen-Shannon and their gradients with bfloat16 states, relative distance (L2) to
          a direct float64 computation on the same numbers; bound `BOUND`.
memory    forward and backward at 17,408 tokens, vocabulary 151,936, hidden 4,096: milliseconds and the peak beyond
          prior allocations, by `distill.chunk_tokens`; for comparison, the logits of 2,048 tokens all at once.
recipe    two steps of recipes/distill_qat.py on a small model in bfloat16, quantized to nvfp4a16, with padded rows and
          with packed ones (FlashAttention): the first step's divergence agrees within `SAME`.

Prints a table per part; exits 1 when a bound is missed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

ROOT = Path(__file__).parents[1]
KINDS = {"reverse_kl": 1.0, "forward_kl": 0.0, "js": 0.5}
BOUND, SAME = 0.01, 0.1
CHUNKS = (256, 1024, 2048, 4096)


def direct(student: torch.Tensor, teacher: torch.Tensor, b: float) -> torch.Tensor:
    """Divergence (N,) of logits (N, V) in their own dtype."""
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    if b in (0.0, 1.0):
        first, second = (p, q) if b == 1.0 else (q, p)
        return (first.exp() * (first - second)).sum(-1)
    m = torch.logaddexp(p + torch.tensor(1 - b).log().item(), q + torch.tensor(b).log().item())
    return (b * q.exp() * (q - m) + (1 - b) * p.exp() * (p - m)).sum(-1)


def operands(tokens: int, words: int, hidden: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device=device)  # noqa: E731
    student, head = draw(tokens, hidden), draw(words, hidden) / hidden**0.5
    return student.to(dtype), (student + 0.3 * draw(tokens, hidden)).to(dtype), head.to(dtype)


def check_values(device: str) -> bool:
    from kit.train.distill_trainer import Head, divergence

    student, teacher, weight = operands(300, 40_000, 256, device, torch.bfloat16)
    head, is_good = Head(weight, None, 3.0, None), True
    for kind, b in KINDS.items():
        ours = student.clone().requires_grad_()
        each, _ = divergence(ours, head, teacher, head, b, 1.0)
        each.mean().backward()
        exact = student.double().requires_grad_()
        wanted = direct(3 * exact @ weight.double().T, 3 * teacher.double() @ weight.double().T, b)
        wanted.mean().backward()
        off = [((a.double() - e).norm() / e.norm()).item() for a, e in ((each, wanted), (ours.grad, exact.grad))]
        is_good &= max(off) < BOUND
        print(f"values  {kind:11} mean {wanted.mean():.4f} nats  off: value {off[0]:.1e}  gradient {off[1]:.1e}")
    return is_good


def measured(work, device: str, rounds: int) -> tuple[float, float]:
    """(milliseconds, peak GiB beyond prior allocations) of `work`."""
    work()
    if device == "cpu":
        started = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - started), 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(rounds):
        work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started) / rounds, (torch.cuda.max_memory_allocated() - before) / 2**30


def check_memory(device: str, tokens: int, words: int, hidden: int, few: int) -> None:
    from trl.kernels import chunked_divergence

    from kit.train.distill_trainer import Head, divergence

    student, teacher, weight = operands(tokens, words, hidden, device, torch.bfloat16)
    head = Head(weight, None, 1.0, None)
    for kind, b in KINDS.items():
        for chunk in CHUNKS if kind == "reverse_kl" else (1024,):
            chunked_divergence.TOKEN_CHUNK_SIZE = chunk

            def work(b: float = b) -> None:
                ours = student.detach().requires_grad_()
                divergence(ours, head, teacher, head, b, 1.0)[0].mean().backward()

            ms, gib = measured(work, device, 3)
            print(f"memory  {kind:11} {tokens:,} tokens, chunk_tokens {chunk:5,}: {ms:8.1f} ms  {gib:6.2f} GiB")

    def at_once() -> None:
        ours = student[:few].detach().requires_grad_()
        direct((ours @ weight.T).float(), (teacher[:few] @ weight.T).float(), 1.0).mean().backward()

    ms, gib = measured(at_once, device, 3)
    print(f"memory  reverse_kl  {few:,} tokens, all their logits at once: {ms:8.1f} ms  {gib:6.2f} GiB")


def check_recipe(work: Path, device: str) -> bool:
    base = work / "base"
    python = [sys.executable]
    steps = ["--steps", "0", "--hidden", "128", "--layers", "2", "--problems", "400", "--heldout", "40"]
    subprocess.run([*python, "recipes/tiny_base.py", "--out", str(base), *steps], cwd=ROOT, check=True)
    found = {}
    for name, more in {"padded": [], "packed": ["--train.micro_batch_tokens=512"]}.items():
        keys = {"run.output_dir": work / name, "model.path": base, "data.path": base, "policy.quant_cfg": "nvfp4a16"}
        keys |= {"distill.teacher": "base", "distill.teacher_adapter": "null", "policy.init_adapter": "null"}
        keys |= {"train.max_steps": 2, "model.dtype": "float32" if device == "cpu" else "bfloat16"}
        words = [f"--{key}={value}" for key, value in keys.items()]
        config = "recipes/configs/distill-tiny-nvfp4-cpu.yaml"
        command = [*python, "recipes/distill_qat.py", "--config", config, *words, *more]
        subprocess.run(command, cwd=ROOT, check=True)
        found[name] = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]
        first, last = found[name][0], found[name][-1]
        print(f"recipe  {name}: divergence {first['divergence']:.5f}, seconds {last['seconds']}, {last['peak_gib']}")
    one, other = (rows[0]["divergence"] for rows in found.values())
    return 0 < one and abs(one - other) <= SAME * one


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="small, on a CPU")
    small = parser.parse_args().rehearse
    device = "cpu" if small else "cuda"
    is_good = check_values(device)
    check_memory(device, *((300, 40_000, 64, 100) if small else (17_408, 151_936, 4096, 2048)))
    with tempfile.TemporaryDirectory() as folder:
        is_good &= check_recipe(Path(folder), device)
    print("all within bounds" if is_good else "a bound was missed")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
