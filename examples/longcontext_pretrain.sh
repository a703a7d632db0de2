#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Pretraining of a 1.3B GPT from scratch on documents of up to 128K tokens: DP 2, PP 2 and TP 2 with
# sequence parallelism on one node of eight GPUs, validated every 200 steps.
#
#   examples/longcontext_pretrain.sh prepare   once: documents to .bin and .idx files
#   examples/longcontext_pretrain.sh profile   once, on a GPU as in training: the cost table
#   examples/longcontext_pretrain.sh           train
#
# It trains with dense attention and places samples so that ranks wait less; ATTENTION=sparse trains
# with block-sparse attention. Other arguments are flags of training. What would train, checked and planned without a GPU
# (COST_TABLE= as long as there is no table):
#
#   COST_TABLE= GPUS_PER_NODE=1 examples/longcontext_pretrain.sh --sparse-balance-dry-run 8
#
# Every variable below can be set from outside. Longer documents are split, none is cut off. Memory
# and speed of this script were not measured; a dry run checks neither.

# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NNODES="${NNODES:-1}"
TP="${TP:-2}"
PP="${PP:-2}"
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}"
SEQ_LENGTH="${SEQ_LENGTH:-131072}"
TRAIN_ITERS="${TRAIN_ITERS:-20000}"

TOKENIZER="${TOKENIZER:-tokenizer}" # a directory with tokenizer.json and tokenizer_config.json
DOCUMENTS="${DOCUMENTS:-documents.jsonl}" # {"text": ".."} per line
DATA="${DATA:-${RUN}/data/documents}"

MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --ffn-hidden-size 5632
    --num-attention-heads 16
    --num-query-groups 4
    --rotary-base 5000000
    --untie-embeddings-and-output-weights
)
TRAINING_ARGS=(
    --lr 3e-4
    --min-lr 3e-5
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --adam-beta2 0.95
    --save-interval 1000
    --eval-interval 200
    --eval-iters 4
)
DATA_ARGS=(
    --data-path "${DATA}"
    --split '99,1,0'
    --tokenizer-model "${TOKENIZER}"
)
SPARSE_BALANCE_ARGS=(--sparse-balance-overlong split)
SPARSE_ARGS=(--sparse-balance-base-budget 64)

prepare() {
    sparse-balance prepare-data --input "${DOCUMENTS}" --tokenizer "${TOKENIZER}" \
        --output-prefix "${DATA}"
}

run_example "$@"
