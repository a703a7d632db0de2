#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts of GPU jobs beside it: copy it with them. It sets what they have in common,
# and `run_example ARGUMENTS...` runs one step of a script, or training.
#
# A script sets NNODES, TP, PP, GLOBAL_BATCH_SIZE, SEQ_LENGTH and TRAIN_ITERS, the arrays named below
# that end in _ARGS, and the function `prepare`.

set -euo pipefail

NODE_RANK="${NODE_RANK:-0}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
MASTER_PORT="${MASTER_PORT:-29500}"
MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}" # samples per packed sequence, on average

RUN="${RUN:-runs/$(basename "$0" .sh)}"
WEIGHTS="${WEIGHTS:-${RUN}/weights}"
LOG="${LOG:-${RUN}/log}"
COST_TABLE="${COST_TABLE-${RUN}/cost_table.json}"
SENSITIVITY="${SENSITIVITY-${RUN}/sensitivity.json}" # of layers of trained weights, for sparse attention

export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it with tensor parallelism
# Packed sequences have other lengths in every step, which fragments memory without it. Torch before
# 2.9 reads the first name, later ones the second.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF}}"

run_example() {
    local flags=(
        --position-embedding-type rope
        "${MODEL_ARGS[@]}"
        --group-query-attention
        --kv-channels "${KV_CHANNELS:-128}"
        --disable-bias-linear
        --swiglu
        --normalization RMSNorm
        --seq-length "${SEQ_LENGTH}"
        --max-position-embeddings "${SEQ_LENGTH}"
        --attention-dropout 0
        --hidden-dropout 0

        --tensor-model-parallel-size "${TP}"
        --pipeline-model-parallel-size "${PP}"
        --sequence-parallel
        --use-distributed-optimizer
        --overlap-grad-reduce
        --overlap-param-gather

        --micro-batch-size "${MICRO_BATCH_SIZE}"
        --global-batch-size "${GLOBAL_BATCH_SIZE}"
        --train-iters "${TRAIN_ITERS}"
        --bf16
        --lr-decay-style cosine
        --clip-grad 1.0
        --recompute-granularity full
        --recompute-method uniform
        --recompute-num-layers 1
        "${TRAINING_ARGS[@]}"

        --tokenizer-type HuggingFaceTokenizer
        "${DATA_ARGS[@]}"

        --log-interval 1
        --tensorboard-dir "${RUN}/tensorboard"
        --load "${RUN}/checkpoints"
        --save "${RUN}/checkpoints"

        --sparse-balance
        --sparse-balance-block-size 256
        --sparse-balance-log-dir "${LOG}"
        "${SPARSE_BALANCE_ARGS[@]}"
    )
    # ATTENTION=exact: dense, as without the plugin. ATTENTION=sparse: with the script's SPARSE_ARGS,
    # and budgets by layer where it starts from trained weights.
    local attention=(--sparse-balance-mode exact)
    if [[ "${ATTENTION:-exact}" != exact ]]; then
        attention=("${SPARSE_ARGS[@]}")
        [[ -z "${MODEL:-}" || -z "${SENSITIVITY}" ]] ||
            attention+=(--sparse-balance-sensitivity "${SENSITIVITY}")
    fi
    local table=()
    [[ -z "${COST_TABLE}" ]] || table=(--sparse-balance-cost-table "${COST_TABLE}")
    case "${1:-}" in
        prepare) prepare ;;
        convert)
            sparse-balance convert from-hf "${MODEL:?this script has no MODEL to convert}" \
                --output "${WEIGHTS}"
            ;;
        plan)
            # Until there is a table, costs are counted.
            [[ -f "${COST_TABLE}" ]] || table=()
            sparse-balance plan --gpus "$((NNODES * GPUS_PER_NODE))" "${@:2}" -- \
                "${flags[@]}" "${SPARSE_ARGS[@]}" "${table[@]}"
            ;;
        profile)
            sparse-balance profile --check -o "${COST_TABLE}" "${@:2}" -- \
                "${flags[@]}" "${SPARSE_ARGS[@]}"
            ;;
        sensitivity)
            launch sparsebalance_megatron.cli sensitivity -o "${SENSITIVITY}" -- \
                "${flags[@]}" "${SPARSE_ARGS[@]}" "${@:2}"
            ;;
        baseline)
            train "${flags[@]}" "${table[@]}" --sparse-balance-mode exact \
                --sparse-balance-batching arrival \
                --sparse-balance-log-dir "${LOG}_baseline" \
                --tensorboard-dir "${RUN}/tensorboard_baseline" \
                --load "${RUN}/checkpoints_baseline" --save "${RUN}/checkpoints_baseline" "${@:2}"
            ;;
        *) train "${flags[@]}" "${attention[@]}" "${table[@]}" "$@" ;;
    esac
}

train() {
    if [[ " $* " == *' --sparse-balance-dry-run'* ]]; then
        # One process plans for all ranks, and its error is the last line.
        WORLD_SIZE=$((NNODES * GPUS_PER_NODE)) python -m sparsebalance_megatron.pretrain_gpt "$@"
        return
    fi
    launch sparsebalance_megatron.pretrain_gpt "$@"
}

launch() {
    torchrun --nnodes "${NNODES}" --node-rank "${NODE_RANK}" --nproc-per-node "${GPUS_PER_NODE}" \
        --master-addr "${MASTER_ADDR}" --master-port "${MASTER_PORT}" -m "$@"
}

# The steps of supervised fine-tuning of Qwen2.5 and Qwen3 on conversations, and their flags.
fine_tune_qwen() {
    CONVERSATIONS="${CONVERSATIONS:-conversations.jsonl}" # one {"messages": [..]} per line
    DATA="${DATA:-${RUN}/data/conversations}"
    MODEL_ARGS+=(--norm-epsilon 1e-6 --rotary-base 1000000)
    TRAINING_ARGS=(--lr 1e-6 --min-lr 0 --lr-warmup-fraction 0.2 --weight-decay 0)
    TRAINING_ARGS+=(--pretrained-checkpoint "${WEIGHTS}" --save-interval 500)
    TRAINING_ARGS+=(--eval-iters 0 --eval-interval 1000000)
    DATA_ARGS=(--data-path "${DATA}" --split '100,0,0' --tokenizer-model "${MODEL}")
    SPARSE_BALANCE_ARGS=()
    SPARSE_ARGS=(--sparse-balance-base-budget 32 --sparse-balance-selection previous-block)
    run_example "$@"
}

# Steps of fine_tune_qwen; other scripts have their own.
prepare() {
    # The chat template closes the last turn; no end-of-document token is added.
    sparse-balance prepare-data --input "${CONVERSATIONS}" --tokenizer "${MODEL}" \
        --no-append-eod --output-prefix "${DATA}"
}
