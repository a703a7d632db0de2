# SPDX-License-Identifier: Apache-2.0
"""``report``, ``summary`` and ``watch`` of runs that ended, that go on, or that left damaged logs.

The page is complete without other files, and plain about what is missing.
"""

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from record_cases import FIGURES, HEADER, header_of, step_line, step_record
from step_cases import JOB
from view.report.sample_run import SampleRun, write_lines

from sparsebalance_megatron import cli
from sparsebalance_megatron.cli import watch
from sparsebalance_megatron.plan.job import lockstep_notice
from sparsebalance_megatron.view.report.run_report import make_report, render_page

RUN = SampleRun(ranks=2, stages=2, micro_batches=3, layers=4, steps=6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The balanced run and its baseline."""
    directory = tmp_path_factory.mktemp("runs")
    baseline = replace(RUN, batching="arrival", tuning="off")
    return RUN.write(directory / "balanced"), baseline.write(directory / "baseline")


WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(["torch", "megatron"]))
from sparsebalance_megatron import cli
sys.exit(cli.main(["report", sys.argv[1], "--json", "-o", sys.argv[2]]))
"""


def test_a_laptop_without_torch_and_megatron_makes_the_page(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(runs[0]), str(page)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert page.is_file()


def test_the_page_needs_nothing_beside_itself(runs: tuple[Path, Path]) -> None:
    page = render_page(make_report(*runs, None))
    sources = re.findall(r"\b(?:src|href|data|action)=\"([^\"]*)\"", page)
    assert [each for each in sources if not each.startswith("#")] == []
    assert not re.search(r"<(script|link|iframe|img)|@import", page)
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_log_texts_are_no_markup(runs: tuple[Path, Path], tmp_path: Path) -> None:
    hostile = '<script>"&'
    directory = tmp_path / hostile
    shutil.copytree(runs[0], directory)
    path = directory / "steps.jsonl"
    path.write_text(path.read_text().replace("a machine that never was", hostile.replace('"', "")))
    report = make_report(directory, None, None)
    page = render_page(replace(report, notes=(hostile,)))
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 4


def test_a_damaged_log_is_shown_with_its_damage(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(runs[0], directory)
    for name in ("steps.jsonl", "ranks/rank-00001.jsonl"):
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[:-30])
    output = tmp_path / "new" / "report.html"
    assert cli.main(["report", str(directory), "--baseline", str(runs[1]), "-o", str(output)]) == 0
    page, printed = output.read_text(), capsys.readouterr().out
    for place in ("steps.jsonl line ", "ranks/rank-00001.jsonl line "):
        assert re.search(rf"{place}\d+: cut off or not JSON", page)
    assert "times as fast" in printed and "cut off or not JSON" in printed.replace("\n", "")
    assert f"written to {output}" in printed


def test_the_picture_of_a_summary_stands_alone(runs: tuple[Path, Path], tmp_path: Path) -> None:
    baseline, run = runs
    path = tmp_path / "new" / "step.svg"
    flags = ("--baseline", str(baseline), "--run", str(run), "--picture", str(path))
    assert cli.main(["summary", *flags]) == 0
    text = path.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for words in ("baseline: ", "run: ", "rank 1"):
        assert words in text


def test_command_writes_json_and_an_80_column_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    times_ms = {"baseline": 10450.0, "dense": 19000.0, "by_tokens": 9900.0, "balanced": 9500.0}
    figures = {"imbalance": 1.125, "work_ratio": 0.98, "coverage": 0.9876, "coverage_base": None}
    for name, iteration_ms in times_ms.items():
        line = {"iteration_ms": iteration_ms, "figures": FIGURES | figures}
        steps = [step_line(each, lm_loss=9.0 - 0.1 * each, **line) for each in range(1, 31)]
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "steps.jsonl", [HEADER, *steps])
    output = tmp_path / "new" / "summary.json"
    runs = ("--baseline", str(tmp_path / "baseline"), "--run", str(tmp_path / "balanced"))
    words = ("summary", *runs, "-o", str(output))
    assert cli.main(words) == 0
    written = json.loads(output.read_text())
    compared = {"baseline", "sparse_balance", "speedup", "problems", "explanation", "differences"}
    assert set(written) == compared
    required = {"iteration_ms_median", "loss_first", "loss_last", "figures"}
    assert required <= set(written["baseline"]) == set(written["sparse_balance"])
    assert written["speedup"] == pytest.approx(1.1)
    assert written["baseline"]["loss_last"] == pytest.approx(6.0)
    printed = capsys.readouterr().out
    table = [line for line in printed.splitlines() if not line.startswith("written to")]
    assert max(map(len, table)) <= 80 and "…" not in printed
    numbers = ("10,450", "9,500", "0.988", "6.0000")
    assert all(text in printed for text in (*numbers, "1.10 times as fast"))

    assert cli.main((*words, "--beside", str(tmp_path / "dense"), str(tmp_path / "by_tokens"))) == 0
    beside = json.loads(output.read_text())["beside"]
    speedups = {name: other["speedup"] for name, other in beside.items()}
    assert speedups == pytest.approx({"dense": 2.0, "by_tokens": 9900.0 / 9500.0})
    printed = capsys.readouterr().out
    said = " ".join(printed.split())
    assert "2.00 times as fast (95 % 2.00 - 2.00) as dense" in said
    (heads,) = (line for line in printed.splitlines() if line.startswith("   "))
    assert heads.split() == ["baseline", "dense", "by_tokens", "run"]
    assert cli.main((*words, "--all")) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("1.125", "98.0%", "8.9000"))


