#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A mixture of experts on two CPU ranks: the model of cpu_quickstart.sh with four experts, two of them
# on each rank. Ranks wait for one another in every layer. Two runs over the same samples, in order of
# arrival at fixed budgets and balanced, and a table of both. Downloads nothing; takes minutes.
#
#   examples/cpu_experts.sh          every step
#   examples/cpu_experts.sh STEP     one of: prepare, baseline, balance, compare

set -euo pipefail

export RUN="${RUN:-runs/cpu_experts}" TRAIN_ITERS="${TRAIN_ITERS:-20}"
export DATA="${DATA:-${RUN}/data/python-stdlib}"
QUICKSTART="$(dirname "${BASH_SOURCE[0]}")/cpu_quickstart.sh"

EXPERT_ARGS=(
    --num-experts 4
    --moe-ffn-hidden-size 192
    --moe-router-topk 2
    --moe-token-dispatcher-type alltoall
    --expert-model-parallel-size 2
)

prepare() { "${QUICKSTART}" prepare; }

baseline() {
    "${QUICKSTART}" "${EXPERT_ARGS[@]}" --sparse-balance-log-dir "${RUN}/baseline" \
        --sparse-balance-batching arrival --sparse-balance-tuning off "$@"
}

balance() {
    "${QUICKSTART}" "${EXPERT_ARGS[@]}" --sparse-balance-log-dir "${RUN}/sparse_balance" "$@"
}

# With experts, the waiting that is measured leaves out what ranks wait inside a layer; the table
# says so, and `sparse-balance report` draws both.
compare() {
    sparse-balance summary --baseline "${RUN}/baseline" --run "${RUN}/sparse_balance"
}

case "${1:-}" in
    '') prepare && baseline && balance && compare ;;
    prepare | baseline | balance | compare) "$@" ;;
    *) echo "error: $1: no such step; the first lines of this script name them" >&2 && exit 2 ;;
esac
