# SPDX-License-Identifier: Apache-2.0
"""Everything that the page of a run shows, gathered from its logs and those of a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsebalance_megatron.log.step_log import RunLog, read_step_times
from sparsebalance_megatron.view.report.chart import Chart, run_name
from sparsebalance_megatron.view.report.comparison import (
    Comparison,
    RunSummary,
    compare,
    settled,
    summarize,
)
from sparsebalance_megatron.view.report.comparison_table import ROWS, columns_of
from sparsebalance_megatron.view.report.coverage_frames import Frame, coverage_frames
from sparsebalance_megatron.view.report.headline import headline, noise, run_facts
from sparsebalance_megatron.view.report.pictures import (
    StepView,
    rank_bars,
    shown_places,
    step_chart,
    waterfall,
)
from sparsebalance_megatron.view.report.render import render, render_step
from sparsebalance_megatron.view.report.run_data import (
    Evidence,
    ReportError,
    choose_iteration,
    evenly,
    gather,
    open_log,
)
from sparsebalance_megatron.view.report.tables import (
    MICRO_BATCH_HEADINGS,
    WORST_HEADINGS,
    Table,
    micro_batch_rows,
    worst_iterations,
    worst_rows,
)
from sparsebalance_megatron.view.report.timeline import Timeline

_MOST_NOTES = 100


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a page says.

    ``missing``: what cannot be drawn of the step, and why. ``notes``: what the logs lack.
    ``sampled``: which steps the bars of ranks are the mean of.
    """

    title: str
    facts: str
    headline: str
    findings: Sequence[str]
    numbers: RunSummary | Comparison
    numbers_table: Table
    waterfall: Chart | None
    ranks: Chart | None
    sampled: str
    worst_steps: Table
    iteration: int
    step: Chart | None
    missing: Sequence[str]
    micro_batches: Table
    coverage: Sequence[Frame]
    coverage_iteration: int
    notes: Sequence[str]

    @property
    def not_drawn(self) -> list[str]:
        """Names of the pictures that the page lacks, and what the step lacks."""
        pictures = {"ranks": self.ranks, "step": self.step, "coverage": self.coverage}
        lacking = [f"{name}: not drawn" for name, drawn in pictures.items() if not drawn]
        return [*self.missing, *lacking]


def make_report(run_directory: Path, baseline_directory: Path | None, step: int | None) -> Report:
    """Everything a page shows.

    Args:
        step: the iteration to draw; None: a typical one.

    Raises:
        RunLogError: if a directory holds no readable log.
        ReportError: if the step is not logged.
    """
    log = open_log(run_directory)
    baseline_log = None if baseline_directory is None else open_log(baseline_directory)
    iteration = choose_iteration(log, baseline_log, step)
    worst = worst_iterations(log.steps)
    evidence = gather(log, {iteration, *worst})
    baseline = None if baseline_log is None else gather(baseline_log, {iteration})
    numbers = summarize(log.steps) if baseline_log is None else compare(baseline_log, log)
    why = numbers.explanation if isinstance(numbers, Comparison) else None
    views, missing = _views(iteration, evidence, baseline)
    shown = {rank for rank, _ in shown_places(views)} if views else set()
    sample = evenly([each.iteration for each in settled(log.steps)])
    logs = {"this run": log} | ({} if baseline_log is None else {"baseline": baseline_log})
    return Report(
        title=" against ".join(run_name(each.directory) for each in logs.values()),
        facts=run_facts(log.header),
        headline=headline(numbers),
        findings=noise(numbers),
        numbers=numbers,
        numbers_table=_numbers_table(numbers),
        waterfall=None if why is None else waterfall(why),
        ranks=rank_bars(
            {
                name: (each.steps, read_step_times(each.directory, sample) if each.steps else {})
                for name, each in logs.items()
            }
        ),
        sampled=f"{len(sample)} of {len(log.steps):,} steps, after the warm-up",
        worst_steps=Table(WORST_HEADINGS, worst_rows(worst, evidence.times, evidence.ranks)),
        iteration=iteration,
        step=step_chart(views) if views else None,
        missing=missing,
        micro_batches=Table(
            MICRO_BATCH_HEADINGS,
            micro_batch_rows(
                evidence.times.get(iteration), evidence.ranks.steps.get(iteration, {}), shown
            ),
        ),
        coverage=coverage_frames(log.coverage, evidence.config),
        coverage_iteration=log.coverage.iteration if log.coverage else 0,
        notes=_notes(evidence, baseline, numbers),
    )


def step_picture(run: RunLog, baseline: RunLog) -> tuple[int, str]:
    """A typical step of both runs as measured: its iteration, and an SVG file.

    Raises:
        ReportError: if jinja2 is not installed, or no step was measured in both.
    """
    iteration = choose_iteration(run, baseline, None)
    views = []
    for name, log in (("baseline", baseline), ("sparse balance", run)):
        evidence = gather(log, {iteration})
        views += _view(name, evidence, iteration, evidence.measured(iteration))
    if len(views) < 2:
        raise ReportError(
            f"{baseline.directory} and {run.directory} share no step with measured times"
        )
    return iteration, render_step(step_chart(views))


def _views(
    iteration: int, evidence: Evidence, baseline: Evidence | None
) -> tuple[list[StepView], list[str]]:
    """What can be drawn of the step, and what cannot."""
    missing = []
    views = _view("predicted", evidence, iteration, evidence.predicted(iteration))
    if not views:
        missing.append("Predicted: not drawn, no predicted times of micro-batches are logged.")
    for name, side in (("measured", evidence), ("baseline, measured", baseline)):
        if side is None:
            continue
        found = _view(name, side, iteration, side.measured(iteration))
        if not found:
            missing.append(f"{name.capitalize()}: not drawn, not all of its times were measured.")
        views += found
    return views, missing


def _view(
    name: str, evidence: Evidence, iteration: int, timeline: Timeline | None
) -> list[StepView]:
    """One view, or none without a timeline."""
    contents = evidence.ranks.steps.get(iteration, {})
    return [StepView(name=name, timeline=timeline, contents=contents)] if timeline else []


def _numbers_table(numbers: RunSummary | Comparison) -> Table:
    columns = columns_of(numbers)
    return Table(
        ("", *columns, "how it is known"),
        [(row.name, *(row.value(run) for run in columns.values()), row.kind) for row in ROWS],
    )


def _notes(
    evidence: Evidence, baseline: Evidence | None, numbers: RunSummary | Comparison
) -> list[str]:
    compared = numbers.problems if isinstance(numbers, Comparison) else ()
    found = (*evidence.problems, *(baseline.problems if baseline else ()), *compared)
    notes = list(dict.fromkeys(found))
    if len(notes) > _MOST_NOTES:
        notes[_MOST_NOTES:] = [f"{len(notes) - _MOST_NOTES} more like these"]
    return notes


def render_page(report: Report, refresh_s: float | None = None) -> str:
    """The HTML page of a report.

    Args:
        refresh_s: seconds after which a browser loads the page again; None: it does not.

    Raises:
        ReportError: jinja2 is not installed.
    """
    return render("report.html.j2", report=report, refresh_s=refresh_s)
