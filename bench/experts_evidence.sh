#!/usr/bin/env bash
# Measure what mixtures of experts cost and whether they learn, on two GPUs of one host; each part prints its table last.
#
#   bench/experts_evidence.sh routing      # small mixture, FP8 servers: own, compare, replay, GSPO, three seeds
#   bench/experts_evidence.sh card         # Qwen3-30B-A3B's shape: trainer and FP8 server together on the first GPU
#   bench/experts_evidence.sh parallel     # whole experts on each of two GPUs: remerged against a fresh load, by hash
#   bench/experts_evidence.sh attention    # the step without an adapter on experts
#   bench/experts_evidence.sh stock        # all layers in BF16 with peft's own wrappers
#
# WORK (/tmp/experts) keeps the runs, OUT (/tmp/experts-out) the tables and logs, JOBS (18) runs at once, EXPERTS (32)
# and LAYERS (6) the small mixture's shape.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
WORK=${WORK:-/tmp/experts} OUT=${OUT:-/tmp/experts-out} JOBS=${JOBS:-18} EXPERTS=${EXPERTS:-32} LAYERS=${LAYERS:-6}
FUSED='{"policy.compute": "fused"}'
mkdir -p "$OUT"

routing() {
  [ -d "$WORK-base" ] || python3 recipes/tiny_base.py --experts "$EXPERTS" --layers "$LAYERS" --hidden 256 \
    --learning_rate 1e-3 --device cuda --out "$WORK-base" > "$OUT/base.log" 2>&1
  tail -n 1 "$OUT/base.log"
  python3 bench/real_weights.py learn --config recipes/configs/grpo-tiny-moe-nf4-cpu.yaml --work "$WORK" \
    --out "$OUT/routing.json" --cards 0 1 --jobs "$JOBS" \
    --model.path="$WORK-base" --data.path="$WORK-base" --model.dtype=bfloat16 --rollout.max_sampler_k3=2 \
    --rollout.max_canary_delta=2 --train.micro_batch_tokens=8192 --server.max_num_seqs=256 --train.save_steps=80 \
    --arms "compare=rollout.backend=server,rollout.routing=compare" \
    "own=rollout.backend=server" \
    "replay=rollout.backend=server,rollout.routing=replay" \
    "GSPO=rollout.backend=server,rollout.routing=compare,train.trl={importance_sampling_level: sequence}" \
    "GSPO and replay=rollout.backend=server,rollout.routing=replay,train.trl={importance_sampling_level: sequence}" \
    "BF16 server=rollout.backend=server,rollout.routing=compare,server.weights=bf16"
}

card() {
  CUDA_VISIBLE_DEVICES=0 python3 bench/experts_server.py --ranks 4 --kv_gib "${KV_GIB:-5}" --out "$OUT/card.json" \
    --trainer "--expert_ranks 4 --levers '$FUSED' --out $OUT/card-step.json"
}

parallel() {
  python3 bench/remerge_weights.py --experts --tensor_parallel 2 --expert_parallel --work "$WORK-parallel" \
    --weights fp8_per_channel bf16
}

attention() {
  CUDA_VISIBLE_DEVICES=${CARD:-0} python3 bench/experts_step.py --expert_ranks 0 --levers "$FUSED" \
    --out "$OUT/attention.json"
}

stock() {
  CUDA_VISIBLE_DEVICES=${CARD:-0} python3 bench/experts_step.py --stock --expert_ranks 4 8 --out "$OUT/stock.json"
}

part=${1:?name a part: routing, card, parallel, attention, stock}
shift
"$part" "$@"
