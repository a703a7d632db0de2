# SPDX-License-Identifier: Apache-2.0
"""The tool as a shell user meets it: help, examples, one line for users' errors, not for bugs."""

import argparse
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import REPOSITORY

from sparsebalance_megatron import cli
from sparsebalance_megatron.cli import profile
from sparsebalance_megatron.cli.output import OutputError, write_text

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
        if action.option_strings and action.default not in (None, False, (), [], "==SUPPRESS=="):
            assert f"default: {action.default}" in text, action.option_strings


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("plam", "did you mean plan?"),
        ("watch run --onec", "did you mean --once?"),
        ("zzz", "zzz: no command; --help"),
        (
            "plan --gpus 1 --lengths {0} -- --num-layers 2 --sparse-balance-base-budgt 4",
            "did you mean --sparse-balance-base-budget?",
        ),
    ],
)
@pytest.mark.usefixtures("torch_without_cpu_adapter")
def test_what_was_meant_is_said(
    words: str, meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lengths").write_text("100 200")
    try:
        status = cli.main(words.format(tmp_path / "lengths").split())
    except SystemExit as ended:
        status = ended.code  # type: ignore[assignment]
    assert status == 2
    assert meant in capsys.readouterr().err


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


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """A limit of this process, which makes writing fail as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_examples_on_a_full_disk_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with files_of_at_most(1000):
        assert cli.main(["examples", "--copy", str(tmp_path)]) == 2
    assert "File too large" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit_bytes", [0, 4096])
def test_an_older_file_stays_where_the_disk_is_full(limit_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("older")
    path.chmod(0o640)
    link = tmp_path / "link.html"
    link.symlink_to(path.name)
    with (
        files_of_at_most(limit_bytes),
        pytest.raises(OutputError, match=r"report.html: cannot be written: File too large"),
    ):
        write_text(path, "x" * 10_000)
    assert path.read_text() == "older"
    write_text(link, "newer")
    assert path.read_text() == "newer" and path.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [link, path] and link.is_symlink()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_watch_is_ended_by_signals(
    number: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: signal.raise_signal(number))
    # Processes of pytest-xdist ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main(["watch", str(tmp_path)]) == status
    finally:
        signal.signal(signal.SIGINT, before)


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
