#!/usr/bin/env bash
# Measure on one GPU what other settings of numbers and texts change; the table of each part comes last.
#
#   bench/cards_check.sh float16     # trainer and server in float16 and bfloat16: k3, |Δlogp|, reward
#   bench/cards_check.sh w8a16       # FP8 weights multiplied in 16 bits (Marlin) and in FP8
#   bench/cards_check.sh stop        # rollout tok/s with and without stop texts, layers of an 8B shape
#   bench/cards_check.sh calculator  # an environment on vLLM servers, FP8 and BF16, two seeds
#
# WORK (/tmp/cards) keeps models and runs. float16 and w8a16 train the small model of the quickstart.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=4 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
WORK=${WORK:-/tmp/cards}
mkdir -p "$WORK"
TINY=recipes/configs/grpo-tiny-nf4-cpu.yaml
ONE_CARD=(--rollout.backend server --train.gpus '[0]' --server.gpus '[0]' --ignore_plan --overwrite)

# train NAME MODEL KEYS…: one run by launch.up
train() {
  python3 -m launch.up --config $TINY "${ONE_CARD[@]}" --rollout.server_urls '[http://127.0.0.1:8010]' \
    --run.name "$1" --run.output_dir "$WORK/$1" --model.path "$2" --data.path "$2" "${@:3}"
}

# table NAME…: figures of the runs' metrics.jsonl
table() {
  python3 - "$WORK" "$@" <<'PY'
import json, pathlib, statistics, sys
print("| run | reward, first and last 5 | k3 | mean |Δlogp| | rollout tok/s, median from the 2nd step | product | skipped |")
for name in sys.argv[2:]:
    rows = [json.loads(line) for line in (pathlib.Path(sys.argv[1]) / name / "metrics.jsonl").read_text().splitlines()]
    def mean(key, some):
        return statistics.mean(row[key] for row in some)
    print(
        f"| {name} | {mean('reward', rows[:5]):.3f} → {mean('reward', rows[-5:]):.3f} | {mean('sampler_k3', rows):.1e} | "
        f"{mean('sampler_delta_mean', rows):.1e} | {statistics.median(row['rollout_tokens_per_s'] for row in rows[1:]):.0f} | "
        f"{rows[-1].get('server_product')} | {sum(row.get('update_skipped') or 0 for row in rows)} |"
    )
PY
}

small() {
  [ -d "$WORK/small" ] || python3 recipes/tiny_base.py --out "$WORK/small"
  KEYS=(--server.enforce_eager true --server.kv_cache_gib 1 --server.gpu_memory_utilization 0.3
    --train.max_steps 20 --train.save_steps 20)
}

float16() {
  small
  for dtype in float16 bfloat16; do for weights in bf16 fp8_per_channel; do
    train "$dtype-$weights" "$WORK/small" "${KEYS[@]}" --model.dtype $dtype --server.weights $weights \
      --server.base "$WORK/base-$dtype"
  done; done
  table {float16,bfloat16}-{bf16,fp8_per_channel}
}

w8a16() {
  small
  KEYS+=(--model.dtype bfloat16 --server.weights fp8_per_tensor --server.base "$WORK/base-bfloat16")
  # vLLM before 0.31 wants the variable too.
  VLLM_TEST_FORCE_FP8_MARLIN=1 train w8a16 "$WORK/small" "${KEYS[@]}" --server.force_w8a16 true
  train w8a8 "$WORK/small" "${KEYS[@]}"
  table w8a16 w8a8
}

stop() {
  [ -d "$WORK/letters" ] || python3 recipes/tiny_base.py --steps 0 --problems 200 --heldout 40 --hidden 64 --layers 2 \
    --out "$WORK/letters"
  [ -d "$WORK/layers" ] || python3 -c "
import sys; sys.path.insert(0, 'bench')
from pathlib import Path
from path_8b import make_model
make_model(Path('$WORK/layers'), Path('$WORK/letters'), 8, branches=0.1)"
  # Random weights: distances say nothing.
  KEYS=(--data.path "$WORK/letters" --model.dtype bfloat16 --server.weights fp8_per_channel --server.base "$WORK/base-8"
    --server.gpu_memory_utilization 0.4 --server.kv_cache_gib 16 --server.max_num_seqs 512 --rollout.group_size 16
    --rollout.max_completion_length 256 --train.per_device_train_batch_size 64 --train.gradient_accumulation_steps 8
    --train.micro_batch_tokens 16384 --train.max_steps 3 --train.save_steps 3 --train.learning_rate 1e-5
    --rollout.max_sampler_k3 10 --rollout.max_canary_delta 10)
  for round in 1 2; do
    train "none-$round" "$WORK/layers" "${KEYS[@]}"
    train "stop-$round" "$WORK/layers" "${KEYS[@]}" --rollout.stop '["zzqq", "</answer>"]'
  done
  table {none,stop}-{1,2}
}

calculator() {
  [ -d models/tiny-calculator ] || python3 recipes/tiny_tools.py --task calculator --out models/tiny-calculator
  python3 bench/real_weights.py learn --config recipes/configs/grpo-tiny-calculator-cpu.yaml --work "$WORK/calculator" \
    --cards 0 --jobs 4 --seeds 2 --out "$WORK/calculator.json" --model.dtype=bfloat16 --server.enforce_eager=true \
    --rollout.max_canary_delta=1 --arms "fp8 server=rollout.backend=server,server.weights=fp8_per_channel" \
    "bf16 server=rollout.backend=server,server.weights=bf16"
}

"$@"
