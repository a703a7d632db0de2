# SPDX-License-Identifier: Apache-2.0
"""Everything that the page of a run shows, gathered from its logs and those of a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsebalance_megatron.report.charts.coverage import coverage_picture, scatter_picture
from sparsebalance_megatron.report.charts.distributions import budgets_picture, lengths_picture
from sparsebalance_megatron.report.charts.figure import Picture, ReportError, standalone
from sparsebalance_megatron.report.charts.series import balance_picture, loss_picture
from sparsebalance_megatron.report.charts.timeline import Panel, shown_places, timeline_picture
from sparsebalance_megatron.report.charts.waterfall import ranks_picture, waterfall_picture
from sparsebalance_megatron.report.comparison import Comparison, RunSummary, compare, summarize
from sparsebalance_megatron.report.comparison_table import ROWS, columns_of
from sparsebalance_megatron.report.page import Page, Table
from sparsebalance_megatron.report.run_data import (
    Evidence,
    choose_iteration,
    evenly,
    gather,
    open_log,
)
from sparsebalance_megatron.report.sentences import (
    comparison_findings,
    headline,
    run_findings,
    subtitle,
)
from sparsebalance_megatron.report.step_table import HEADINGS, micro_batch_rows
from sparsebalance_megatron.report.timeline import Timeline
from sparsebalance_megatron.report.worst_steps import HEADINGS as WORST_HEADINGS
from sparsebalance_megatron.report.worst_steps import worst_iterations, worst_rows
from sparsebalance_megatron.telemetry.step_log import RunLog

_NOTES_IN_PAGE = 100
_NOT_PREDICTED = "the log holds no predicted times of its micro-batches."
_NOT_MEASURED = "not all of its times were measured."

_Source = tuple[str, Timeline | None, Evidence]
"""Name and timeline of a panel, and the run that it is of."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page, the numbers in it, and what it could not draw."""

    page: Page
    numbers: RunSummary | Comparison
    iteration: int
    not_drawn: Sequence[str]


def make_report(run_directory: Path, baseline_directory: Path | None, step: int | None) -> Report:
    """Everything a page shows.

    Args:
        step: the iteration to draw; None: a typical one.

    Raises:
        RunLogError: if a directory holds no readable log.
        ReportError: if matplotlib is not installed, or the step is not logged.
    """
    log = open_log(run_directory)
    baseline_log = None if baseline_directory is None else open_log(baseline_directory)
    iteration = choose_iteration(log, baseline_log, step)
    sample = evenly(tuple(each.iteration for each in log.steps) or (iteration,))
    worst = worst_iterations(log.steps)
    evidence = gather(log, {*sample, iteration, *worst})
    baseline = None if baseline_log is None else gather(baseline_log, {iteration})
    numbers = summarize(log.steps) if baseline_log is None else compare(baseline_log, log)
    notes = (*evidence.problems, *(baseline.problems if baseline else ()))
    if isinstance(numbers, Comparison):
        notes = (*dict.fromkeys((*notes, *numbers.problems)),)
    panels, missing = _panels(iteration, evidence, baseline)
    page = Page(
        title=f"Run {run_directory}"
        + ("" if baseline_directory is None else f" against {baseline_directory}"),
        subtitle=subtitle(log.header),
        headline=headline(numbers),
        reasons=_reasons(numbers, evidence, set(sample)),
        findings=_findings(numbers),
        numbers=_numbers(numbers),
        worst_steps=Table(
            headings=WORST_HEADINGS,
            rows=worst_rows(worst, dict(evidence.times), evidence.ranks),
            style="steps",
        ),
        timeline=timeline_picture(iteration, panels, missing),
        step_table=_step_table(iteration, evidence, panels),
        pictures=_pictures(evidence, baseline_log),
        notes=_shortened(notes),
    )
    not_drawn = [
        *(missing if panels else ()),
        *(
            f"{each.title}: not drawn. {each.caption}"
            for each in (*page.reasons, page.timeline, *page.pictures)
            if each.svg is None
        ),
    ]
    return Report(page=page, numbers=numbers, iteration=iteration, not_drawn=not_drawn)