STEADY = SampleRun(ranks=2, stages=2, micro_batches=2, layers=4, steps=4, noise=0.0)


def printed(directory: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    assert cli.main(["watch", str(directory), *flags]) == 0
    return capsys.readouterr().out.splitlines()


def slow_stage(directory: Path, iterations: int | None = None) -> list[dict[str, Any]]:
    """The step log of a run of which stage 0 of rank 1 takes half as long again as predicted."""
    path = STEADY.write(directory) / "steps.jsonl"
    header, *others = (json.loads(line) for line in path.read_text().splitlines())
    for record in others:
        if record["type"] == "step":
            own = np.array(record["predicted"]["times_2RPVM"])
            own[:, 1, 0] *= 1.5
            record["measured"]["times_2RPVM"] = own.tolist()
    return [header | {"iterations": iterations}, *others]


def test_a_finished_run_is_a_table_of_80_columns_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "steps.jsonl", [*slow_stage(tmp_path, iterations=4), "{broken"])
    *legend, _, row, slowest, end = lines = printed(tmp_path, capsys)
    assert legend and max(map(len, lines)) <= 80
    assert row.split()[:3] == ["4", "of", "4"] and row.split()[-3].endswith("%")
    assert len(row.split()[-1]) == watch._BAR_CHARACTERS, "the dots are seen"
    assert slowest.startswith("slowest: rank 1 stage 0 on node0, 1.50 times")
    assert end == "4 of 4, ended"


def test_the_widest_row_fits() -> None:
    figures = {"coverage": 0.123, "coverage_base": 0.123, "imbalance": 12.34}
    step = step_record(123456, iteration_ms=1234567.0, lm_loss=12.345678, figures=figures)
    header = structs.replace(header_of(JOB), iterations=999999, world_size=1)
    assert len(watch._line(watch.step_cells(step, header, 1234567.0))) <= 80


def test_ranks_in_lockstep_are_told_once_and_the_slowest_is_found_by_own_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has a slow stage, for which rank 0 waits."""
    header, *others = slow_stage(tmp_path, iterations=4)
    for record in others:
        if record["type"] == "step":
            own = np.array(record["measured"]["times_2RPVM"])
            passed = np.broadcast_to(own.max(axis=1, keepdims=True), own.shape)
            record["measured"] |= {
                "times_2RPVM": passed.tolist(),
                "waiting_2RPVM": (passed - own).tolist(),
            }
    header["job"]["lockstep_ranks"] = 2
    path = tmp_path / "steps.jsonl"
    write_lines(path, [header, *others[:-1]])
    monkeypatch.setattr(watch.time, "sleep", lambda _: write_lines(path, [header, *others]))
    lines = printed(tmp_path, capsys)
    notice = lockstep_notice(2)
    assert notice is not None and " ".join(lines).count(notice) == 1
    assert [line.split()[0] for line in lines if " of 4 " in line] == ["3", "4"]
    assert sum(line.startswith("slowest: rank 1 stage 0 on node0, 1.50") for line in lines) == 1
    assert lines[-1] == "4 of 4, ended"


def test_a_run_is_followed_from_before_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sleep is a chance for the run to write."""
    written = STEADY.write(tmp_path / "finished") / "steps.jsonl"
    pieces = iter([b"", *written.read_bytes().splitlines(keepends=True), b""])

    def write_more(_: float) -> None:
        if (piece := next(pieces, None)) is None:
            raise KeyboardInterrupt
        with (tmp_path / "steps.jsonl").open("ab") as stream:
            stream.write(piece)

    monkeypatch.setattr(watch.time, "sleep", write_more)
    first, *others = printed(tmp_path, capsys)
    assert "no step" in first
    rows = [line.split()[0] for line in others if line.split()[0].isdigit()]
    assert rows == ["1", "2", "3", "4"]


def test_a_host_cannot_send_escape_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "steps.jsonl", slow_stage(tmp_path))
    for path in (tmp_path / "ranks").iterdir():
        path.write_text(path.read_text().replace('"node0"', r'"\u001b[31mred\n"'))
    lines = printed(tmp_path, capsys, "--once")
    assert any(" on \\x1b[31mred\\n" in line for line in lines)
    assert all(line.isprintable() for line in lines)
