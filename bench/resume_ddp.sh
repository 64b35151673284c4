#!/usr/bin/env bash
# Two GPUs, DDP, BF16, gradient accumulation and checkpointing: 10 steps at once against 5 and a resume.
# Prints both runs' metrics side by side; exit 1 unless metrics, ledger and final adapter are equal.
#   bash bench/resume_ddp.sh models/tiny-base
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
train() {
  accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 recipes/grpo_qlora.py \
    --config recipes/configs/grpo-tiny-nf4-cpu.yaml --model.path "$base" --data.path "$base" --model.dtype bfloat16 \
    --train.per_device_train_batch_size 16 --train.gradient_accumulation_steps 2 \
    --train.recompute full --train.save_steps 5 --run.name "$1" --run.output_dir "$work/$1" "${@:2}"
}
base=$1
train whole --train.max_steps 10
train halves --train.max_steps 5
train halves --train.max_steps 10 --resume
python3 - "$work" <<'PY'
import json, sys
from pathlib import Path

from safetensors.torch import load_file

runs = [Path(sys.argv[1]) / name for name in ("whole", "halves")]
metrics = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
keys = ("step", "reward", "kl", "grad_norm", "loss")
for rows in zip(*metrics, strict=True):
    print(*(f"{row[key]:.6g}" for key in keys for row in rows))
same = [[[row[key] for key in keys] for row in rows] for rows in metrics]
ledgers = [(run / "ledger.jsonl").read_text() for run in runs]
adapters = [load_file(run / "adapters/v000010/adapter_model.safetensors") for run in runs]
gap = max((adapters[0][name] - adapters[1][name]).abs().max().item() for name in adapters[0])
print("ledgers equal", ledgers[0] == ledgers[1], "largest adapter difference", gap)
sys.exit(0 if same[0] == same[1] and ledgers[0] == ledgers[1] and gap == 0 else 1)
PY
