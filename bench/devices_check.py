"""Does a checkpoint that is spread over GPUs, or reaches into the host's memory, score what it scores on one GPU?

    python bench/devices_check.py             # two GPUs, about two minutes
    python bench/devices_check.py --rehearse  # on a CPU, where nothing is spread: the rest of the path

Trains the small model for two steps in BF16, merges it in three formats, and loads each with so little room that it
goes over both GPUs, plain weights also over one and the host. Claim, exit 1 when it fails: the log-probs are bit for
bit those of one GPU. Prints a table last.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parent))

import torch
from path_8b import CONFIG, command, launch_words

from merge import devices
from merge.verify import load_for_scoring, log_probs, release_memory

FORMATS = ("bf16", "fp8", "w4a16")


def scores(folder: Path, ids: torch.Tensor, shares: list[float] | None) -> tuple[list[str], torch.Tensor]:
    """Devices that hold weights, and log-probs, where each GPU has room for a share of the checkpoint."""
    real = devices.free_bytes
    if shares is not None:
        held = sum(one.numel() for one in load_for_scoring(folder, "cpu").parameters()) * 2
        devices.free_bytes = lambda index: int(held * (shares[index] if index < len(shares) else 0.0) / devices.ROOM)
    try:
        model = load_for_scoring(folder, torch.device("cuda", 0) if torch.cuda.is_available() else "cpu")
    finally:
        devices.free_bytes = real
    place: dict[str, Any] = getattr(model, "hf_device_map", {})
    found = log_probs(model, [ids])[0]
    del model
    release_memory()
    return sorted({str(one) for one in place.values()}), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, help="default /tmp/devices, of a rehearsal a new directory")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: every checkpoint lies on one device")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="devices-") if options.rehearse else "/tmp/devices")
    least = 0 if options.rehearse else 2  # devices that hold weights
    work.mkdir(parents=True, exist_ok=True)
    command("tiny", ["recipes/tiny_base.py", "--out", str(work / "tiny"), "--steps", "0"], work)
    keys = {"run.output_dir": work / "run", "model.path": work / "tiny", "data.path": work / "tiny"}
    keys |= {"model.dtype": "bfloat16", "train.max_steps": 2, "train.save_steps": 2}
    flat = [f"--{key}={value}" for key, value in keys.items()]
    command("train", [*launch_words("one_gpu", 1), "recipes/grpo_qlora.py", "--config", CONFIG, *flat], work)
    merge = ["-m", "merge", "--run", str(work / "run"), "--policy", "grpo", "--format", *FORMATS]
    command("merge", merge, work)
    ids, faults, lines = torch.arange(1, 200)[None], [], []
    for name in FORMATS:
        folder = work / "run" / "merged" / "grpo" / name
        _, one = scores(folder, ids, None)
        for shares in ([0.75, 0.75], [0.5]) if name == "bf16" else ([0.75, 0.75],):
            where, found = scores(folder, ids, shares)
            is_same = torch.equal(one, found)
            lines.append(
                f"{name:<8} {', '.join(where):<12} equal {is_same}  largest difference {(one - found).abs().max():.1e}"
            )
            faults += [lines[-1]] * (not is_same or len(where) < least)
    print("\n".join(lines))
    print("every claim holds" if not faults else "\n".join(faults))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
