#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One balanced run of a small GPT on two CPU ranks, with nothing around it.
#
#   examples/cpu_quickstart.sh prepare   once: the standard library's sources, and a tokenizer
#   examples/cpu_quickstart.sh           train
#
# Other arguments are flags of training, such as --sparse-balance-dry-run. Every variable below can
# be set from outside.

set -euo pipefail

RUN="${RUN:-runs/cpu_quickstart}"
DATA="${DATA:-${RUN}/data/python-stdlib}"
TRAIN_ITERS="${TRAIN_ITERS:-20}"

export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1

LAUNCH=(torchrun --nproc-per-node 2 --standalone --local-addr 127.0.0.1)
if [[ " $* " == *' --sparse-balance-dry-run'* ]]; then
    # One process plans for both ranks, and its error is the last line.
    export WORLD_SIZE=2
    LAUNCH=(python)
fi

MODEL_ARGS=(
    --num-layers 3
    --hidden-size 128
    --ffn-hidden-size 384
    --num-attention-heads 4
    --group-query-attention
    --num-query-groups 2
    --kv-channels 32
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 8
    --train-iters "${TRAIN_ITERS}"
    --lr 2e-3
    --lr-decay-style constant
    --lr-warmup-iters 5
    --clip-grad 1.0
)

DATA_ARGS=(
    --data-path "${DATA}"
    --split '100,0,0'
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "${DATA}_tokenizer"
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 1
    --eval-iters 0
    --eval-interval 1000
)

# Without --sparse-balance-cost-table, costs are counted operations; `sparse-balance profile`
# measures them. Those of a GPU would have all documents here attended to densely.
SPARSE_BALANCE_ARGS=(
    --sparse-balance
    --sparse-balance-device cpu
    --sparse-balance-block-size 128
    --sparse-balance-base-budget 8
    --sparse-balance-dense-up-to 0
    --sparse-balance-log-dir "${RUN}/log"
)

case "${1:-}" in
    prepare)
        FOLDER="$(dirname "${BASH_SOURCE[0]}")"
        python "${FOLDER}/stdlib_documents.py" "${DATA}.jsonl"
        python "${FOLDER}/train_tokenizer.py" --input "${DATA}.jsonl" --vocab-size 2048 \
            --output "${DATA}_tokenizer"
        sparse-balance prepare-data --input "${DATA}.jsonl" --tokenizer "${DATA}_tokenizer" \
            --output-prefix "${DATA}"
        ;;
    *)
        "${LAUNCH[@]}" -m sparsebalance_megatron.pretrain_gpt \
            "${MODEL_ARGS[@]}" \
            "${TRAINING_ARGS[@]}" \
            "${DATA_ARGS[@]}" \
            "${EVAL_AND_LOGGING_ARGS[@]}" \
            "${SPARSE_BALANCE_ARGS[@]}" \
            "${@}"
        ;;
esac
