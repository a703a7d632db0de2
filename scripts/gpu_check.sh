#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What continuous integration cannot run, because it has no GPU. Runs the stages named, or all, one
# after another; each ends after STAGE_MINUTES (9), a failed one stops no other, and logs and results
# are in DIRECTORY.
#
#   scripts/gpu_check.sh DIRECTORY [tests] [kernels] [tiles] [profile] [quickstart]
#
#   tests        pytest -m gpu
#   kernels      benchmarks/kernels.py: kernels.json
#   tiles        benchmarks/kernels.py --tune: tiles.json
#   profile      a cost table for layers with the attention of Qwen2.5-3B, checked: cost_table.json
#   quickstart   Megatron's loop over NCCL, one rank per GPU: quickstart.json

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
(($#)) || fail "name a directory for logs and results: $0 DIRECTORY [STAGE...]"
mkdir -p "$1"
OUT="$(cd "$1" && pwd)"
shift
(($#)) || set -- tests kernels tiles profile quickstart
STAGES=("$@")
LIMIT_MINUTES="${STAGE_MINUTES:-9}"
set_up tools data test
python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    fail 'no CUDA device is visible'

LAYER_ARGS=(
    --num-layers 4
    --hidden-size 2048
    --ffn-hidden-size 11008
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 2
    --kv-channels 128
    --seq-length 65536
    --max-position-embeddings 65536
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --micro-batch-size 1
    --global-batch-size 8
    --train-iters 1
    --lr 1e-5
    --tokenizer-type NullTokenizer
    --vocab-size 151936
    --bf16
    --transformer-impl local
    --no-gradient-accumulation-fusion
    --no-persist-layer-norm
    --sparse-balance
    --sparse-balance-block-size 256
    --sparse-balance-base-budget 32
)

stage() {
    case "$1" in
        tests) limited python -m pytest -m gpu -q -p no:cacheprovider ;;
        kernels)
            limited python benchmarks/kernels.py --json "${OUT}/kernels.json" \
                --minutes "$((LIMIT_MINUTES - 2))"
            ;;
        tiles)
            limited python benchmarks/kernels.py --json "${OUT}/tiles.json" --tune \
                --tokens 65536 --block-sizes 256 --minutes "$((LIMIT_MINUTES - 2))"
            ;;
        profile)
            limited sparse-balance profile --check -o "${OUT}/cost_table.json" -- "${LAYER_ARGS[@]}"
            ;;
        quickstart)
            limited scripts/quickstart.sh --gpu &&
                cp runs/quickstart_gpu/summary.json "${OUT}/quickstart.json"
            ;;
        *) fail "unknown stage $1: tests, kernels, tiles, profile or quickstart" ;;
    esac
}

limited() { timeout --kill-after=20s "${LIMIT_MINUTES}m" "$@"; }

RESULTS=()
FAILED=0
for name in "${STAGES[@]}"; do
    say "===== ${name}"
    begin="${SECONDS}"
    status=0
    (stage "${name}") 2>&1 | tee "${OUT}/${name}.log" || status=$?
    RESULTS+=("$(printf '%-12s status %-4s %s s' "${name}" "${status}" "$((SECONDS - begin))")")
    ((status == 0)) || FAILED=1
done
printf '%s\n' '===== results' "${RESULTS[@]}"
exit "${FAILED}"
