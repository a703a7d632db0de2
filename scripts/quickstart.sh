#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets itself up, then trains a small GPT on two pipeline stages four times, on the same samples in the
# same global batches: with dense attention in order of arrival, as without the plugin; with dense
# attention where the plugin places samples (mode exact); with block-sparse attention by the paper's
# rule; and by the plugin's. The runs train steps in turn, so that whatever else the machine does
# disturbs all alike. Ends with what made the difference, a table of all and
# runs/quickstart/summary.json.
#
#   scripts/quickstart.sh         two stages on two CPU cores; GPUs are hidden, so that every machine
#                                 runs the same thing
#   scripts/quickstart.sh --gpu   all visible GPUs, an even number, over NCCL, in
#                                 runs/quickstart_gpu; needs neither Transformer Engine nor apex

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
set_up tools data

export OMP_NUM_THREADS=1 # one core per rank
DEVICE_ARGS=(--sparse-balance-device auto)
if [[ "${1:-}" == --gpu ]]; then
    RANKS="$(python -c 'import torch; print(torch.cuda.device_count())')"
    ((RANKS && RANKS % 2 == 0)) ||
        fail "--gpu: ${RANKS} CUDA devices are visible, two stages need an even number; without it the quickstart runs on the CPU"
    RUNS=runs/quickstart_gpu
    DEVICE_ARGS+=(
        --bf16
        --transformer-impl local
        --no-gradient-accumulation-fusion
        --no-persist-layer-norm
        --no-bias-swiglu-fusion
        --no-bias-dropout-fusion
        --no-rope-fusion
    )
elif (($#)); then
    fail "unknown argument $1: --gpu, or none"
else
    export CUDA_VISIBLE_DEVICES=''
    RANKS=2
    RUNS=runs/quickstart
fi
DATA="${RUNS}/data/python-stdlib"
COST_TABLE="${RUNS}/cost_table.json"

MODEL_ARGS=(
    --num-layers 2
    --hidden-size 128
    --ffn-hidden-size 384
    --num-attention-heads 4
    --group-query-attention
    --num-query-groups 2
    --kv-channels 32
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 8
    --train-iters 10
    --lr 2e-3
    --lr-decay-style constant
    --lr-warmup-iters 5
    --clip-grad 1.0
    --seed 1234
    --log-interval 1
    --eval-iters 0
    --eval-interval 1000
)

DATA_ARGS=(
    --data-path "${DATA}"
    --split '100,0,0'
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "${DATA}_tokenizer"
)

SPARSE_BALANCE_ARGS=(
    --sparse-balance
    --sparse-balance-block-size 256
)
BUDGET=(--sparse-balance-base-budget 4)
EXACT=(--sparse-balance-mode exact)

TRAINING_FLAGS=(
    "${MODEL_ARGS[@]}"
    "${TRAINING_ARGS[@]}"
    "${DATA_ARGS[@]}"
    "${SPARSE_BALANCE_ARGS[@]}"
    "${DEVICE_ARGS[@]}"
)

prepare_data() {
    if [[ -f "${DATA}.json" ]]; then # written last, so the rest is complete
        say "data: ${DATA}, prepared before"
        return
    fi
    say "data: preparing the Python standard library's sources"
    python examples/stdlib_documents.py "${DATA}.jsonl"
    python examples/train_tokenizer.py --input "${DATA}.jsonl" --vocab-size 2048 \
        --output "${DATA}_tokenizer"
    sparse-balance prepare-data --input "${DATA}.jsonl" --tokenizer "${DATA}_tokenizer" \
        --output-prefix "${DATA}" --overwrite
}

measure_costs() {
    say "costs: measuring the model's layers on this machine"
    sparse-balance profile --quick -o "${COST_TABLE}" -- \
        "${TRAINING_FLAGS[@]}" "${BUDGET[@]}" --sparse-balance-layer-budgets dense:all
}

# train NAME PLACE FLAG...: the whole output goes to a file, Megatron's log lines to the terminal too.
train() {
    local name="$1" place="$2" directory="${RUNS}/$1" status=0
    shift 2
    mkdir -p "${directory}"
    say "training: ${directory} (all output in ${directory}/train.log)"
    torchrun --nproc-per-node "${RANKS}" --standalone --local-addr 127.0.0.1 \
        benchmarks/alternating_run.py "${RUNS}/alternation" "${place}" 4 \
        "${TRAINING_FLAGS[@]}" --pipeline-model-parallel-size 2 \
        --sparse-balance-cost-table "${COST_TABLE}" \
        --sparse-balance-log-dir "${directory}" "$@" 2>&1 |
        tee "${directory}/train.log" | log_lines "${name}" || status=$?
    if ((status)); then
        tail -n 40 "${directory}/train.log" >&2
        fail "training failed with status ${status}: the end of ${directory}/train.log is above"
    fi
}

# Times of Megatron's own lines contain the other runs' steps: they are left out here.
log_lines() {
    awk -v name="$1" '/iteration +[0-9]+\/|^sparse.balance/ {
        gsub(/ *elapsed time per iteration \(ms\): [0-9.]+ \|/, ""); print name ": " $0; fflush()
    }'
}

prepare_data
measure_costs
set -m # every run is a process group of its own, so that none is left behind where one fails
trap 'jobs -p | sed s/^/-/ | xargs -r kill -- 2>/dev/null || true; wait' EXIT
train dense 0 "${EXACT[@]}" --sparse-balance-batching arrival &
train exact 1 "${EXACT[@]}" &
train paper 2 "${BUDGET[@]}" --sparse-balance-mode paper &
train sparse_balance 3 "${BUDGET[@]}" --sparse-balance-mode default &
for _ in 1 2 3 4; do wait -n; done
sparse-balance summary --baseline "${RUNS}/dense" --run "${RUNS}/sparse_balance" \
    --beside "${RUNS}/exact" "${RUNS}/paper" \
    -o "${RUNS}/summary.json" --picture "${RUNS}/timeline.svg"
