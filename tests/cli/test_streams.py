# SPDX-License-Identifier: Apache-2.0
"""Commands whose streams, files and terminals are not what they should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from view.report.sample_run import SampleRun

from sparsebalance_megatron import cli
from sparsebalance_megatron.cli.watch import status_line
from sparsebalance_megatron.log.log_file import JsonLinesFile
from sparsebalance_megatron.log.reader import RunLogError, read_run_log
from sparsebalance_megatron.log.records import Header


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shape = SampleRun(ranks=2, stages=1, micro_batches=2, layers=2, steps=3)
    return shape.write(tmp_path / "run")


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = f"{sys.executable} -m sparsebalance_megatron.cli {command}"
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        ["bash", "-c", program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("command", "status", "reason"),
    [
        ("report run >/dev/full", 2, "No space left"),
        ("watch run --once >&-", 2, "closed"),
        ("--help >/dev/full", 2, "No space left"),
        ("report run 2>&-", 0, ""),
        ("report run | true; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
def test_output_that_is_lost_is_said(command: str, status: int, reason: str, run: Path) -> None:
    ended = shell(command, run.parent)
    assert ended.returncode == status, ended.stderr
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr
    assert reason in ended.stderr and len(ended.stderr.splitlines()) == bool(reason)


def test_characters_that_an_encoding_lacks_are_replaced(run: Path) -> None:
    for path in (run / "ranks").iterdir():
        path.write_text(path.read_text().replace("node0", "nodé0"), encoding="utf-8")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "sparsebalance_megatron.cli", "watch", str(run), "--once"]
    root = Path(__file__).parents[2]
    ended = subprocess.run(words, env=environment, cwd=root, capture_output=True, timeout=120)
    assert ended.returncode == 0 and ended.stderr == b""
    assert rb" on nod\xe90 " in ended.stdout


def test_a_log_that_is_a_pipe_is_refused(run: Path) -> None:
    path = run / "steps.jsonl"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunLogError, match="not a regular file"):
        read_run_log(run)
    log = JsonLinesFile(path)
    log.begin(Header(), resumed=True)
    log.append(Header())
    log.close()
    assert path.is_fifo()


@pytest.mark.parametrize("command", ["report {run} -o {pipe}", "trace {run} -o {pipe}"])
def test_a_pipe_that_nobody_reads_is_no_output(
    command: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = run.parent / "pipe"
    os.mkfifo(pipe)
    assert cli.main(command.format(run=run, pipe=pipe).split()) == 2
    assert f"{pipe}: cannot be written" in capsys.readouterr().err


def test_a_host_cannot_send_escape_sequences(run: Path) -> None:
    hosts = dict.fromkeys(np.ndindex(2, 1), "\x1b[31mred\n")
    line = status_line(read_run_log(run), hosts, None)
    assert " on \\x1b[31mred\\n" in line and line.isprintable()
