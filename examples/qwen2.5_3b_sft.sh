#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Supervised fine-tuning of Qwen2.5-3B on long conversations: DP 4, PP 4 and TP 2 with
# sequence parallelism on four nodes of eight GPUs, the layout of the paper's main runs.
#
#   examples/qwen2.5_3b_sft.sh prepare   once: conversations to .bin and .idx files
#   examples/qwen2.5_3b_sft.sh convert   once: Hugging Face weights to a Megatron checkpoint
#   examples/qwen2.5_3b_sft.sh profile   once, on a GPU as in training: the cost table
#   examples/qwen2.5_3b_sft.sh sensitivity
#       once, for ATTENTION=sparse: which layers look things up
#   examples/qwen2.5_3b_sft.sh           train, on every node with NODE_RANK and MASTER_ADDR
#
# It trains with dense attention and places samples so that ranks wait less; ATTENTION=sparse trains
# with block-sparse attention. Other arguments are flags of training. What would train, checked and planned without a GPU
# (COST_TABLE= as long as there is no table):
#
#   COST_TABLE= NNODES=1 GPUS_PER_NODE=1 \
#       examples/qwen2.5_3b_sft.sh --sparse-balance-dry-run 32
#
# One node, DP 2 and PP 4, the layout of the paper's ablation:
#
#   NNODES=1 TP=1 MICRO_BATCH_SIZE=2 examples/qwen2.5_3b_sft.sh
#
# Every variable below can be set from outside. Loss is on the assistant's turns only. Memory and
# speed of this script were not measured; a dry run checks neither.

# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NNODES="${NNODES:-4}"
TP="${TP:-2}"
PP="${PP:-4}"
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-16}"
SEQ_LENGTH="${SEQ_LENGTH:-65536}" # longest conversation; the model was pretrained at 32,768
TRAIN_ITERS="${TRAIN_ITERS:-1875}" # 3 epochs of 10,000 conversations

MODEL="${MODEL:-Qwen2.5-3B}" # a local copy of the model: config.json, safetensors, tokenizer
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 2048
    --ffn-hidden-size 11008
    --num-attention-heads 16
    --num-query-groups 2
    --add-qkv-bias
    --padded-vocab-size 151936
)

fine_tune_qwen "$@"
