#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Continued pretraining of Llama-3.1-8B at 131,072 tokens on a blend of two sources on a cluster:
# DP 2, context parallelism 4, PP 2 and TP 4 with sequence parallelism on eight nodes of eight
# GPUs. docs/CLUSTER.md goes through it step by step.
#
#   examples/cluster_8b_128k.sh prepare   once: two sources to .bin and .idx files
#   examples/cluster_8b_128k.sh convert   once: Hugging Face weights to a Megatron checkpoint
#   examples/cluster_8b_128k.sh advise    once: settings for this blend, without a GPU
#   examples/cluster_8b_128k.sh profile   once, on a GPU as in training: the cost table
#   examples/cluster_8b_128k.sh baseline  train with fixed budgets in order of arrival, to compare
#   examples/cluster_8b_128k.sh           train, on every node with NODE_RANK and MASTER_ADDR
#
# Other arguments are flags of training. What would train, checked and planned without a GPU:
#
#   COST_TABLE=auto NNODES=1 GPUS_PER_NODE=1 \
#       examples/cluster_8b_128k.sh --sparse-balance-dry-run 64
#
# Rows lie on 1 to 8 ranks as the plan decides (docs/CONTEXT_PARALLEL.md). Every variable below can
# be set from outside; BLEND is what --data-path takes, one prefix or weights with prefixes. Memory
# and speed of this script were not measured; a dry run counts the memory and does not try it.

set -euo pipefail

NNODES="${NNODES:-8}"
NODE_RANK="${NODE_RANK:-0}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
MASTER_PORT="${MASTER_PORT:-29500}"

TP="${TP:-4}"
PP="${PP:-2}"
CP="${CP:-4}"
MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}"
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}"
SEQ_LENGTH="${SEQ_LENGTH:-131072}"
TRAIN_ITERS="${TRAIN_ITERS:-1000}"

MODEL="${MODEL:-Llama-3.1-8B}" # a local copy of the model: config.json, safetensors, tokenizer
LONG_DOCUMENTS="${LONG_DOCUMENTS:-long.jsonl}"    # one {"text": ".."} per line
SHORT_DOCUMENTS="${SHORT_DOCUMENTS:-short.jsonl}" # one {"text": ".."} per line
RUN="${RUN:-runs/cluster_8b_128k}"
DATA="${DATA:-${RUN}/data}"
read -r -a BLEND <<<"${BLEND:-0.7 ${DATA}/long 0.3 ${DATA}/short}"
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
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --position-embedding-type rope
    --rotary-base 500000
    --use-rope-scaling
    --rope-scaling-factor 8
    --padded-vocab-size 128256
    --untie-embeddings-and-output-weights
    --seq-length "${SEQ_LENGTH}"
    --max-position-embeddings "${SEQ_LENGTH}"
    --attention-dropout 0
    --hidden-dropout 0
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "${TP}"
    --pipeline-model-parallel-size "${PP}"
    --context-parallel-size "${CP}"
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
    --lr 1e-5
    --min-lr 0
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)

DATA_ARGS=(
    --data-path "${BLEND[@]}"
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
    --sparse-balance-base-budget 64
    --sparse-balance-context-parallel dynamic
    --sparse-balance-overlong split
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
        sparse-balance prepare-data --input "${LONG_DOCUMENTS}" --tokenizer "${MODEL}" \
            --output-prefix "${DATA}/long"
        sparse-balance prepare-data --input "${SHORT_DOCUMENTS}" --tokenizer "${MODEL}" \
            --output-prefix "${DATA}/short"
        ;;
    convert)
        sparse-balance convert from-hf "${MODEL}" --output "${WEIGHTS}"
        ;;
    advise)
        sparse-balance advise --data-path "${BLEND[@]}" --model "${MODEL}" --seq-length "${SEQ_LENGTH}" \
            --gpus "$((NNODES * GPUS_PER_NODE))" --tp "${TP}" --pp "${PP}" --recompute full \
            --context-parallel-sizes 1 2 "${CP}" --micro-batches 8 16 32 \
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
