#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets itself up and runs every linter; fails if one of them does, after all have run.

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
set_up tools data test

SHELL_SCRIPTS=(scripts/*.sh examples/*.sh .ci/run)
FAILED=()

check() {
    say "== $*"
    "$@" || FAILED+=("$1 ${2:-}")
}

check_shell_syntax() {
    local script status=0
    for script in "${SHELL_SCRIPTS[@]}"; do
        bash -n "${script}" || status=1
    done
    return "${status}"
}

check ruff check .
check ruff format --check .
check mypy
check check_shell_syntax
if command -v shellcheck >/dev/null; then
    check shellcheck --external-sources --source-path=SCRIPTDIR "${SHELL_SCRIPTS[@]}"
else
    say "== shellcheck: not installed, left out"
fi

if ((${#FAILED[@]})); then
    printf 'lint failed: %s\n' "${FAILED[@]}" >&2
    exit 1
fi
say "lint passed"
