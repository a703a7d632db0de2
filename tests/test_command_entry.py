# SPDX-License-Identifier: Apache-2.0
"""What may leave a command: one line and a status for each, and nothing half written."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from harness import REPOSITORY
from view.report.sample_run import SampleRun

from sparsebalance_megatron import cli
from sparsebalance_megatron.command_entry import ends_in_one_line
from sparsebalance_megatron.data.documents import DatasetWriter
from sparsebalance_megatron.errors import ConfigError

COMMAND = [sys.executable, "-m", "sparsebalance_megatron.cli"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shape = SampleRun(ranks=2, stages=1, micro_batches=2, layers=2, steps=3)
    return shape.write(tmp_path / "run")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("flag 3: must be 4"), "flag 3: must be 4"),
        (OSError(errno.ENOSPC, "No space left", "/x/y"), "/x/y: No space left"),
        (FileNotFoundError(errno.ENOENT, "No such file"), "the working directory is gone"),
        (ConfigError("two\nlines"), "two\\nlines"),
        (OSError(errno.ENOSPC, "No space left"), "the output cannot be written: No space left"),
    ],
)
def test_mistakes_are_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> NoReturn:
        raise error

    assert ends_in_one_line("program", fail) == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(f"program: error: {line}")


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), OSError(errno.EINVAL, "a bug"), KeyError(1)]
)
def test_bugs_keep_their_traceback(error: Exception) -> None:
    def fail() -> NoReturn:
        raise error

    with pytest.raises(type(error)):
        ends_in_one_line("program", fail)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_no_partial_data_set(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A shell may have started the tests with the signal ignored, as nohup and & do.
    handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, handler)

    def prepare() -> NoReturn:
        with DatasetWriter(str(tmp_path / "train"), vocab_size=100) as writer:
            writer.add(np.arange(5), np.ones(5, np.uint8))
            assert len(list(tmp_path.iterdir())) == 2
            signal.raise_signal(number)
            raise AssertionError("the signal came late")

    try:
        assert ends_in_one_line("program", prepare) == 128 + number
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert list(tmp_path.iterdir()) == []
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_folder_whose_name_is_no_text_is_shown(run: Path) -> None:
    renamed = os.fsencode(run) + b"\xff"
    os.rename(run, renamed)
    output = run.parent / "page.html"
    words = [*map(os.fsencode, COMMAND), b"report", renamed, b"-o", os.fsencode(output)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(words, capture_output=True, env=environment, timeout=120)
    assert ended.returncode == 0 and ended.stderr == b""
    assert "run\\udcff" in output.read_text()


def in_bash(script: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script],
        cwd=cwd,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        timeout=120,
    )


@pytest.mark.parametrize(
    ("redirected", "reason"),
    [
        ("> /dev/full", "the output cannot be written: No space left on device; write elsewhere"),
        (">&-", "standard output is closed; open it, for instance to /dev/null"),
        ("1< /dev/null", "the output cannot be written: Bad file descriptor; write elsewhere"),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line(
    redirected: str, reason: str, run: Path
) -> None:
    ended = in_bash(f"{' '.join(COMMAND)} report {run} -o {run}.html {redirected}")
    assert ended.returncode == 2
    assert ended.stderr == f"sparse-balance: error: {reason}\n"
    assert Path(f"{run}.html").exists() == (redirected != ">&-")


def test_a_deleted_working_directory_is_said(run: Path) -> None:
    script = f"mkdir gone && cd gone && rmdir ../gone && {' '.join(COMMAND)} report {run}"
    ended = in_bash(script, cwd=run.parent)
    assert ended.returncode == 2
    assert "working directory is gone" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_outputs_may_not_collide(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = f"-o {run.parent}/x --picture {run.parent}/y/../x"
    before = set(run.parent.iterdir())
    assert cli.main(f"summary --baseline {run} --run {run} {outputs}".split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "would replace" in line
    assert set(run.parent.iterdir()) == before
