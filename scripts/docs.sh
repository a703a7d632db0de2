#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets itself up and builds the documentation site; a warning, such as a link that leads nowhere, fails
# it. Open runs/docs/docs/index.html afterwards.
#
#   scripts/docs.sh [DIRECTORY]   default: runs/docs

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
set_up docs

exec python -m sphinx --fail-on-warning --keep-going --quiet --jobs auto -c docs . "${1:-runs/docs}"
