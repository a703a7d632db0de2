#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What continuous integration cannot run, because it has no GPU: the stages named, or all, the most
# valuable first: the first three decide in ten minutes. Together they take 40 minutes at most, none
# more than 9. Logs and results are in
# DIRECTORY; a stage that is cut off leaves what it has found, and goes on there when started again.
# A failed stage stops no other; docs/FIRST_GPU.md says after which to stop. A table of all results
# is printed at the end, and kept as table.txt. `--check` lists the stages and their limits, and runs nothing.
#
#   scripts/gpu_check.sh DIRECTORY [STAGE...]
#
#   environment  versions, device, the kernels' check of themselves at five head dims: environment.log
#   rates        benchmarks/attention_rates.py: kernels right, and worth it; attention_rates.json
#   step         a training step of dense, exact and ours: step.json
#   tests        pytest -m gpu: tests.jsonl, a line per test
#   quickstart   Megatron's loop over NCCL, one rank per GPU: quickstart.json
#   profile      a cost table for layers with the attention of Qwen2.5-3B, checked: cost_table.json
#   kernels      benchmarks/kernels.py: kernels.json
#   end_to_end   benchmarks/end_to_end.py --layout gpu-dp4: end_to_end.json
#   sanitizer    compute-sanitizer's memcheck and racecheck on small cases: sanitizer_*.jsonl
#   tiles        benchmarks/kernels.py --tune: tiles.json
#
# environment.log has device and versions of what the others leave.
# Where nothing can be downloaded, install megatron-core from a wheel and this package with pip's
# --no-index --no-deps, and set SETUP=skip.

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
declare -A LIMIT_MINUTES=(
    [environment]=1 [rates]=6 [step]=3 [tests]=6 [quickstart]=3 [profile]=4 [kernels]=6
    [end_to_end]=5 [sanitizer]=2 [tiles]=3
)
ORDER=(environment rates step tests quickstart profile kernels end_to_end sanitizer tiles)
(($#)) || fail "name a directory for logs and results: $0 DIRECTORY [STAGE...]"
if [[ "$1" == --check ]]; then
    for name in "${ORDER[@]}"; do printf '%s %s\n' "${name}" "${LIMIT_MINUTES[${name}]}"; done
    exit
fi
mkdir -p "$1"
OUT="$(cd "$1" && pwd)"
shift
(($#)) || set -- "${ORDER[@]}"
STAGES=("$@")
for name in "${STAGES[@]}"; do
    [[ -n "${LIMIT_MINUTES[${name}]:-}" ]] || fail "unknown stage ${name}: one of ${ORDER[*]}"
done
set_up tools data test
python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    fail 'no CUDA device is visible'

LAYER_ARGS=(
    --num-layers 4
    --hidden-size 2048
    --ffn-hidden-size 11008
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 2
    --kv-channels 128
    --seq-length 65536
    --max-position-embeddings 65536
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --micro-batch-size 1
    --global-batch-size 8
    --train-iters 1
    --lr 1e-5
    --tokenizer-type NullTokenizer
    --vocab-size 151936
    --bf16
    --transformer-impl local
    --no-gradient-accumulation-fusion
    --no-persist-layer-norm
    --sparse-balance
    --sparse-balance-block-size 256
    --sparse-balance-base-budget 32
)

TABLE='
import json, pathlib, sys

def kept(name):
    file = pathlib.Path(sys.argv[1]) / name
    return json.loads(file.read_text()) if file.exists() else {}

for case, results in kept("kernels.json").get("cases", {}).items():
    for name, found in results.items():
        if isinstance(found, dict):
            times = ["{} {:.2f} ms".format(key, each["median_ms"]) for key, each in found.items()
                     if isinstance(each, dict) and "median_ms" in each]
            print(case, name, found.get("error") or ", ".join(times), sep="\t")
'

stage() {
    local minutes="${LIMIT_MINUTES[$1]}"
    case "$1" in
        environment)
            limited "${minutes}m" sparse-balance env --check
            ;;
        rates)
            limited "${minutes}m" python benchmarks/attention_rates.py \
                --json "${OUT}/attention_rates.json" --minutes "$((minutes - 1))"
            ;;
        step)
            limited "${minutes}m" python benchmarks/end_to_end.py --layout gpu-dp4 \
                --variants dense exact ours --batches 1 --warm-up 1 --minutes "$((minutes - 1))" \
                --json "${OUT}/step.json" --directory "${OUT}/step"
            ;;
        tests)
            # Their files alone: to import all others takes a minute.
            mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
            limited "${minutes}m" python -m pytest "${files[@]}" -m gpu -q -p no:cacheprovider \
                --outcomes "${OUT}/tests.jsonl"
            ;;
        quickstart)
            limited "${minutes}m" scripts/quickstart.sh --gpu &&
                cp runs/quickstart_gpu/summary.json "${OUT}/quickstart.json"
            ;;
        profile)
            limited "${minutes}m" sparse-balance profile --check -o "${OUT}/cost_table.json" \
                -- "${LAYER_ARGS[@]}"
            ;;
        kernels)
            limited "${minutes}m" python benchmarks/kernels.py --json "${OUT}/kernels.json" \
                --resume --minutes "$((minutes - 1))"
            ;;
        end_to_end)
            limited "${minutes}m" python benchmarks/end_to_end.py --layout gpu-dp4 \
                --batches 10 --warm-up 4 --minutes "$((minutes - 2))" \
                --json "${OUT}/end_to_end.json" --directory "${OUT}/end_to_end"
            ;;
        sanitizer)
            if ! command -v compute-sanitizer >/dev/null; then
                say 'compute-sanitizer is not installed: left out'
                return
            fi
            for tool in memcheck racecheck; do
                limited "$((minutes * 30 - 5))s" compute-sanitizer --tool "${tool}" --error-exitcode 9 \
                    --target-processes all python -m pytest -m gpu -q -p no:cacheprovider \
                    tests/attention/kernels/triton/test_kernels.py -k 'full_tiles and 64-64' \
                    --outcomes "${OUT}/sanitizer_${tool}.jsonl" || return
            done
            ;;
        tiles)
            limited "${minutes}m" python benchmarks/kernels.py --json "${OUT}/tiles.json" --tune \
                --tokens 65536 --block-sizes 256 --selections token-kv-head previous-block \
                --resume --minutes "$((minutes - 1))"
            ;;
    esac
}

limited() { timeout --signal=INT --kill-after=20s "$1" "${@:2}"; }

RESULTS=()
FAILED=0
for name in "${STAGES[@]}"; do
    say "===== ${name}"
    begin="${SECONDS}"
    status=0
    (stage "${name}") 2>&1 | tee -a "${OUT}/${name}.log" || status=$?
    RESULTS+=("$(printf '%-12s status %-4s %s s' "${name}" "${status}" "$((SECONDS - begin))")")
    ((status == 0)) || FAILED=1
done
printf '%s\n' '===== results' "${RESULTS[@]}"
python -c "${TABLE}" "${OUT}" | tee "${OUT}/table.txt"
exit "${FAILED}"
