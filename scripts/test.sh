#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets itself up and runs the tests, two files at a time; arguments go to pytest:
#
#   scripts/test.sh                          all of them
#   scripts/test.sh -m "not distributed"     without those that start torchrun
#   scripts/test.sh tests/plan -k batching   some
#   scripts/test.sh -n 0 --pdb               one after another, in this process

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
set_up tools data test
export OMP_NUM_THREADS=1 # files and training ranks run side by side
# In the order of tests/conftest.py, which begins with the longest files.
exec python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations=10 "$@"
