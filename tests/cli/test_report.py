# SPDX-License-Identifier: Apache-2.0
"""The page as a whole: complete without other files, and plain about what is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from view.report.sample_run import SampleRun

from sparsebalance_megatron import cli
from sparsebalance_megatron.view.report.run_report import make_report, render_page

RUN = SampleRun(ranks=2, stages=2, micro_batches=3, layers=4, steps=6)
VOID = {"br", "meta"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The balanced run and its baseline."""
    directory = tmp_path_factory.mktemp("runs")
    baseline = replace(RUN, batching="arrival", tuning="off")
    return RUN.write(directory / "balanced"), baseline.write(directory / "baseline")


@pytest.fixture(scope="module")
def page(runs: tuple[Path, Path]) -> str:
    return render_page(make_report(runs[0], runs[1], None))


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


class _Reader(HTMLParser):
    """Checks nesting and collects what tests look at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), tuple(self.open)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_needs_nothing_beside_itself(page: str) -> None:
    reader = _Reader(page)
    outside = [
        (tag, name, value)
        for tag, attributes, _ in reader.elements
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "data", "action")
        and not (value or "").startswith(("#", "data:image/png;base64,"))
    ]
    assert outside == []
    assert not {tag for tag, _, _ in reader.elements} & {"script", "link", "iframe", "img"}
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "@import" not in page


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
    _Reader(page)


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
    _Reader(page)


def test_the_picture_of_a_summary_stands_alone(runs: tuple[Path, Path], tmp_path: Path) -> None:
    baseline, run = runs
    path = tmp_path / "new" / "step.svg"
    flags = ("--baseline", str(baseline), "--run", str(run), "--picture", str(path))
    assert cli.main(["summary", *flags]) == 0
    text = path.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for words in ("baseline: ", "sparse balance: ", "rank 1"):
        assert words in text
