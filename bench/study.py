"""The whole study on a GPU, with vLLM generating every cell of the matrix that it serves: one seed, all formats.

    python bench/study.py [--seeds 0] [--formats bf16 fp8 …] [--limit_s 550]

A Qwen3 of 25 M parameters is supervised on noisy sums (`mismatch.py` makes it), then `python -m recipes.study` trains
it with GRPO, merges {base, grpo} into every format, diagnoses the layers, evaluates, gates and reports, and `python -m
merge --compare_bases` says which base is nearer to the policy. Prints the study's table last. awq needs what `make
llmcompressor` installs and is skipped without it. Exits 1 when a command fails or time runs out; results so far stay
in runs/.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu-study"), help="where the starting model goes")
    parser.add_argument("--seeds", nargs="+", default=["0"])
    parser.add_argument("--formats", nargs="+")
    parser.add_argument("--steps", default="80", help="steps of GRPO")
    parser.add_argument("--limit_s", type=float, default=3600)
    options = parser.parse_args()
    from mismatch import make_base

    from kit.core.formats import FORMATS
    from merge.command import AWQ_PYTHON

    started = time.perf_counter()
    formats = options.formats or [name for name in FORMATS if name != "awq" or (ROOT / AWQ_PYTHON).is_file()]
    base = options.work / "base"
    if not base.is_dir():
        make_base(base, 0, 600)
    keys = {"run.name": "gpu-study", "model.path": base, "model.dtype": "bfloat16", "data.path": base}
    keys |= {"train.max_steps": options.steps, "train.learning_rate": 3e-4, "train.save_steps": options.steps}
    # Cells run one after the other on the card, so an engine needs no more than its KV cache.
    keys |= {"eval.backend": "vllm", "server.gpu_memory_utilization": 0.2, "eval.formats": f"[{','.join(formats)}]"}
    flags = [f"--{key}={value}" for key, value in keys.items()]
    study = ["-m", "recipes.study", "--config", CONFIG, "--seeds", *options.seeds, "--formats", *formats]
    commands = [[*study, *flags]]
    commands += [["-m", "merge", "--run", f"runs/gpu-study-seed{seed}", "--compare_bases"] for seed in options.seeds]
    for command in commands:
        print("$ python", *command, flush=True)
        left = options.limit_s - (time.perf_counter() - started)
        try:
            code = subprocess.run([sys.executable, *command], cwd=ROOT, timeout=max(1.0, left)).returncode
        except subprocess.TimeoutExpired:
            print(f"the time of {options.limit_s:.0f} s is over")
            return 1
        if code:
            return 1
    print((ROOT / "runs/gpu-study-study/study.md").read_text())
    print(f"{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
