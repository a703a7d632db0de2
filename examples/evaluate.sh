#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From training to scores, on two CPU cores: train the model of cpu_quickstart.sh so that engines
# could serve its attention, convert it, and score it with dense and with sparse attention on files
# that it was not trained on. Needs the extras data and evaluate; downloads nothing.
#
#   examples/evaluate.sh          every step
#   examples/evaluate.sh STEP     one of: prepare, train, convert, task, score
#
# FAMILY=qwen3 makes it a Qwen3, FAMILY=qwen3_moe a Qwen3 with four experts on two ranks.

set -euo pipefail

FAMILY="${FAMILY:-llama}"
export RUN="${RUN:-runs/evaluate_${FAMILY}}" TRAIN_ITERS="${TRAIN_ITERS:-60}"
export DATA="${DATA:-${RUN}/data/python-stdlib}"
QUICKSTART="$(dirname "${BASH_SOURCE[0]}")/cpu_quickstart.sh"
export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

# One list per token and KV head, blocks as large as a page of the engines' kernels, and a budget
# that never changes.
SERVABLE_ARGS=(
    --sparse-balance-selection token-kv-head
    --sparse-balance-block-size 128
    --sparse-balance-tuning off
)

# What a family adds to the flags of training and to config.json.
case "${FAMILY}" in
    llama) CLASS=Llama FAMILY_ARGS=() KEYS='' ;;
    qwen3) CLASS=Qwen3 FAMILY_ARGS=(--qk-layernorm) KEYS='' ;;
    qwen3_moe)
        CLASS=Qwen3Moe
        FAMILY_ARGS=(
            --qk-layernorm
            --num-experts 4
            --moe-ffn-hidden-size 192
            --moe-router-topk 2
            --moe-aux-loss-coeff 1e-3
            --moe-token-dispatcher-type alltoall
            --expert-model-parallel-size 2
        )
        KEYS='"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192,
  "norm_topk_prob": true,'
        ;;
    *) echo "error: FAMILY=${FAMILY}: give llama, qwen3 or qwen3_moe" >&2 && exit 2 ;;
esac

prepare() { "${QUICKSTART}" prepare; }

train() {
    "${QUICKSTART}" "${FAMILY_ARGS[@]}" "${SERVABLE_ARGS[@]}" \
        --save "${RUN}/checkpoints" --save-interval "${TRAIN_ITERS}" --ckpt-format torch_dist "$@"
}

# The model's config.json, and its tokenizer beside it.
convert() {
    mkdir -p "${RUN}/hf_config"
    cp "${DATA}"_tokenizer/* "${RUN}/hf_config"
    cat >"${RUN}/hf_config/config.json" <<JSON
{
  "architectures": ["${CLASS}ForCausalLM"],
  "model_type": "${FAMILY}",
  ${KEYS}
  "num_hidden_layers": 3,
  "hidden_size": 128,
  "intermediate_size": 384,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 32,
  "vocab_size": 2048,
  "max_position_embeddings": 8192,
  "rms_norm_eps": 1e-05,
  "dtype": "float32"
}
JSON
    sparse-balance convert to-hf "${RUN}/checkpoints" \
        --output "${RUN}/converted" --hf-config "${RUN}/hf_config"
}

# A task of lm-evaluation-harness: sources of numpy, which training has not seen.
task() {
    mkdir -p "${RUN}/task"
    python - "${RUN}/task" <<'PYTHON'
import json
import sys
from pathlib import Path

import numpy

folder, root = Path(sys.argv[1]).resolve(), Path(numpy.__file__).parent
files = [path for path in sorted(root.rglob("*.py")) if 12_000 < path.stat().st_size < 20_000]
files = files[:20]
lines = [json.dumps({"text": path.read_text("utf-8")}) for path in files]
(folder / "numpy.jsonl").write_text("\n".join(lines) + "\n")
(folder / "numpy_sources.yaml").write_text(f"""\
task: numpy_sources
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/numpy.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
""")
print(f"{len(files)} documents of numpy {numpy.__version__}")
PYTHON
}

score() {
    local reading
    for reading in sparse=False sparse=True sparse_topk_blocks=4; do
        python -m sparsebalance_megatron.evaluate run --model sparse-balance \
            --model_args "pretrained=${RUN}/converted,${reading}" --tasks numpy_sources \
            --include_path "${RUN}/task" --device cpu --batch_size 1 \
            --output_path "${RUN}/scores/${reading}.json"
    done
}

case "${1:-}" in
    '') prepare && train && convert && task && score ;;
    prepare | train | convert | task | score) "$@" ;;
    *) echo "error: $1: no such step; the first lines of this script name them" >&2 && exit 2 ;;
esac
