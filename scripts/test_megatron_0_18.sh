#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets itself up and runs a short leg of the tests under megatron-core 0.18, the oldest that this
# package supports; the other tests run under the newest release. Arguments go to pytest.

source "$(dirname "${BASH_SOURCE[0]}")/_megatron_leg.sh"

run_leg 0.18.2 megatron-core-0.18.2 megatron-core==0.18.2 "$@"
