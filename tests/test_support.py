# SPDX-License-Identifier: Apache-2.0
"""What docs/SUPPORT.md and docs/TROUBLESHOOTING.md take from the source is up to date; the tests
and the flags that they name exist."""

from __future__ import annotations

import ast
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
from sparsebalance_megatron.megatron.unsupported import MODEL
from sparsebalance_megatron.megatron.unsupported_training import TRAINING

REFUSALS = (*MODEL, *TRAINING)
REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs" / "SUPPORT.md").read_text("utf-8")

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


def table(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading, without its head."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert len(rows) > 2, heading
    return rows[2:]


TESTED = table("Tested")


@pytest.mark.parametrize("row", TESTED, ids=[row[0] for row in TESTED])
def test_the_test_of_a_feature_exists(row: list[str]) -> None:
    path, name = re.fullmatch(r"`(\S+)` (.+)", row[2]).groups()  # type: ignore[union-attr]
    source = (REPOSITORY / "tests" / path).read_text("utf-8")
    tree = ast.parse(source)
    if name.startswith("["):
        assert name.strip("[]") in keys_of_parameters(tree)
    else:
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def keys_of_parameters(tree: ast.Module) -> set[str]:
    """Keys of the dictionaries that tests of a file are parametrised with."""
    by_name = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    used = {
        decorator.args[1].id
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        and len(decorator.args) == 2
        and isinstance(decorator.args[1], ast.Name)
    }
    dictionaries = [by_name[name] for name in used if isinstance(by_name.get(name), ast.Dict)]
    return {ast.literal_eval(key) for found in dictionaries for key in found.keys if key}


def test_every_layout_and_model_of_the_matrix_is_listed() -> None:
    listed = {row[2] for row in TESTED}
    for path in ("training/test_matrix.py", "megatron/test_dense_models.py"):
        tree = ast.parse((REPOSITORY / "tests" / path).read_text("utf-8"))
        assert {f"`{path}` [{key}]" for key in keys_of_parameters(tree)} <= listed


@pytest.mark.parametrize("name", ["SUPPORT.md", "TROUBLESHOOTING.md"])
def test_pages_are_up_to_date(name: str) -> None:
    pages = runpy.run_path(str(REPOSITORY / "scripts" / "generate_support.py"))["pages"]()
    path = REPOSITORY / "docs" / name
    assert path.read_text("utf-8") == pages[path], "run `python scripts/generate_support.py`"


def test_what_is_untested_is_not_refused() -> None:
    named = {flag for row in table("Untested") for flag in re.findall(r"--[\w-]+", row[1])}
    assert named
    always = {r.flag for r in REFUSALS if r.found is None}
    assert named & always == set()


def test_flags_are_flags() -> None:
    from megatron.training.arguments import add_megatron_arguments

    from sparsebalance_megatron.megatron.arguments import add_sparse_balance_args

    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    known = set(add_sparse_balance_args(parser)._option_string_actions) | SINCE_0_19
    known |= newer_flags("main") | newer_flags("dev")
    refused = {refusal.flag.partition(" ")[0] for refusal in REFUSALS}
    named = set(re.findall(r"`(--[\w-]+)", PAGE))
    assert len(named) > 60
    assert named - known - refused == set()


def newer_flags(branch: str) -> set[str]:
    """Flags that the page says this branch of Megatron has beyond releases, and main."""
    rows = [row for row in table("Flags of main and dev") if row[0] == branch]
    return {flag for row in rows for flag in re.findall(r"--[\w-]+", row[1])}


def test_every_flag_of_main_is_judged() -> None:
    """The environment has a release; scripts/test_megatron_main.sh puts main before it."""
    if megatron_version() < "0.20":
        pytest.skip(f"megatron-core {megatron_version()} is no newer than the flags judged")
    listed = {}
    for name, environment in {
        "main": python_environment(),
        "release": os.environ | {"PYTHONPATH": ""},
    }.items():
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LISTS_FLAGS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        version, *flags = done.stdout.splitlines()[-1].split()
        listed[name] = version, set(flags)
    assert listed["main"][0] == megatron_version()
    assert listed["release"][0].startswith("0.19.")
    new = listed["main"][1] - listed["release"][1]
    assert new == newer_flags("main")