def step_picture(run: RunLog, baseline: RunLog) -> tuple[int, str]:
    """A typical step of both runs as measured: its iteration, and an SVG file.

    Raises:
        ReportError: if matplotlib is not installed, or no step was measured in both.
    """
    iteration = choose_iteration(run, baseline, None)
    sources: list[_Source] = []
    for name, log in (("baseline", baseline), ("sparse balance", run)):
        evidence = gather(log, {iteration})
        sources.append((name, evidence.measured(iteration), evidence))
    panels = _drawn(iteration, sources)
    if len(panels) < len(sources):
        raise ReportError(
            f"{baseline.directory} and {run.directory} share no step with measured times"
        )
    svg = timeline_picture(iteration, panels).svg
    assert svg is not None
    return iteration, standalone(svg)


def _panels(
    iteration: int, evidence: Evidence, baseline: Evidence | None
) -> tuple[list[Panel], list[str]]:
    """What can be drawn of the step, and sentences on what cannot."""
    sources: list[_Source] = [
        ("predicted", evidence.predicted(iteration), evidence),
        ("measured", evidence.measured(iteration), evidence),
    ]
    if baseline is not None:
        sources.append(("baseline, measured", baseline.measured(iteration), baseline))
    missing = [
        f"{name.capitalize()}: not drawn, "
        + (_NOT_PREDICTED if name == "predicted" else _NOT_MEASURED)
        for name, timeline, _ in sources
        if timeline is None
    ]
    return _drawn(iteration, sources), missing


def _drawn(iteration: int, sources: Sequence[_Source]) -> list[Panel]:
    return [
        Panel(name=name, timeline=timeline, contents=of.ranks.steps.get(iteration, {}))
        for name, timeline, of in sources
        if timeline is not None
    ]


def _reasons(
    numbers: RunSummary | Comparison, evidence: Evidence, sample: set[int]
) -> list[Picture]:
    """Where the time goes, against the baseline and rank by rank."""
    times = {each: evidence.times[each] for each in sample if each in evidence.times}
    explanation = numbers.explanation if isinstance(numbers, Comparison) else None
    return [
        *([] if explanation is None else [waterfall_picture(explanation)]),
        ranks_picture(times, evidence.log.steps, evidence.sampled(times)),
    ]


def _pictures(evidence: Evidence, baseline: RunLog | None) -> list[Picture]:
    log, config = evidence.log, evidence.config
    of_ranks = evidence.sampled(evidence.ranks.steps)
    return [
        balance_picture(log, baseline),
        lengths_picture(evidence.ranks, config, of_ranks),
        budgets_picture(evidence.ranks, config, of_ranks),
        coverage_picture(log.coverage, config),
        scatter_picture(evidence.times, log.steps, evidence.sampled(evidence.times)),
        loss_picture(log, baseline),
    ]


def _findings(numbers: RunSummary | Comparison) -> list[str]:
    if isinstance(numbers, Comparison):
        return comparison_findings(numbers)
    return [*run_findings(numbers), "No baseline was given, so no speedup is stated."]


def _numbers(numbers: RunSummary | Comparison) -> Table:
    columns = columns_of(numbers)
    return Table(
        headings=("", *columns, "how known"),
        rows=[
            (row.name, *(row.value(each) for each in columns.values()), row.kind) for row in ROWS
        ],
        style="names",
    )


def _step_table(iteration: int, evidence: Evidence, panels: Sequence[Panel]) -> Table:
    shown = {d for d, _ in shown_places(panels)} if panels else set()
    return Table(
        headings=HEADINGS,
        rows=micro_batch_rows(
            evidence.times.get(iteration), evidence.ranks.steps.get(iteration, {}), shown
        ),
        style="steps",
    )


def _shortened(notes: tuple[str, ...]) -> tuple[str, ...]:
    if len(notes) <= _NOTES_IN_PAGE:
        return notes
    return (*notes[:_NOTES_IN_PAGE], f"{len(notes) - _NOTES_IN_PAGE} more like these")
