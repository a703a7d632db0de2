#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts beside it. `set_up EXTRA...` makes .venv in the repository root, installs
# this package with those extras, and puts the environment first on PATH. Where nothing changed
# since the last time it does nothing. pip's own configuration (index, wheels, proxy) applies.
#
#   PYTHON=/path/to/python   the interpreter that .venv is made from (3.12 or newer)
#   SETUP=skip               install nothing; use python, torchrun and sparse-balance on PATH

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${ROOT}/.venv"
STAMP="${VENV}/sparse-balance-installed"

say() { printf '%s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Runs it: a pyenv shim is on PATH even for a version that is not selected, and then fails.
is_suitable_python() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        is_suitable_python "${PYTHON}" ||
            fail "PYTHON=${PYTHON} is not a Python 3.12 or newer with the modules venv and ensurepip"
        FOUND_PYTHON="${PYTHON}"
        return
    fi
    for candidate in python3.12 python3.13 python3.14 python3 \
        "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[2-9]*/bin/python; do
        if is_suitable_python "${candidate}"; then
            FOUND_PYTHON="${candidate}"
            return
        fi
    done
    fail "no Python 3.12 or newer found (tried python3.12, python3.13, python3.14, python3, pyenv).
Install one, then run this again:
  Debian, Ubuntu   apt install python3.12 python3.12-venv
  Fedora, RHEL     dnf install python3.12
  macOS            brew install python@3.12
  pyenv            pyenv install 3.12
or name one: PYTHON=/path/to/python3.12 $0"
}

make_venv() {
    if is_suitable_python "${VENV}/bin/python" && "${VENV}/bin/python" -c 'import pip' 2>/dev/null; then
        [[ -z "${PYTHON:-}" || "$(base_prefix "${PYTHON}")" == "$(base_prefix "${VENV}/bin/python")" ]] ||
            fail "${VENV} was not made from PYTHON=${PYTHON}; remove one or unset the other"
        return
    fi
    find_python
    [[ ! -e "${VENV}" ]] || say "replacing ${VENV}: it is incomplete, or its Python is too old or gone"
    say "making ${VENV} with ${FOUND_PYTHON} ($("${FOUND_PYTHON}" -V 2>&1))"
    "${FOUND_PYTHON}" -m venv --clear "${VENV}"
}

base_prefix() { "$1" -c 'import sys; print(sys.base_prefix)'; }

# What an installation depends on: the requirements, and where the editable install points.
fingerprint() { (printf '%s\n' "${ROOT}" && cat "${ROOT}/pyproject.toml") | cksum | tr ' ' '-'; }

# Extras of an installation that still matches, one per line.
installed_extras() {
    [[ -f "${STAMP}" && "$(head -n 1 "${STAMP}")" == "$(fingerprint)" ]] || return 0
    tail -n +2 "${STAMP}"
}

install_package() {
    local extras present
    present="$(installed_extras)"
    extras="$(printf '%s\n' "${present}" "$@" | sed '/^$/d' | sort -u)"
    [[ "${extras}" == "${present}" ]] && return
    say "installing into ${VENV}; the first time downloads PyTorch and takes a few minutes"
    rm -f "${STAMP}"
    "${VENV}/bin/python" -m pip install --disable-pip-version-check --no-input \
        --editable "${ROOT}[$(printf '%s' "${extras}" | tr '\n' ',')]" | show_progress ||
        fail "pip could not install the package: see above"
    printf '%s\n' "$(fingerprint)" "${extras}" >"${STAMP}"
}

# pip's output cut down to large files and the last, silent phase.
show_progress() {
    local line
    while IFS= read -r line; do
        case "${line}" in
            *Downloading*" MB)" | *"Using cached"*" MB)") say "  ${line#"${line%%[![:space:]]*}"}" ;;
            "Installing collected packages"*) say "  unpacking" ;;
        esac
    done
}

set_up() {
    cd "${ROOT}"
    if [[ "${SETUP:-}" == skip ]]; then
        python -c 'import sparsebalance_megatron, megatron.core, torch' ||
            fail "SETUP=skip: $(command -v python || echo python) lacks what is named above"
        return
    fi
    make_venv
    install_package "$@"
    export VIRTUAL_ENV="${VENV}" PATH="${VENV}/bin:${PATH}"
}

# `install_beside DIRECTORY REQUIREMENT` installs what pip understands, without its requirements,
# beside the environment's packages; it comes first on PYTHONPATH, which child processes inherit.
install_beside() {
    local directory="${VENV}/$1" requirement="$2"
    if [[ ! -d "${directory}" ]]; then
        say "installing ${requirement} into ${directory}"
        rm -rf "${directory}.part"
        python -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
            --target "${directory}.part" "${requirement}" ||
            fail "pip could not install ${requirement}: see above"
        mv "${directory}.part" "${directory}"
    fi
    export PYTHONPATH="${directory}${PYTHONPATH:+:${PYTHONPATH}}"
}
