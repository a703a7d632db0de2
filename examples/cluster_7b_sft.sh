#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Supervised fine-tuning of Qwen2.5-7B on long conversations on a cluster: DP 16 and TP 4 with sequence
# parallelism on eight nodes of eight GPUs. docs/CLUSTER.md goes through it step by step.
#
#   examples/cluster_7b_sft.sh prepare   once: conversations to .bin and .idx files
#   examples/cluster_7b_sft.sh convert   once: Hugging Face weights to a Megatron checkpoint
#   examples/cluster_7b_sft.sh plan      once: what these conversations would take, without a GPU
#   examples/cluster_7b_sft.sh profile   once, on a GPU as in training: the cost table
#   examples/cluster_7b_sft.sh sensitivity
#       once, on every node, for ATTENTION=sparse: which layers look things up
#   examples/cluster_7b_sft.sh baseline  train with dense attention in order of arrival, to compare
#   examples/cluster_7b_sft.sh           train, on every node with NODE_RANK and MASTER_ADDR
#
# It trains with dense attention and places samples so that ranks wait less; ATTENTION=sparse trains
# with block-sparse attention: the queries of a block share a list, and layers that look things up
# read more. Predicted for an H100: that pays for documents of more than 21,760 tokens (32 blocks
# of 256; counted, with sparse attention at 35 % of the peak and dense attention at 58 %; not measured).
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
