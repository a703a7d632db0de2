#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Predicted steps of a public recipe of Megatron-Bridge: Qwen3-30B-A3B on 131,072 tokens, 16 GPUs,
# context and expert parallelism 16, global batch 32. Its layout comes first, then smaller
# context-parallel sizes. Lengths are generated (longalign-128k), not those of its data set.
#
#   benchmarks/recipe_128k.sh [--json]
#   SELECTION=previous-block STEPS=8 benchmarks/recipe_128k.sh

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

STEPS="${STEPS:-20}"
lengths="$(mktemp)"
trap 'rm -f "${lengths}"' EXIT
python -c "
from simulated.lengths import LENGTHS
print(*LENGTHS['longalign-128k'](32 * ${STEPS}, 0), sep='\n')
" >"${lengths}"

predict() {
    sparse-balance plan --gpus 16 --steps "${STEPS}" --lengths "${lengths}" "$@" -- \
        "${FLAGS[@]}" --context-parallel-size "${CP:-16}"
}

FLAGS=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
    --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128
    --qk-layernorm --swiglu --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --vocab-size 151936 --tokenizer-type NullTokenizer --untie-embeddings-and-output-weights
    --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --expert-model-parallel-size 16 --expert-tensor-parallel-size 1
    --seq-length 131072 --max-position-embeddings 131072
    --micro-batch-size 1 --global-batch-size 32 --train-iters 100 --bf16
    --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --sparse-balance --sparse-balance-block-size 256
    --sparse-balance-selection "${SELECTION:-token-query-head}"
)

predict "$@"
predict --vary 'context-parallel-size 4 8 16' "$@"
