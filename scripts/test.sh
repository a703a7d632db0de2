#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets itself up and runs the tests; arguments go to pytest:
#
#   scripts/test.sh                          all of them
#   scripts/test.sh -m "not distributed"     without those that start torchrun
#   scripts/test.sh tests/plan -k batching   some

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
set_up tools data test
exec python -m pytest --durations=10 "$@"
