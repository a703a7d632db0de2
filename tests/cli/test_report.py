# SPDX-License-Identifier: Apache-2.0
"""The page as a whole: complete, alone, legible everywhere, and honest about what is missing."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report.sample_run import SampleRun

from sparsebalance_megatron import cli
from sparsebalance_megatron.cli import report as report_command
from sparsebalance_megatron.cli.output import OutputError, write_text
from sparsebalance_megatron.report.charts.figure import ReportError
from sparsebalance_megatron.report.charts.series import paired
from sparsebalance_megatron.report.page import render
from sparsebalance_megatron.report.run_data import choose_iteration, open_log
from sparsebalance_megatron.report.run_report import make_report

pytest.importorskip("matplotlib")

RUN = SampleRun(ranks=2, stages=2, micro_batches=3, layers=4, steps=6)
PICTURES = 9
VOID = {"meta", "rect", "path", "use"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The balanced run and its baseline."""
    directory = tmp_path_factory.mktemp("runs")
    baseline = replace(RUN, batching="arrival", tuning="off")
    return RUN.write(directory / "balanced"), baseline.write(directory / "baseline")


@pytest.fixture(scope="module")
def page(runs: tuple[Path, Path]) -> str:
    return render(make_report(runs[0], runs[1], None).page)


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


def test_the_page_is_legible_on_a_phone_and_in_the_dark(page: str) -> None:
    reader = _Reader(page)
    viewports = [
        a for tag, a, _ in reader.elements if tag == "meta" and a.get("name") == "viewport"
    ]
    assert [each["content"] for each in viewports] == ["width=device-width, initial-scale=1"]
    assert "prefers-color-scheme: dark" in page
    # Whatever is wide scrolls inside a box of its own.
    boxed = {"svg": 0, "table": 0}
    previous: dict[str, str | None] = {}
    for tag, attributes, _ in reader.elements:
        if tag in boxed:
            assert "scroll" in str(previous.get("class"))
            boxed[tag] += 1
        if tag in ("div", "svg", "table"):
            previous = attributes
    assert boxed == {"svg": PICTURES, "table": 3}


def test_every_picture_is_described_and_explained(page: str) -> None:
    reader = _Reader(page)
    described = [a for tag, a, _ in reader.elements if tag == "svg"]
    assert len(described) == PICTURES
    assert all(each["role"] == "img" and len(each["aria-label"] or "") > 20 for each in described)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page, re.DOTALL)
    assert len(captions) == PICTURES and all(len(caption) > 60 for caption in captions)
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_numbers_say_how_they_are_known(page: str) -> None:
    for name, kind in (
        ("iteration, ms (median)", "measured"),
        ("busiest rank, ms: predicted", "predicted"),
        ("step, ms: predicted lower bound", "predicted"),
        ("error of predicted rank times", "both"),
    ):
        assert re.search(rf"<tr><td>{re.escape(name)}</td>.*<td>{kind}</td></tr>", page)
    assert re.search(r'<p class="headline">Measured: [\d.]+ times as fast as the baseline', page)
    assert "Predicted: computing, relative to fixed budgets, is" in page
    assert page.index("headline") < page.index("Waterfall") < page.index("Timeline of iteration")


def test_bars_say_what_they_are_when_pointed_at(page: str) -> None:
    titles = re.findall(r"<g><title>(measured: [^<]*)</title>", page)
    assert titles
    assert all(
        re.fullmatch(
            r"measured: rank \d, stage \d, (forward|backward) of micro-batch \d+, [\d.,e+]+ ms, "
            r"[\d,]+ tokens, budget [\d.]+ blocks",
            title,
        )
        for title in titles
    )


def test_the_timeline_shows_predicted_above_measured_above_the_baseline(page: str) -> None:
    panels = re.findall(r">(predicted|measured|baseline, measured): [\d,]+ ms, stages wait", page)
    assert panels == ["predicted", "measured", "baseline, measured"]
    assert "Predicted: the schedule simulated with the predicted times." in page
    assert "Measured: starts and ends by the clocks of the ranks." in page


def test_the_default_step_is_the_one_of_median_speedup(runs: tuple[Path, Path]) -> None:
    run, baseline = (open_log(each) for each in runs)
    chosen = choose_iteration(run, baseline, None)
    speedups = {
        new.iteration: old.iteration_ms / new.iteration_ms
        for old, new in paired(run, baseline)
        if new.iteration > 1 and old.iteration_ms and new.iteration_ms
    }
    assert sorted(speedups, key=speedups.__getitem__).index(chosen) == len(speedups) // 2
    assert choose_iteration(run, baseline, 4) == 4
    with pytest.raises(ReportError, match=r"--step 9: not in .*, whose iterations are 1 to 6"):
        choose_iteration(run, baseline, 9)


def test_less_is_shown_without_the_ranks_logs(tmp_path: Path) -> None:
    bare = replace(RUN, with_ranks=False, with_predicted_times=False).write(tmp_path / "bare")
    report = make_report(bare, None, 3)
    page = render(report.page)
    assert [each.key for each in report.page.pictures if each.svg is None] == ["lengths", "budgets"]
    assert "starts were not logged: the schedule is simulated" in page
    assert "Colour is the time of the bar" in page
    assert "Predicted: not drawn, the log holds no predicted times" in page
    assert [line.partition(":")[0] for line in report.not_drawn] == [
        "Predicted",
        "Lengths",
        "Budgets",
    ]
    assert "No baseline was given" in page


def test_the_ranks_logs_alone(runs: tuple[Path, Path], tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(runs[0], directory)
    (directory / "steps.jsonl").unlink()
    report = make_report(directory, None, None)
    drawn = {each.key for each in report.page.pictures if each.svg is not None}
    # The base budget is in the step log's header.
    assert drawn == {"lengths"}
    assert report.page.timeline.svg is not None
    assert "steps.jsonl: not there" in render(report.page)


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
    assert "speedup" in printed and "cut off or not JSON" in printed.replace("\n", "")
    assert f"written to {output}" in printed
    _Reader(page)


@pytest.mark.parametrize("arguments", [[], ["--baseline", "{empty}"]])
def test_a_directory_without_any_log_is_one_line(
    runs: tuple[Path, Path],
    tmp_path: Path,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    first = str(runs[0]) if arguments else str(empty)
    flags = [each.format(empty=empty) for each in arguments]
    output = tmp_path / "report.html"
    assert cli.main(["report", first, *flags, "-o", str(output)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and not output.exists()
    (line,) = captured.err.splitlines()
    assert line.startswith(
        f"sparse-balance: error: {empty}: no log, neither steps.jsonl nor ranks/"
    )


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=f"{tmp_path}: cannot be written: Is a directory"):
        write_text(tmp_path, "")


def test_the_picture_of_a_summary_stands_alone(runs: tuple[Path, Path], tmp_path: Path) -> None:
    baseline, run = runs
    path = tmp_path / "new" / "step.svg"
    flags = ("--baseline", str(baseline), "--run", str(run), "--picture", str(path))
    assert cli.main(["summary", *flags]) == 0
    text = path.read_text()
    assert ElementTree.fromstring(text).get("width", "").endswith("in")
    assert "var(" not in text
    for words in (">baseline: ", ">sparse balance: ", "rank 1", "stages wait"):
        assert words in text


def test_flags() -> None:
    parser = argparse.ArgumentParser()
    report_command.add_flags(parser)
    parsed = parser.parse_args(["run", "--baseline", "old", "--step", "7"])
    assert (parsed.run_directory, parsed.baseline, parsed.step) == (Path("run"), Path("old"), 7)
    assert parsed.output == Path("report.html")
