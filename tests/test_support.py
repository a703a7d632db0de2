# SPDX-License-Identifier: Apache-2.0
"""The flags and tests that docs/SUPPORT.md names exist; every flag of Megatron's main is judged."""

import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
from harness import python_environment

from sparsebalance_megatron.megatron.compat import megatron_version
from sparsebalance_megatron.megatron.unsupported import MODEL, SEGMENTS, TRAINING

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "SUPPORT.md").read_text("utf-8")
MAIN = (TESTS.parent / "research" / "testing.md").read_text("utf-8")
LISTS_FLAGS = """
from argparse import ArgumentParser
from megatron.core.package_info import __version__
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
print(__version__.partition("+")[0], *parser._option_string_actions)
"""


def newer_flags(branch: str) -> set[str]:
    """Flags that research/testing.md says this branch of Megatron has beyond releases, and main."""
    rows = re.findall(rf"^\| {branch} \|(.*?) \|", MAIN, re.MULTILINE)
    return {flag for row in rows for flag in re.findall(r"--[\w-]+", row)}


def test_named_tests_exist() -> None:
    """The layouts of a table without a test of its own are those of the file named above it."""
    named = 0
    for section in PAGE.split("\n### "):
        path = ""
        for place, name in re.findall(
            r"`((?:\w+/)*test_\w+\.py)`|(\[[\w ,.-]+\](?!\()|\btest_\w+\b(?!\.))", section
        ):
            path, named = place or path, named + bool(name)
            wanted = f'"{name[1:-1]}"' if name.startswith("[") else f"def {name}("
            assert not name or wanted in (TESTS / path).read_text("utf-8"), (path, name)
    assert named


def test_named_flags_exist() -> None:
    from megatron.training.arguments import add_megatron_arguments

    from sparsebalance_megatron.megatron.arguments import add_sparse_balance_args

    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    known = set(add_sparse_balance_args(parser)._option_string_actions)
    known |= newer_flags("main") | newer_flags("dev")
    refused = {flag.partition(" ")[0] for flag in MODEL | SEGMENTS | TRAINING}
    assert set(re.findall(r"`(--[\w-]+)", PAGE)) - known - refused == set()


def test_every_flag_of_main_is_judged() -> None:
    """The environment has a release; scripts/test_megatron_main.sh puts main before it."""
    if megatron_version() < "0.20":
        pytest.skip(f"megatron-core {megatron_version()} is no newer than the flags judged")
    listed = []
    command = [sys.executable, "-W", "ignore", "-c", LISTS_FLAGS]
    for environment in (python_environment(), os.environ | {"PYTHONPATH": ""}):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        version, *flags = done.stdout.splitlines()[-1].split()
        listed.append((version, set(flags)))
    (main, newer), (release, known) = listed
    assert main == megatron_version() and release.startswith("0.19.")
    assert newer - known == newer_flags("main")
