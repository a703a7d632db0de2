# SPDX-License-Identifier: Apache-2.0
"""Generated pages are what their scripts would write now; the flags and tests that docs/SUPPORT.md
names exist."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
from harness import python_environment

from sparsebalance_megatron.megatron.compat import megatron_version
from sparsebalance_megatron.megatron.unsupported import MODEL, SEGMENTS, TRAINING

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PAGE = (DOCS / "SUPPORT.md").read_text("utf-8")
SINCE_0_19 = {
    "--attention-output-gate",
    "--dataloader-inter-document-masking",
    "--yarn-original-max-position-embeddings",
}
LISTS_FLAGS = """
from argparse import ArgumentParser
from megatron.core.package_info import __version__
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
print(__version__.partition("+")[0], *parser._option_string_actions)
"""


def test_generated_pages_are_up_to_date() -> None:
    flags = runpy.run_path(str(REPOSITORY / "scripts" / "generate_flags.py"))["page"]()
    assert (DOCS / "FLAGS.md").read_text("utf-8") == flags, "run scripts/generate_flags.py"
    commands = runpy.run_path(str(REPOSITORY / "scripts" / "generate_commands.py"))["page"]()
    assert (DOCS / "COMMANDS.md").read_text("utf-8") == commands, "run scripts/generate_commands.py"
    pages = runpy.run_path(str(REPOSITORY / "scripts" / "generate_support.py"))["pages"]()
    for path, page in pages.items():
        assert path.read_text("utf-8") == page, "run scripts/generate_support.py"


def test_every_error_is_explained() -> None:
    """In a section of docs/TROUBLESHOOTING.md, beside the row of the table."""
    _, table, sections = re.split("<!-- .* -->", (DOCS / "TROUBLESHOOTING.md").read_text("utf-8"))
    errors = re.findall(r"^\| (`\w+`) \|", table, re.M)
    assert errors
    assert [name for name in errors if name not in sections] == []


def test_named_tests_exist() -> None:
    """The layouts of a table without a test of its own are those of the file named above it."""
    named = []
    for section in PAGE.split("\n### "):
        path = ""
        for place, name in re.findall(
            r"`((?:\w+/)*test_\w+\.py)`|(\[[\w ,.-]+\](?!\()|\btest_\w+\b(?!\.))", section
        ):
            path = place or path
            named += [(path, name)] if name else []
    assert named
    for path, name in named:
        source = (REPOSITORY / "tests" / path).read_text("utf-8")
        wanted = f'"{name[1:-1]}"' if name.startswith("[") else f"def {name}("
        assert wanted in source, (path, name)


def test_named_flags_exist() -> None:
    from megatron.training.arguments import add_megatron_arguments

    from sparsebalance_megatron.megatron.arguments import add_sparse_balance_args

    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    known = set(add_sparse_balance_args(parser)._option_string_actions) | SINCE_0_19
    known |= newer_flags("main") | newer_flags("dev")
    refused = {flag.partition(" ")[0] for flag in MODEL | SEGMENTS | TRAINING}
    assert set(re.findall(r"`(--[\w-]+)", PAGE)) - known - refused == set()


def newer_flags(branch: str) -> set[str]:
    """Flags that the page says this branch of Megatron has beyond releases, and main."""
    section = PAGE.partition("\n## Flags of main and dev\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith(f"| {branch} |")]
    return {flag for row in rows for flag in re.findall(r"--[\w-]+", row.split(" | ")[1])}


def test_every_flag_of_main_is_judged() -> None:
    """The environment has a release; scripts/test_megatron_main.sh puts main before it."""
    if megatron_version() < "0.20":
        pytest.skip(f"megatron-core {megatron_version()} is no newer than the flags judged")
    listed = []
    for environment in (python_environment(), os.environ | {"PYTHONPATH": ""}):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LISTS_FLAGS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        version, *flags = done.stdout.splitlines()[-1].split()
        listed.append((version, set(flags)))
    (main, newer), (release, known) = listed
    assert main == megatron_version() and release.startswith("0.19.")
    assert newer - known == newer_flags("main")
