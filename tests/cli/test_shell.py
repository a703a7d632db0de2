# SPDX-License-Identifier: Apache-2.0
"""The tool as a shell user meets it: help, examples, one line for users' errors, not for bugs."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPOSITORY

from sparsebalance_megatron import cli
from sparsebalance_megatron.cli import profile

ALL_HELP = """
import sys
from sparsebalance_megatron import cli
for name in cli.COMMANDS:
    cli.parser_of(name).format_help()
try:
    cli.main(["--help"])
except SystemExit:
    pass
heavy = {"torch", "megatron", "transformers", "matplotlib", "scipy"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_of_no_command_loads_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALL_HELP], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_says_every_default_and_explains_every_flag(command: str) -> None:
    parser = cli.parser_of(command)
    text = " ".join(parser.format_help().split())
    for action in parser._actions:
        assert action.help or not action.option_strings, action.option_strings
        if action.option_strings and action.default not in (None, False, "==SUPPRESS=="):
            assert f"default: {action.default}" in text, action.option_strings


def test_examples_are_shown_and_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["examples"]) == 0
    assert f"{REPOSITORY / 'examples'}\n" in capsys.readouterr().out
    assert cli.main(["examples", "--copy", str(tmp_path)]) == 0
    copied = tmp_path / "examples" / "slurm.sh"
    assert copied.read_text() == (REPOSITORY / "examples" / "slurm.sh").read_text()
    copied.write_text("changed")
    (tmp_path / "examples" / "cpu_quickstart.sh").unlink()
    assert cli.main(["examples", "--copy", str(tmp_path)]) == 2
    assert "remove it or copy into another folder" in capsys.readouterr().err
    assert copied.read_text() == "changed"
    assert not (tmp_path / "examples" / "cpu_quickstart.sh").exists()


def test_flags_after_dashes_are_passed_on_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(profile, "run", lambda arguments: seen.append(arguments) or 0)
    own = ["profile", "-o", "table.json"]
    assert cli.main([*own, "--", "--num-layers", "4", "--", "--quick"]) == 0
    assert cli.main([*own, "--quick"]) == 0
    assert [each.passed_on for each in seen] == [["--num-layers", "4", "--", "--quick"], []]
    assert [each.quick for each in seen] == [False, True]


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
