#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Supervised fine-tuning of Qwen3-30B-A3B, 128 experts, on long conversations on a cluster: DP 16 and
# TP 4 with sequence parallelism on eight nodes of eight GPUs. Expert parallelism 8 spreads the
# experts of a layer over the GPUs of a node. The steps are those of examples/cluster_7b_sft.sh.
#
#   examples/cluster_qwen3_30b_a3b_sft.sh prepare   once: conversations to .bin and .idx files
#   examples/cluster_qwen3_30b_a3b_sft.sh convert   once: Hugging Face weights to a checkpoint
#   examples/cluster_qwen3_30b_a3b_sft.sh plan      once: what these conversations would take
#   examples/cluster_qwen3_30b_a3b_sft.sh profile   once, on GPUs as in training: the cost table
#   examples/cluster_qwen3_30b_a3b_sft.sh sensitivity
#       once, on every node, for ATTENTION=sparse: which layers look things up
#   examples/cluster_qwen3_30b_a3b_sft.sh baseline  dense attention in order of arrival, to compare
#   examples/cluster_qwen3_30b_a3b_sft.sh           train, on every node with NODE_RANK, MASTER_ADDR
#
# It trains with dense attention and places samples so that ranks wait less; ATTENTION=sparse trains
# with block-sparse attention: the queries of a block share a list, and layers that look things up
# read more. Predicted for an H100: that pays for documents of more than 21,760 tokens (32 blocks
# of 256; counted, with sparse attention at 35 % of the peak and dense attention at 58 %; not measured).
#
# Other arguments are flags of training. What would train, checked and planned without a GPU:
#
#   COST_TABLE= NNODES=1 GPUS_PER_NODE=1 \
#       examples/cluster_qwen3_30b_a3b_sft.sh --sparse-balance-dry-run 64
#
# Every variable below can be set from outside. Loss is on the assistant's turns only. Memory and
# speed of this script were not measured; a dry run counts the memory and does not try it.

# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NNODES="${NNODES:-8}"
TP="${TP:-4}" # at most the 4 KV heads
PP="${PP:-1}"
EP="${EP:-8}"
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}"
SEQ_LENGTH="${SEQ_LENGTH:-32768}" # longest conversation; above 40,960 with YaRN, up to 131,072
TRAIN_ITERS="${TRAIN_ITERS:-469}" # 3 epochs of 10,000 conversations

MODEL="${MODEL:-Qwen3-30B-A3B}" # a local copy of the model: config.json, safetensors, tokenizer
MODEL_ARGS=(
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --num-query-groups 4
    --qk-layernorm
    --padded-vocab-size 151936
    --untie-embeddings-and-output-weights
    --num-experts 128
    --moe-ffn-hidden-size 768
    --moe-router-topk 8
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 1e-3
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --expert-model-parallel-size "${EP}"
    --expert-tensor-parallel-size 1
)
if ((SEQ_LENGTH > 40960)); then
    # The model was pretrained at 32,768 tokens, and its model card scales RoPE by 4 beyond. What
    # `convert to-hf` is given as config.json needs the same rope_scaling.
    MODEL_ARGS+=(
        --position-embedding-type yarn
        --rotary-scaling-factor 4.0
        --yarn-original-max-position-embeddings 32768
        --yarn-beta-fast 32.0
        --yarn-beta-slow 1.0
        --mscale 1.0
        --mscale-all-dim 0.0
    )
fi

fine_tune_qwen "$@"
