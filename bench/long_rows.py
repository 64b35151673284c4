"""Memory and seconds of an update on one long completion, on one card and with its tokens split over several.

    python bench/long_rows.py --cards 1 2 --lengths 33024 --out long_rows.json
    python bench/long_rows.py --lengths 1024 --shape tiny --levers fp8+shared+full+adamw_fused --out x.json  # on a CPU

Qwen3-8B's shape with random weights, NF4, rank 16 on all linear layers; a step is forward, backward and fused AdamW on
one row, as a process of `train.sequence_parallel` makes it, with the adapter's gradients averaged as DDP does. Median
of 3 after 2 warm-ups. Claims, exit 1 when one fails: loss and the gradient's norm on several cards are those of one,
within BOUND. Prints the table last.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parent / "step"))

from update_child import Batch, Case
from workload import ROOT

BOUND = 0.02  # other shapes of the same matmuls, in BF16
LIMIT_S = 240  # time limit of a case


def child(options: argparse.Namespace) -> None:
    """Measure in this process, one of `torch.distributed.run`."""
    import torch
    import torch.distributed as dist
    from accelerate import PartialState

    class Averaged(Case):
        def average_gradients(self) -> None:
            for parameter in self.trained.values() if cards > 1 else ():
                dist.all_reduce(parameter.grad)
                parameter.grad /= cards

    (cards,) = options.cards
    state = PartialState()
    case = Averaged(f"{options.levers}+train.sequence_parallel={cards}", "all", options.work, state.device.type)
    for length in options.lengths:
        row: dict[str, Any] = {"cards": cards, "length": length, "levers": options.levers}
        try:
            row |= case.measure(Batch(1, length, is_ragged=False), profile=False)
        except torch.OutOfMemoryError as error:
            row["error"] = str(error).splitlines()[0][:200]
        if os.environ["RANK"] == "0":
            print("ROW", json.dumps(row), flush=True)
        if "error" in row:
            break  # the others wait in a collective
        case.model.zero_grad(set_to_none=True)
        if state.device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cards", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--lengths", type=int, nargs="+", default=[33024], help="tokens, an eighth of them prompt")
    parser.add_argument(
        "--levers", nargs="+", default=["fp8+liger+shared+full+adamw_fused"], help="of bench_update.py"
    )
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--work", type=Path, default=Path("/tmp/long-rows"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        (options.levers,) = options.levers
        return child(options)
    from memory_child import make_directory

    options.work.mkdir(parents=True, exist_ok=True)
    make_directory(options.work, options.shape, prompt_tokens=64)
    rows = [row for levers in options.levers for cards in options.cards for row in launch(options, levers, cards)]
    options.out.write_text(json.dumps(rows, indent=1))
    faults = compare(rows)
    print(f"{'levers':<40} {'tokens':>7} cards GiB a card       s   tok/s      loss grad norm")
    for row in rows:
        head = f"{row['levers']:<40} {row['length']:>7,} {row['cards']:>5}"
        if "error" in row:
            print(f"{head} {row['error']}")
            continue
        tail = f"{row['loss']:>9.4f} {row['grad_norm']:>9.3g}"
        print(f"{head} {row['peak_gib']:>10.2f} {row['step_s']:>7.2f} {row['tok_s']:>7,.0f} {tail}")
    print("\n".join(faults) or "every claim holds")
    sys.exit(bool(faults))


def launch(options: argparse.Namespace, levers: str, cards: int) -> list[dict[str, Any]]:
    words = ["--cards", str(cards), "--lengths", *map(str, options.lengths), "--levers", levers, "--out", "none"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(cards)]
    command = [*run, "bench/long_rows.py", *words, "--work", str(options.work)]
    log = options.work / f"{levers}-{cards}.log"
    try:
        with open(log, "w") as file:
            subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        pass
    lines = log.read_text(errors="replace").splitlines()
    rows = [json.loads(line[4:]) for line in lines if line.startswith("ROW ")]
    last = next((line for line in reversed(lines) if "Error" in line), "no output")
    missing = options.lengths[len(rows) :]
    return rows + [{"cards": cards, "length": one, "levers": levers, "error": last[:200]} for one in missing]


def compare(rows: list[dict[str, Any]]) -> list[str]:
    """The claims that fail, each as a sentence with its numbers."""
    faults = [f"{one['length']} tokens on {one['cards']} cards: {one['error']}" for one in rows if "error" in one]
    alone = {(one["levers"], one["length"]): one for one in rows if one["cards"] == 1 and "error" not in one}
    for row in rows:
        one = alone.get((row["levers"], row["length"]), row)
        for key in ("loss", "grad_norm"):
            if "error" not in row and abs(row[key] / one[key] - 1) > BOUND:
                found = f"{key} {row[key]:.4g}, on one card {one[key]:.4g}"
                faults.append(f"{row['length']} tokens on {row['cards']} cards: {found}")
    return faults


if __name__ == "__main__":
    main()
