# SPDX-License-Identifier: Apache-2.0
"""The tool as a shell user meets it: version, help, completion, examples, wrong names of files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPOSITORY

from sparsebalance_megatron import __version__, cli
from sparsebalance_megatron.cli import completion
from sparsebalance_megatron.cli.convert import DTYPE_NAMES
from sparsebalance_megatron.cli.output import OutputError, write_text

ALL_HELP = """
import sys
from sparsebalance_megatron import cli
for name in cli.COMMANDS:
    cli.parser_of(name).format_help()
heavy = {"torch", "megatron", "transformers", "matplotlib", "rich", "scipy"} & set(sys.modules)
assert not heavy, heavy
"""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"sparse-balance {__version__}\n"


def test_help_of_no_command_loads_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALL_HELP], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_says_every_default_and_explains_every_flag(command: str) -> None:
    parser = cli.parser_of(command)
    text = " ".join(parser.format_help().split())
    for action in parser._actions:
        assert action.help or not action.option_strings, action.option_strings
        if action.option_strings and action.default not in (None, False, "==SUPPRESS=="):
            assert f"default: {action.default}" in text, action.option_strings


def test_names_of_dtypes_are_those_of_the_converter() -> None:
    from sparsebalance_megatron.convert.hf_config import DTYPES

    assert tuple(DTYPES) == DTYPE_NAMES


def completed(words: list[str], folder: Path) -> list[str]:
    """What bash offers for the last of the words."""
    line = " ".join(f"'{word}'" for word in words)
    program = (
        f"{completion.script('bash')}\nCOMP_WORDS=({line}) COMP_CWORD={len(words) - 1}\n"
        '_sparse_balance\nprintf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sparse-balance", "sim"], ["simulate"]),
        (["sparse-balance", "--v"], ["--version"]),
        (["sparse-balance", "plan", "--lay"], ["--layers"]),
        (["sparse-balance", "plan", "--tuning", "m"], ["makespan"]),
        (["sparse-balance", "convert", "to-hf", "--hf"], ["--hf-config"]),
        (["sparse-balance", "convert", "from"], ["from-hf"]),
        (["sparse-balance", "report", "runs_"], ["runs_one"]),
    ],
)
def test_completion(words: list[str], expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs_one").mkdir()
    assert completed(words, tmp_path) == expected


def test_completion_of_zsh_is_that_of_bash(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "zsh"]) == 0
    printed = capsys.readouterr().out
    assert "bashcompinit" in printed
    assert (
        printed.partition("_sparse_balance()")[2]
        == completion.script("bash").partition("_sparse_balance()")[2]
    )


def test_examples_are_listed_and_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["examples"]) == 0
    assert "examples/qwen2.5_3b_sft.sh  " in capsys.readouterr().out
    assert cli.main(["examples", "--copy", str(tmp_path)]) == 0
    copied = tmp_path / "examples" / "slurm.sh"
    assert copied.read_text() == (REPOSITORY / "examples" / "slurm.sh").read_text()
    copied.write_text("changed")
    (tmp_path / "examples" / "cpu_quickstart.sh").unlink()
    assert cli.main(["examples", "--copy", str(tmp_path)]) == 2
    assert "remove it or copy into another folder" in capsys.readouterr().err
    assert copied.read_text() == "changed"
    assert not (tmp_path / "examples" / "cpu_quickstart.sh").exists()


def test_a_dash_names_no_file() -> None:
    with pytest.raises(OutputError, match="stands for no file"):
        write_text(Path("-"), "text")
