#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Pretraining of a 1.3B GPT from scratch on documents of up to 128K tokens: DP 2, PP 2 and TP 2 with
# sequence parallelism on one node of eight GPUs, validated every 200 steps.
#
#   examples/longcontext_pretrain.sh prepare   once: documents to .bin and .idx files
#   examples/longcontext_pretrain.sh profile   once, on a GPU as in training: the cost table
#   examples/longcontext_pretrain.sh           train
#
# Other arguments are flags of training. What would train, checked and planned without a GPU
# (COST_TABLE=auto as long as there is no table):
#
#   COST_TABLE=auto GPUS_PER_NODE=1 examples/longcontext_pretrain.sh --sparse-balance-dry-run 8
#
# Every variable below can be set from outside. Longer documents are split, none is cut off. Memory
# and speed of this script were not measured; a dry run checks neither.

set -euo pipefail

NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
MASTER_PORT="${MASTER_PORT:-29500}"

TP="${TP:-2}"
PP="${PP:-2}"
MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}" # documents per packed row, on average
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}"
SEQ_LENGTH="${SEQ_LENGTH:-131072}"
TRAIN_ITERS="${TRAIN_ITERS:-20000}"

TOKENIZER="${TOKENIZER:-tokenizer}" # a directory with tokenizer.json and tokenizer_config.json
DOCUMENTS="${DOCUMENTS:-documents.jsonl}" # {"text": ".."} per line
RUN="${RUN:-runs/longcontext_pretrain}"
DATA="${DATA:-${RUN}/data/documents}"
COST_TABLE="${COST_TABLE:-${RUN}/cost_table.json}"

export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it with tensor parallelism

DISTRIBUTED_ARGS=(
    --nnodes "${NNODES}"
    --node-rank "${NODE_RANK}"
    --nproc-per-node "${GPUS_PER_NODE}"
    --master-addr "${MASTER_ADDR}"
    --master-port "${MASTER_PORT}"
)

MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --ffn-hidden-size 5632
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --position-embedding-type rope
    --rotary-base 5000000
    --untie-embeddings-and-output-weights
    --seq-length "${SEQ_LENGTH}"
    --max-position-embeddings "${SEQ_LENGTH}"
    --attention-dropout 0
    --hidden-dropout 0
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "${TP}"
    --pipeline-model-parallel-size "${PP}"
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

TRAINING_ARGS=(
    --micro-batch-size "${MICRO_BATCH_SIZE}"
    --global-batch-size "${GLOBAL_BATCH_SIZE}"
    --train-iters "${TRAIN_ITERS}"
    --bf16
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)

DATA_ARGS=(
    --data-path "${DATA}"
    --split '99,1,0'
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "${TOKENIZER}"
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 1
    --eval-interval 200
    --eval-iters 4
    --tensorboard-dir "${RUN}/tensorboard"
    --load "${RUN}/checkpoints"
    --save "${RUN}/checkpoints"
    --save-interval 1000
)

SPARSE_BALANCE_ARGS=(
    --sparse-balance
    --sparse-balance-block-size 256
    --sparse-balance-base-budget 64
    --sparse-balance-overlong split
    --sparse-balance-cost-table "${COST_TABLE}"
    --sparse-balance-log-dir "${RUN}/log"
)

TRAINING_FLAGS=(
    "${MODEL_ARGS[@]}"
    "${MODEL_PARALLEL_ARGS[@]}"
    "${TRAINING_ARGS[@]}"
    "${DATA_ARGS[@]}"
    "${EVAL_AND_LOGGING_ARGS[@]}"
    "${SPARSE_BALANCE_ARGS[@]}"
)

case "${1:-}" in
    prepare)
        sparse-balance prepare-data --input "${DOCUMENTS}" --tokenizer "${TOKENIZER}" \
            --output-prefix "${DATA}"
        ;;
    profile)
        sparse-balance profile --check -o "${COST_TABLE}" "${@:2}" -- "${TRAINING_FLAGS[@]}"
        ;;
    *)
        torchrun "${DISTRIBUTED_ARGS[@]}" -m sparsebalance_megatron.pretrain_gpt \
            "${TRAINING_FLAGS[@]}" "${@}"
        ;;
esac
