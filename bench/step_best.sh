#!/bin/bash
# Whole steps of works A to D: TRL in its fastest setting beside ours on the same two cards, two pairs of cards at once.
#
#   bash bench/step_best.sh prepare ab cd           # model, base; a round of A and B on cards 0, 1 and of C, D on 2, 3
#   ROUND=2 bash bench/step_best.sh ab cd table     # another round, and the table of all
#   bash bench/step_best.sh prepare ab              # two cards
#   PAIR_AB=0 bash bench/step_best.sh prepare ab    # one card, which trains and serves
#   REHEARSE=--rehearse bash bench/step_best.sh prepare ab table       # a tiny shape on a CPU
#
# A round is a JSON for each part. PARTS_AB and PARTS_CD choose and order them; parts joined by + run at once:
#   stock_A           TRL colocated on both cards; without checkpointing where that fits, see BEST_A to BEST_D
#   default_A         TRL's trainer on a card and its server on the other
#   our_A, over_A     both cards in turn; overlapped, a card each
#   stream_B          the update begins with the first groups, strictly on-policy
#   sleep_A           both cards in turn, replicas asleep during the update
#   mixed_A           overlapped on both cards: each trains and samples at once; MPS=1 lets their kernels run together
#   yield_A           with MPS=1: the same, then with the trainer's kernels behind the replica's
#   sms_A, sms_CD     with MPS=1: the same as mixed_, then with the trainer's kernels on SMS % of the multiprocessors, by
#                     default 50; products_check.py first: with 70 an H200 multiplies wrong
#   tp_D, mixed_tp_D  both cards in turn, or overlapped, with one replica over both, by tensor parallelism; a rehearsal
#                     needs VLLM_CPU_OMP_THREADS_BIND="0|1"
#   ours_AB, ours_CD, over_ACD, our_C_over_AB, our_mixed_A   several rows by one server; over_ with any of the works
#   update, remerge   bench_update.py on the first card, also Unsloth with UNSLOTH_PATH; remerge_weights.py on the second
#   flashinfer        wait for its kernels, which `prepare` compiles with FLASHINFER_PATH, a folder to import it from, on
#                     COMPILE_CARD, by default the last, unless there is a file flashinfer in WORK; our servers use it
#                     from then on, in works C and D as server.kv_cache fastest decides
# OUT and WORK are the folders of results and of the model, PAIR_AB and PAIR_CD the cards; what still runs after END_S
# seconds ends. Cards of 80 GB get other settings: packs of half the length, smaller micro-batches of stock's.
set -u
cd "$(dirname "$0")/.."
ROUND=${ROUND:-1} END_S=${END_S:-3000} REHEARSE=${REHEARSE:-} PYTHON=${PYTHON:-python3}
W=${WORK:-/tmp/step_best} OUT=${OUT:-$W/out}
mkdir -p "$W" "$OUT"
GIB=${GIB:-$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i 0 2>/dev/null | awk '{print int($1 / 1024)}')}
COMPILE_CARD=${COMPILE_CARD:-$(($(nvidia-smi -L 2>/dev/null | wc -l) - 1))} # the last one
case ${PAIR_AB:-0,1} in # `both` cards train and sample, or the one that there is
    *,*) BOTH=both ;;
    *) BOTH=one COMPILE_CARD=$PAIR_AB PREPARE_CARD=$PAIR_AB ;;
esac
V=${V:-fp8+kernels+mlp+logits+shared+none+adamw_fused+cudnn}
if [ "${GIB:-141}" -lt 100 ]; then
    V=$V+train.micro_batch_tokens=8704 VB=${V/none/auto}
    BEST_A=stock+$BOTH+none+micro=2 BEST_B=stock+$BOTH+none+micro=1 BEST_C=stock+$BOTH+micro=2+share=.64 BEST_D=stock+$BOTH
    KV_AB=14 KV_C=15 KV_D=11 KV_OVER_C=42
else
    VB=$V
    BEST_A=stock+$BOTH+none+micro=4 BEST_B=stock+$BOTH+none+micro=4 BEST_C=stock+$BOTH+none+micro=1 BEST_D=stock+$BOTH+none+micro=2
    KV_AB=16 KV_C=22 KV_D=22 KV_OVER_C=43
fi
KV_A=$KV_AB KV_B=$KV_AB

TP=server.tensor_parallel=2 KV_TP=22 # GiB of cache on each card, which holds half of the heads of every sequence
STREAM=rollout.stream_groups=2 # the update begins with the first groups, strictly on-policy

