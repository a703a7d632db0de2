#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets itself up and runs a short leg of the tests under a commit of Megatron-LM's main branch, which
# calls itself megatron-core 0.20.0 and is on no package index. It is installed beside the
# environment and comes first on PYTHONPATH, which processes started by the tests inherit.
# Arguments go to pytest.
#
#   MEGATRON_LM=file:///path/to/Megatron-LM   a clone to take the commit from, instead of GitHub

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

COMMIT=d98e8a64ddf34856e74b24714e3bedb2f5a39553 # 2026-08-22
VERSION=0.20.0

# What knows Megatron's symbols and flags; flag-off identity; checkpoints; two layouts of one model.
LEG=(
    tests/megatron/test_compat.py
    tests/test_support.py
    tests/megatron/test_arguments.py
    tests/run/test_flag_off.py
    tests/run/test_resume.py::test_checkpoints_go_from_megatron_to_the_plugin_to_two_ranks_and_back
    "tests/run/test_matrix.py::test_layout_trains_to_the_losses_of_one_rank[layers-pipeline]"
    "tests/run/test_matrix.py::test_layout_trains_to_the_losses_of_one_rank[shared]"
)

check_version() {
    python - "${VERSION}" <<'PYTHON' || fail "tests would run under another megatron-core"
import sys

import megatron.training.training
from megatron.core.package_info import __version__

found = __version__.partition("+")[0]
print(f"megatron-core {found} from {megatron.training.training.__file__}")
sys.exit(found != sys.argv[1])
PYTHON
}

set_up tools data test
install_beside "megatron-core-${COMMIT}" \
    "git+${MEGATRON_LM:-https://github.com/NVIDIA/Megatron-LM}@${COMMIT}"
check_version
export OMP_NUM_THREADS=1
exec python -m pytest --numprocesses 2 --dist loadfile --durations=10 "${LEG[@]}" "$@"
