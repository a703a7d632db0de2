#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets itself up and runs a short leg of the tests under megatron-core 0.18, the oldest that this
# package supports; the other tests run under the newest. It is installed beside the environment and
# comes first on PYTHONPATH, which processes started by the tests inherit. Arguments go to pytest.

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

MEGATRON_VERSION=0.18.2
MEGATRON_DIR="${VENV}/megatron-core-${MEGATRON_VERSION}"

install_megatron() {
    [[ -d "${MEGATRON_DIR}" ]] && return
    say "installing megatron-core ${MEGATRON_VERSION} into ${MEGATRON_DIR}"
    rm -rf "${MEGATRON_DIR}.part"
    python -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
        --target "${MEGATRON_DIR}.part" "megatron-core==${MEGATRON_VERSION}" ||
        fail "pip could not install megatron-core ${MEGATRON_VERSION}: see above"
    mv "${MEGATRON_DIR}.part" "${MEGATRON_DIR}"
}

check_version() {
    python - "${MEGATRON_VERSION}" <<'PYTHON' || fail "tests would run under another megatron-core"
import sys

import megatron.training.training
from megatron.core.package_info import __version__

found = __version__.partition("+")[0]
print(f"megatron-core {found} from {megatron.training.training.__file__}")
sys.exit(found != sys.argv[1])
PYTHON
}

LEG=(
    tests/test_compat.py
    tests/megatron/test_arguments.py
    tests/training/test_flag_off.py
    tests/training/test_resume.py
    "tests/training/test_matrix.py::test_layout_trains_to_the_losses_of_one_rank[pipeline]"
    "tests/training/test_matrix.py::test_layout_trains_to_the_losses_of_one_rank[data-overlapped]"
    "tests/training/test_matrix.py::test_ranks_that_share_rows_train_to_the_losses_of_one_rank[context]"
)

set_up tools data test
install_megatron
export PYTHONPATH="${MEGATRON_DIR}${PYTHONPATH:+:${PYTHONPATH}}"
check_version
export OMP_NUM_THREADS=1
exec python -m pytest --numprocesses 2 --dist loadfile --durations=10 "${LEG[@]}" "$@"