step() { # step CARDS NAME words...: bench_step.py within the time that is left
    local cards=$1 name=$2 left=$((END_S - SECONDS))
    shift 2
    if [ "$left" -lt 60 ]; then echo "$name: $left s left, not started"; return; fi
    CUDA_VISIBLE_DEVICES=$cards $PYTHON bench/bench_step.py $REHEARSE --work "$W/cards${cards//,/}" --steps ${STEPS:-1} \
        --cut --limit_s "$left" --side_s 330 --out "$OUT/$name-$ROUND.json" "$@" >"$W/$name-$ROUND.log" 2>&1
    grep -E "step [0-9.]+, |:.*(left|Error|memory|ended|running)" "$W/$name-$ROUND.log" | cut -c1-260 | sed "s/^/$name $SECONDS s /"
}

ours() { # ours CARDS NAME LOADS KV words...: rows of ours with these levers, by servers with GiB of FP8 KV cache
    local cards=$1 name=$2 loads=$3 kv=$4 keys="server.kv_cache=fp8+server.kv_cache_gib=$4" path=${PYTHONPATH:-} variants=()
    shift 4
    until [ -f "$W/first/base/manifest.json" ] || [ "$SECONDS" -gt "$END_S" ]; do sleep 1; done
    [ -n "$REHEARSE" ] && keys=server.kv_cache_gib=1
    if [ -f "$W/flashinfer" ]; then
        export VLLM_HAS_FLASHINFER_CUBIN=1 # or vLLM asks a server on the internet before it takes XQA
        path=$FLASHINFER_PATH:$path
        case $name:$loads in
            # vLLM would first compile FlashInfer's fused all-reduce, which takes NVLink multicast where it can
            tp_* | mixed_tp_*)
                keys="$keys+server.vllm={attention_backend: FLASHINFER, compilation_config: {pass_config: {fuse_allreduce_rms: false}}}"
                ;;
            *:*C* | *:*D*) keys=server.kv_cache_gib=$kv ;; # server.kv_cache fastest takes both by itself
            *) keys="$keys+server.vllm={attention_backend: FLASHINFER}" ;;
        esac
    fi
    for levers in "$@"; do # levers, or levers@LOADS
        case $levers in *@*) variants+=("${levers%@*}+$keys@${levers##*@}") ;; *) variants+=("$levers+$keys") ;; esac
    done
    PYTHONPATH=$path step "$cards" "$name" --loads $loads $WARM --stock_sides --variants "${variants[@]}"
}

part() { # part CARDS NAME
    local work=${2##*_} best=BEST_${2##*_} kv=KV_${2##*_} rows one
    WARM="--warm_tokens 128"
    case $2 in *C* | *D) WARM="--warm_tokens 512" ;; esac
    case $2 in
        stock_[A-D]) step "$1" "$2" --loads "$work" $WARM --stock_sides "${!best}" ;;
        default_[A-D]) step "$1" "$2" --loads "$work" $WARM ;;
        ours_AB) ours "$1" "$2" "A B" $KV_AB "$VB+$BOTH" "$VB+$BOTH+$STREAM@B" "$V+$STREAM@B" "$V+overlap" ;;
        our_[A-D]) ours "$1" "$2" "$work" "${!kv}" "$VB+$BOTH" ;;
        mixed_[A-D]) ours "$1" "$2" "$work" "${!kv}" "$VB+$BOTH+overlap" ;;
        our_mixed_[A-D]) ours "$1" "$2" "$work" "${!kv}" "$VB+$BOTH" "$VB+$BOTH+overlap" ;;
        yield_[A-D]) ours "$1" "$2" "$work" "${!kv}" "$VB+$BOTH+overlap" "$VB+$BOTH+overlap+yield" ;;
        sms_*) # several values of SMS are several rows
            kv=$KV_AB
            case $2 in *C* | *D*) kv=$KV_C ;; esac
            rows=("$VB+$BOTH+overlap")
            for one in ${SMS:-50}; do rows+=("$VB+$BOTH+overlap+sms=$one"); done
            ours "$1" "$2" "$(sed 's/./& /g' <<<"${2#sms_}")" "$kv" "${rows[@]}"
            ;;
        stream_B) ours "$1" "$2" B $KV_AB "$VB+$BOTH+$STREAM" "$V+$STREAM" ;;
        ours_CD) ours "$1" "$2" "C D" $KV_C "$VB+$BOTH" ;;
        our_C_over_AB) ours "$1" "$2" "A B C" $KV_C "$VB+$BOTH@C" "$V+overlap@B" "$V+overlap@A" ;;
        sleep_[ABD]) ours "$1" "$2" "$work" $KV_AB "$V+$BOTH+server.sleep=true" ;;
        tp_[ABCD]) ours "$1" "$2" "$work" $KV_TP "$VB+$BOTH+$TP" ;;
        mixed_tp_[ABCD]) ours "$1" "$2" "$work" $KV_TP "$VB+$BOTH+overlap+$TP" ;;
        over_*C*) ours "$1" "$2" "$(sed 's/./& /g' <<<"${2#over_}")" $KV_OVER_C "$V+overlap" ;;
        over_D) ours "$1" "$2" D $KV_D "$V+overlap" ;;
        over_*) ours "$1" "$2" "$(sed 's/./& /g' <<<"${2#over_}")" $KV_AB "$V+overlap" ;;
        update)
            CUDA_VISIBLE_DEVICES=${1%%,*} $PYTHON bench/bench_update.py \
                --cases plain fp8+kernels+mlp+logits+shared+none+adamw_fused+cudnn ${UNSLOTH_PATH:+unsloth} \
                --targets ${TARGETS:-qkvo all} --batches 8x2048 ${UNSLOTH_PATH:+--unsloth_path "$UNSLOTH_PATH"} --limit_s 180 \
                --out "$OUT/update_one-$ROUND.json" >"$W/update-$ROUND.log" 2>&1
            tail -12 "$W/update-$ROUND.log" | cut -c1-200
            ;;
        remerge)
            CUDA_VISIBLE_DEVICES=${1##*,} $PYTHON bench/remerge_weights.py --weights w4a16 fp8_per_channel \
                >"$W/remerge-$ROUND.log" 2>&1
            tail -8 "$W/remerge-$ROUND.log" | cut -c1-200
            ;;
        flashinfer) until [ -f "$W/flashinfer.log.end" ] || [ "$SECONDS" -gt "$END_S" ]; do sleep 1; done ;;
        *) echo "there is no part $2" ;;
    esac
}

