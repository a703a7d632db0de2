#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles the kernels for Hopper under Triton 3.6, which PyTorch 2.11 brings: a kernel that fits its
# shared memory under one Triton need not fit under another. So are those that a step of Megatron's
# loop launches, as it launches them. Arguments go to pytest.

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

VERSION=3.6.0
set_up tools data test
install_beside "triton-${VERSION}" "triton==${VERSION}"
export OMP_NUM_THREADS=1
python -c "import sys, triton; sys.exit(triton.__version__ != '${VERSION}')" ||
    fail "tests would run under another Triton than ${VERSION}"
exec python -m pytest --numprocesses 2 --dist load --durations=5 \
    -k "bf16-256-128-0.0 or named_places" tests/benchmarks/test_kernel_resources.py \
    tests/run/test_fake_cuda_step.py "$@"
