#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets itself up and runs a short leg of the tests under a commit of Megatron-LM's main branch, which
# calls itself megatron-core 0.20.0 and is on no package index. Arguments go to pytest.
#
#   MEGATRON_LM=file:///path/to/Megatron-LM   a clone to take the commit from, instead of GitHub

source "$(dirname "${BASH_SOURCE[0]}")/_megatron_leg.sh"

COMMIT=d98e8a64ddf34856e74b24714e3bedb2f5a39553 # 2026-08-22

run_leg 0.20.0 "megatron-core-${COMMIT}" \
    "git+${MEGATRON_LM:-https://github.com/NVIDIA/Megatron-LM}@${COMMIT}" "$@"
