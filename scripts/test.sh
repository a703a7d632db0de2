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
set_up tools data docs evaluate test
export OMP_NUM_THREADS=1 # files and training ranks run side by side
TIER=(-m "not nightly")
case "${1:-}" in
    --fast) TIER=(-m unit) && shift ;;
    --all) TIER=(--damage 400) && shift ;;
esac
# In the order of tests/conftest.py, which begins with the longest files.
exec python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations=10 \
    "${TIER[@]}" "$@"
