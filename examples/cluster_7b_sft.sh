#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Supervised fine-tuning of Qwen2.5-7B on long conversations on a cluster: DP 8, PP 4 and TP 2 with
# sequence parallelism on eight nodes of eight GPUs. docs/CLUSTER.md goes through it step by step.
#
#   examples/cluster_7b_sft.sh prepare   once: conversations to .bin and .idx files
#   examples/cluster_7b_sft.sh convert   once: Hugging Face weights to a Megatron checkpoint
#   examples/cluster_7b_sft.sh advise    once: settings for these conversations, without a GPU
#   examples/cluster_7b_sft.sh profile   once, on a GPU as in training: the cost table
#   examples/cluster_7b_sft.sh baseline  train with fixed budgets in order of arrival, to compare
#   examples/cluster_7b_sft.sh           train, on every node with NODE_RANK and MASTER_ADDR
#
# Other arguments are flags of training. What would train, checked and planned without a GPU:
#
#   COST_TABLE=auto NNODES=1 GPUS_PER_NODE=1 \
#       examples/cluster_7b_sft.sh --sparse-balance-dry-run 64
#
# Every variable below can be set from outside. Loss is on the assistant's turns only. Memory and
# speed of this script were not measured; a dry run counts the memory and does not try it.

set -euo pipefail

NNODES="${NNODES:-8}"
NODE_RANK="${NODE_RANK:-0}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
MASTER_PORT="${MASTER_PORT:-29500}"

TP="${TP:-2}"
PP="${PP:-4}"
MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}"
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}"
SEQ_LENGTH="${SEQ_LENGTH:-65536}" # longest conversation; the model was pretrained at 32,768
TRAIN_ITERS="${TRAIN_ITERS:-469}" # 3 epochs of 10,000 conversations

MODEL="${MODEL:-Qwen2.5-7B}" # a local copy of the model: config.json, safetensors, tokenizer
CONVERSATIONS="${CONVERSATIONS:-conversations.jsonl}" # one {"messages": [..]} per line
RUN="${RUN:-runs/cluster_7b_sft}"
DATA="${DATA:-${RUN}/data/conversations}"
WEIGHTS="${WEIGHTS:-${RUN}/weights}"
LOG="${LOG:-${RUN}/log}"
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
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --add-qkv-bias
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --position-embedding-type rope
    --rotary-base 1000000
    --padded-vocab-size 152064
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
    --lr 1e-6
    --min-lr 0
    --lr-decay-style cosine
    --lr-warmup-fraction 0.2
    --weight-decay 0
    --clip-grad 1.0
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)

DATA_ARGS=(
    --data-path "${DATA}"
    --split '100,0,0'
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "${MODEL}"
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 1
    --eval-iters 0
    --eval-interval 1000000
    --tensorboard-dir "${RUN}/tensorboard"
    --pretrained-checkpoint "${WEIGHTS}"
    --load "${RUN}/checkpoints"
    --save "${RUN}/checkpoints"
    --save-interval 500
)

SPARSE_BALANCE_ARGS=(
    --sparse-balance
    --sparse-balance-block-size 256
    --sparse-balance-base-budget 32
    --sparse-balance-coverage-threshold 0.1
    --sparse-balance-cost-table "${COST_TABLE}"
    --sparse-balance-log-dir "${LOG}"
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
        # The chat template closes the last turn; no end-of-document token is added.
        sparse-balance prepare-data --input "${CONVERSATIONS}" --tokenizer "${MODEL}" \
            --no-append-eod --output-prefix "${DATA}"
        ;;
    convert)
        sparse-balance convert from-hf "${MODEL}" --output "${WEIGHTS}"
        ;;
    advise)
        sparse-balance advise --data-path "${DATA}" --model "${MODEL}" --seq-length "${SEQ_LENGTH}" \
            --gpus "$((NNODES * GPUS_PER_NODE))" --tp "${TP}" --pp "${PP}" --recompute full \
            --global-batch "${GLOBAL_BATCH_SIZE}" "${@:2}"
        ;;
    baseline)
        torchrun "${DISTRIBUTED_ARGS[@]}" -m sparsebalance_megatron.pretrain_gpt \
            "${TRAINING_FLAGS[@]}" --sparse-balance-batching arrival --sparse-balance-tuning off \
            --sparse-balance-log-dir "${LOG}_baseline" --tensorboard-dir "${RUN}/tensorboard_baseline" \
            --load "${RUN}/checkpoints_baseline" --save "${RUN}/checkpoints_baseline" "${@:2}"
        ;;
    profile)
        sparse-balance profile --check -o "${COST_TABLE}" "${@:2}" -- "${TRAINING_FLAGS[@]}"
        ;;
    *)
        torchrun "${DISTRIBUTED_ARGS[@]}" -m sparsebalance_megatron.pretrain_gpt \
            "${TRAINING_FLAGS[@]}" "${@}"
        ;;
esac
