# SPDX-License-Identifier: Apache-2.0
"""Runs triton/ under Triton's interpreter.

In a process of its own: Triton decides when a kernel is defined, its own library's included,
whether it will be interpreted, and no other test must run interpreted.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from older_releases import needs_interpreter

KERNEL_TESTS = Path(__file__).parent / "triton"
TIMEOUT_S = 580
"""Less than the test's own, so that the interpreted process ends with it."""


PER_PUSH = (
    "test_kernels.py::test_columns_alone",
    "test_kernels.py::test_columns_without_places_are_none",
    *(
        f"../test_contract.py::{test}[{kind}-triton-{case}]"
        for kind in ("previous-block", "token-kv-head")
        for test, case in (
            ("test_bad_numbers_of_a_document_stay_in_it", "nan"),
            ("test_parts_of_members_add_up_to_the_whole", "two in turn"),
            ("test_a_query_without_keys_gives_zero_and_finite_gradients", "False"),
        )
    ),
    "../test_contract.py::test_large_scores_stay_finite[vertical-slash-triton]",
    "test_kernels.py::test_cut_lists_of_readers_add_up",
    "test_kernels.py::test_head_dims_and_groups",
    "../../select/test_router_kernels.py::test_lists_and_mass_are_those_of_torch",
    "../../select/test_router_kernels.py::test_means_are_the_same",
    "../../select/test_router_kernels.py::test_ties_go_to_the_lower_block",
    "test_index.py::test_readers_lie_by_block_and_tile",
    "test_kernels.py::test_chunks_launches_and_cut_lists_add_up",
)
"""They launch every kernel; the others are nightly."""


@needs_interpreter
@pytest.mark.process
def test_every_kernel_on_the_cpu() -> None:
    run_interpreted(*PER_PUSH)


@needs_interpreter
@pytest.mark.nightly
@pytest.mark.parametrize(
    "file",
    sorted(
        {"test_memory_accesses.py", "test_self_check_mutants.py"}
        | {test.partition("::")[0] for test in PER_PUSH}
    ),
)
def test_kernels_on_the_cpu(file: str) -> None:
    run_interpreted(file)


def run_interpreted(*tests: str) -> None:
    pytest.importorskip("triton")
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    paths = [os.fspath(KERNEL_TESTS / test) for test in tests]
    # Of the tests of all implementations, those of Triton's.
    options = ("-q", "-k", "triton or router_kernels", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *paths, *options]
    result = subprocess.run(
        command,
        env=environment,
        cwd=KERNEL_TESTS.parents[3],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\d+ passed", result.stdout), result.stdout
    skipped = [line for line in result.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all(line.endswith("kernels are interpreted") for line in skipped), result.stdout
    assert bool(skipped) == (" skipped" in result.stdout), result.stdout
