#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sourced by test_megatron_*.sh. `run_leg VERSION DIRECTORY REQUIREMENT [ARGUMENT...]` runs a short
# leg of the tests under another megatron-core than the environment's. REQUIREMENT, which pip
# understands, is installed beside the environment, in DIRECTORY, and comes first on PYTHONPATH,
# which processes started by the tests inherit. Arguments go to pytest.

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

# What knows Megatron's symbols and flags; flag-off identity; checkpoints; two layouts of one model.
LEG=(
    tests/test_compat.py
    tests/test_support.py
    tests/megatron/test_arguments.py
    tests/run/test_flag_off.py
    tests/run/test_resume.py::test_checkpoints_go_from_megatron_to_the_plugin_to_two_ranks_and_back
    "tests/run/test_matrix.py::test_layout_trains_to_the_losses_of_one_rank[pipeline]"
    "tests/run/test_matrix.py::test_layout_trains_to_the_losses_of_one_rank[wide]"
)

check_version() {
    python - "$1" <<'PYTHON' || fail "tests would run under another megatron-core"
import sys

import megatron.training.training
from megatron.core.package_info import __version__

found = __version__.partition("+")[0]
print(f"megatron-core {found} from {megatron.training.training.__file__}")
sys.exit(found != sys.argv[1])
PYTHON
}

run_leg() {
    local version="$1" directory="$2" requirement="$3"
    shift 3
    set_up tools data test
    install_beside "${directory}" "${requirement}"
    check_version "${version}"
    export OMP_NUM_THREADS=1
    exec python -m pytest --numprocesses 2 --dist loadfile --durations=10 "${LEG[@]}" "$@"
}
