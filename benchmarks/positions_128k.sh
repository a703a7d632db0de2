#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Predicted steps of an 8B model on 131,072 tokens, 32 GPUs, with all positions and with planned
# ones, where cp_sizes are planned without a pipeline. Lengths are generated (longalign-128k).
#
#   benchmarks/positions_128k.sh [--json]

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

lengths="$(mktemp)"
trap 'rm -f "${lengths}"' EXIT
python -c "
from simulated.lengths import LENGTHS
print(*LENGTHS['longalign-128k'](512, 0), sep='\n')
" >"${lengths}"

for context_parallel_size in 4 8; do
    for positions in fixed planned; do
        echo "context-parallel size ${context_parallel_size}, positions=${positions}"
        sparse-balance plan --gpus 32 --steps 6 --lengths "${lengths}" "$@" -- \
            --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
            --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
            --kv-channels 128 --swiglu --disable-bias-linear --normalization RMSNorm \
            --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 \
            --vocab-size 128256 --tokenizer-type NullTokenizer \
            --untie-embeddings-and-output-weights \
            --tensor-model-parallel-size 4 --sequence-parallel \
            --context-parallel-size "${context_parallel_size}" \
            --seq-length 131072 --max-position-embeddings 131072 \
            --micro-batch-size 1 --global-batch-size 64 --train-iters 100 --bf16 \
            --use-distributed-optimizer \
            --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
            --sparse-balance --sparse-balance-block-size 256 \
            --sparse-balance-selection previous-block \
            --sparse-balance-config context-parallel=dynamic "positions=${positions}"
    done
done
