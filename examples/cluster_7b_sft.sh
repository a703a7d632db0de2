#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Supervised fine-tuning of Qwen2.5-7B on long conversations on a cluster: DP 16 and TP 4 with sequence
# parallelism on eight nodes of eight GPUs. docs/CLUSTER.md goes through it step by step.
#
#   examples/cluster_7b_sft.sh prepare   once: conversations to .bin and .idx files
#   examples/cluster_7b_sft.sh convert   once: Hugging Face weights to a Megatron checkpoint
#   examples/cluster_7b_sft.sh plan      once: what these conversations would take, without a GPU
#   examples/cluster_7b_sft.sh profile   once, on a GPU as in training: the cost table
#   examples/cluster_7b_sft.sh baseline  train with dense attention in order of arrival, to compare
#   examples/cluster_7b_sft.sh           train, on every node with NODE_RANK and MASTER_ADDR
#
# It trains with dense attention and places samples so that ranks wait less; ATTENTION=sparse trains
# with block-sparse attention, which pays for long documents: `plan` says from which length on.
#
# Other arguments are flags of training. What would train, checked and planned without a GPU:
#
#   COST_TABLE= NNODES=1 GPUS_PER_NODE=1 \
#       examples/cluster_7b_sft.sh --sparse-balance-dry-run 64
#
# Every variable below can be set from outside. Loss is on the assistant's turns only. Memory and
# speed of this script were not measured; a dry run counts the memory and does not try it.

# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NNODES="${NNODES:-8}"
TP="${TP:-4}"
PP="${PP:-1}"
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}"
SEQ_LENGTH="${SEQ_LENGTH:-65536}" # longest conversation; the model was pretrained at 32,768
TRAIN_ITERS="${TRAIN_ITERS:-469}" # 3 epochs of 10,000 conversations

MODEL="${MODEL:-Qwen2.5-7B}" # a local copy of the model: config.json, safetensors, tokenizer
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --num-query-groups 4
    --add-qkv-bias
    --padded-vocab-size 152064
    --untie-embeddings-and-output-weights
)

fine_tune_qwen "$@"
