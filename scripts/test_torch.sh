#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests under an older PyTorch, with the Triton that belongs to it, in an environment of its
# own, .venv-torch-VERSION. Not part of continuous integration: it downloads some gigabytes.
#
#   scripts/test_torch.sh 2.8.0                    all of them
#   scripts/test_torch.sh 2.11.0 tests/attention   some; arguments go to pytest

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

(($#)) || fail "name a version: $0 VERSION [ARGUMENT...]"
VERSION="$1"
shift
VENV="${ROOT}/.venv-torch-${VERSION}"
STAMP="${VENV}/sparse-balance-installed"
# Triton before 3.7 interprets no loop under numpy 2.4 and newer.
CONSTRAINTS="$(mktemp)"
trap 'rm -f "${CONSTRAINTS}"' EXIT
printf 'torch==%s\nnumpy<2.4\n' "${VERSION}" >"${CONSTRAINTS}"
export PIP_CONSTRAINT="${CONSTRAINTS}"
set_up tools data test
python -c 'import numpy, torch, triton
print("PyTorch", torch.__version__, "Triton", triton.__version__, "numpy", numpy.__version__)'
SETUP=skip "${ROOT}/scripts/test.sh" "$@"
