#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Continued pretraining of Llama-3.1-8B at 131,072 tokens on a blend of two sources on a cluster:
# DP 2, context parallelism 4, PP 2 and TP 4 with sequence parallelism on eight nodes of eight
# GPUs. docs/CLUSTER.md goes through it step by step.
#
#   examples/cluster_8b_128k.sh prepare   once: two sources to .bin and .idx files
#   examples/cluster_8b_128k.sh convert   once: Hugging Face weights to a Megatron checkpoint
#   examples/cluster_8b_128k.sh plan      once: what this blend would take, without a GPU
#   examples/cluster_8b_128k.sh profile   once, on a GPU as in training: the cost table
#   examples/cluster_8b_128k.sh sensitivity --context-parallel-size 1 --seq-length 32768
#       once, on every node, for ATTENTION=sparse: which layers look things up
#   examples/cluster_8b_128k.sh baseline  train with dense attention in order of arrival, to compare
#   examples/cluster_8b_128k.sh           train, on every node with NODE_RANK and MASTER_ADDR
#
# It trains with dense attention and places samples so that ranks wait less; ATTENTION=sparse trains
# with block-sparse attention: the queries of a block share a list, and layers that look things up
# read more. Predicted for an H100: that pays for documents of more than 44,032 tokens (64 blocks
# of 256; counted, with sparse attention at 35 % of the peak and dense attention at 58 %; not measured).
#
# Other arguments are flags of training. What would train, checked and planned without a GPU:
#
#   COST_TABLE= NNODES=1 GPUS_PER_NODE=1 \
#       examples/cluster_8b_128k.sh --sparse-balance-dry-run 64
#
# Rows lie on 1 to 8 ranks as the plan decides (docs/CONTEXT_PARALLEL.md). Every variable below can
# be set from outside; BLEND is what --data-path takes, one prefix or weights with prefixes. The layout
# was chosen to show context parallelism; `plan --vary` compares others. Memory and speed of this
# script were not measured; a dry run counts the memory and does not try it.

# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NNODES="${NNODES:-8}"
TP="${TP:-4}"
PP="${PP:-2}"
CP="${CP:-4}"
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}"
SEQ_LENGTH="${SEQ_LENGTH:-131072}"
TRAIN_ITERS="${TRAIN_ITERS:-1000}"

MODEL="${MODEL:-Llama-3.1-8B}" # a local copy of the model: config.json, safetensors, tokenizer
LONG_DOCUMENTS="${LONG_DOCUMENTS:-long.jsonl}"    # one {"text": ".."} per line
SHORT_DOCUMENTS="${SHORT_DOCUMENTS:-short.jsonl}" # one {"text": ".."} per line
DATA="${DATA:-${RUN}/data}"
read -r -a BLEND <<<"${BLEND:-0.7 ${DATA}/long 0.3 ${DATA}/short}"

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --num-query-groups 8
    --norm-epsilon 1e-5
    --rotary-base 500000
    --use-rope-scaling
    --rope-scaling-factor 8
    --padded-vocab-size 128256
    --untie-embeddings-and-output-weights
    --context-parallel-size "${CP}"
)
TRAINING_ARGS=(
    --lr 1e-5
    --min-lr 0
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --adam-beta2 0.95
    --pretrained-checkpoint "${WEIGHTS}"
    --save-interval 500
    --eval-iters 0
    --eval-interval 1000000
)
DATA_ARGS=(
    --data-path "${BLEND[@]}"
    --split '100,0,0'
    --tokenizer-model "${MODEL}"
)
SPARSE_BALANCE_ARGS=(
    --sparse-balance-config context-parallel=dynamic
    --sparse-balance-overlong split
)
SPARSE_ARGS=(--sparse-balance-base-budget 64 --sparse-balance-selection previous-block)

prepare() {
    sparse-balance prepare-data --input "${LONG_DOCUMENTS}" --tokenizer "${MODEL}" \
        --output-prefix "${DATA}/long"
    sparse-balance prepare-data --input "${SHORT_DOCUMENTS}" --tokenizer "${MODEL}" \
        --output-prefix "${DATA}/short"
}

run_example "$@"
