# SPDX-License-Identifier: Apache-2.0
"""The console tool: light help, one line for users' errors, tracebacks for bugs."""

from __future__ import annotations

import argparse
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from sparsebalance_megatron import cli

HELP_IMPORTS = """
import sys
from sparsebalance_megatron.cli import main
try:
    main(["--help"])
finally:
    heavy = {"torch", "megatron", "numpy", "scipy", "transformers", "tokenizers"} & set(sys.modules)
    assert not heavy, heavy
"""


def fake_command(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    """Put a module of one command, ``profile``, in place of the real one."""
    module = ModuleType("fake_command")

    def add_flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--quick", action="store_true")

    module.add_flags = add_flags  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sparsebalance_megatron.cli.profile", module)


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", HELP_IMPORTS], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    assert all(name in shown.stdout for name in cli.COMMANDS)


def test_flags_after_dashes_are_passed_on_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    fake_command(monkeypatch, lambda arguments: seen.append(arguments) or 0)
    assert cli.main(["profile", "--quick", "--", "--num-layers", "4", "--", "--quick"]) == 0
    assert seen[0].quick
    assert seen[0].passed_on == ["--num-layers", "4", "--", "--quick"]
    assert cli.main(["profile"]) == 0
    assert seen[1].passed_on == []


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise ValueError("a bug")

    fake_command(monkeypatch, run)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["profile"])


def test_a_reader_that_has_read_enough_ends_the_command_quietly() -> None:
    """As in ``sparse-balance env | head -1``."""
    program = (
        "import sys; from sparsebalance_megatron import cli\n"
        "from sparsebalance_megatron.cli import examples\n"
        "examples.run = lambda arguments: print('x' * 1_000_000) or 0\n"
        "sys.exit(cli.main(['examples']))"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_interruption_has_the_shells_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    fake_command(monkeypatch, run)
    assert cli.main(["profile"]) == 130