pair() { # pair CARDS PARTS...: in turn
    local cards=$1 one
    shift
    mkdir -p "$W/cards${cards//,/}"
    for one in model base; do ln -sfn "$W/first/$one" "$W/cards${cards//,/}/$one"; done
    until [ -f "$W/first/model/COMPLETE" ] || [ "$SECONDS" -gt "$END_S" ]; do sleep 1; done
    for one in "$@"; do
        for word in ${one//+/ }; do part "$cards" "$word" & done
        wait
    done
}

compile() { # FlashInfer's kernels, by an engine that needs them
    VLLM_HAS_FLASHINFER_CUBIN=1 PYTHONPATH=$FLASHINFER_PATH:${PYTHONPATH:-} CUDA_VISIBLE_DEVICES=$COMPILE_CARD MAX_JOBS=40 nice $PYTHON \
        bench/decode_profile.py --shape 8b --sequences 32 --kv_gib 2 --new 256 --share .3 --variants fp8+kv+flashinfer \
        --out "$W/compiled.json" >"$W/flashinfer.log" 2>&1 && grep -q '"rows"' "$W/compiled.json" && touch "$W/flashinfer"
    touch "$W/flashinfer.log.end"
    if [ -f "$W/flashinfer" ]; then echo "FlashInfer: ready after $SECONDS s"; else echo "FlashInfer: failed"; tail -5 "$W/flashinfer.log"; fi
}

mps() { # CUDA's multi-process service for everything below, as this user; ends with this script
    export CUDA_MPS_PIPE_DIRECTORY=$W/mps CUDA_MPS_LOG_DIRECTORY=$W/mps
    mkdir -p "$W/mps"
    nvidia-cuda-mps-control -d && trap 'echo quit | nvidia-cuda-mps-control' EXIT
}

prepare() { # the model and its base, FlashInfer's kernels beside them
    mkdir -p "$W/first"
    CUDA_VISIBLE_DEVICES=${PREPARE_CARD:-1} $PYTHON bench/bench_step.py $REHEARSE --part prepare --loads A B C D \
        --work "$W/first" --out "$W/prepare.json" >"$W/prepare.log" 2>&1 &
    [ -n "${FLASHINFER_PATH:-}" ] && [ ! -f "$W/flashinfer" ] && compile &
    wait
}

ab() { pair "${PAIR_AB:-0,1}" ${PARTS_AB:-stock_A stock_B ours_AB}; }

of_cd() { pair "${PAIR_CD:-2,3}" ${PARTS_CD:-stock_D stock_C our_C our_D over_C}; }

pooled() { (
    shopt -s nullglob
    $PYTHON bench/step/step_table.py "$OUT"/{stock,default,our,ours,over,stream,sleep,mixed,yield,sms,tp}_*.json
); }

if [ -n "${MPS:-}" ]; then mps || exit 1; fi
for word in "$@"; do
    case $word in
        prepare | ab) $word & ;;
        cd) of_cd & ;;
        table) wait && pooled ;;
        *) echo "there is no $word"; exit 2 ;;
    esac
done
wait
