# SPDX-License-Identifier: Apache-2.0
"""Everything that the page of a run shows, gathered from its logs and those of a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebalance_megatron.log.reader import RunLog, read_run_log
from sparsebalance_megatron.view.report.chart import COLOURS, Chart, run_name
from sparsebalance_megatron.view.report.comparison import (
    Comparison,
    RunSummary,
    compare,
    paired,
    settled,
    summarize,
)
from sparsebalance_megatron.view.report.coverage_frames import (
    FRAME_HEIGHT,
    FRAME_WIDTH,
    Frame,
    coverage_frames,
)
from sparsebalance_megatron.view.report.loss_lines import (
    LINES_HEIGHT,
    LINES_WIDTH,
    LinePanel,
    loss_panels,
)
from sparsebalance_megatron.view.report.pictures import (
    StepView,
    rank_bars,
    shown_places,
    step_chart,
    waterfall,
)
from sparsebalance_megatron.view.report.run_data import (
    Evidence,
    ReportError,
    choose_iteration,
    gather,
)
from sparsebalance_megatron.view.report.tables import (
    Table,
    micro_batch_table,
    worst_steps,
    worst_table,
)
from sparsebalance_megatron.view.report.words import ROWS, columns_of, headline, noise, run_facts

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
    loss: Sequence[LinePanel]
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
    log = read_run_log(run_directory)
    baseline_log = None if baseline_directory is None else read_run_log(baseline_directory)
    iteration = choose_iteration(log, baseline_log, step)
    worst = worst_steps(log.steps)
    evidence = gather(log, {iteration, *(each.iteration for each in worst)})
    baseline = None if baseline_log is None else gather(baseline_log, {iteration})
    numbers = summarize(log.steps) if baseline_log is None else compare(baseline_log, log)
    why = numbers.explanation if isinstance(numbers, Comparison) else None
    views, missing = _views(iteration, evidence, baseline)
    logs = [log] if baseline_log is None else [log, baseline_log]
    pairs = [] if baseline_log is None else paired(log, baseline_log)
    both = {"baseline": [old for old, _ in pairs], "this run": [new for _, new in pairs]}
    averaged = both if pairs else {"this run": settled(log.steps)}
    columns = columns_of(numbers)
    return Report(
        title=" against ".join(run_name(each.directory) for each in logs),
        facts=run_facts(log.header),
        headline=headline(numbers),
        findings=noise(numbers),
        numbers=numbers,
        numbers_table=Table(
            ("", *columns, "how it is known"),
            [(row.name, *(row.value(run) for run in columns.values()), row.kind) for row in ROWS],
        ),
        waterfall=None if why is None else waterfall(why),
        ranks=rank_bars(averaged),
        sampled=f"{len(averaged['this run'])} of {len(log.steps):,} steps, after the warm-up",
        loss=loss_panels(log.steps, () if baseline_log is None else baseline_log.steps),
        worst_steps=worst_table(worst, evidence.ranks),
        iteration=iteration,
        step=step_chart(views) if views else None,
        missing=missing,
        micro_batches=micro_batch_table(
            next(each for each in log.steps if each.iteration == iteration),
            evidence.ranks.steps.get(iteration, {}),
            {rank for rank, _ in shown_places(views)} if views else set(),
        ),
        coverage=coverage_frames(log.coverage, log.header.config if log.header else {}),
        coverage_iteration=log.coverage.iteration if log.coverage else 0,
        notes=_notes(evidence, baseline, numbers),
    )


def step_picture(run: RunLog, baseline: RunLog) -> tuple[int, str]:
    """A typical step of both runs as measured: its iteration, and an SVG file.

    Raises:
        ReportError: if jinja2 is not installed, or no step was measured in both.
    """
    iteration = choose_iteration(run, baseline, None)
    views = [
        *_view("baseline", gather(baseline, {iteration}), "measured", iteration),
        *_view("sparse balance", gather(run, {iteration}), "measured", iteration),
    ]
    if len(views) < 2:
        raise ReportError(
            f"{baseline.directory} and {run.directory} share no step with measured times"
        )
    return iteration, _render("step.svg.j2", chart=step_chart(views))


def _views(
    iteration: int, evidence: Evidence, baseline: Evidence | None
) -> tuple[list[StepView], list[str]]:
    """What can be drawn of the step, and what cannot."""
    wanted = [("predicted", evidence, "predicted"), ("measured", evidence, "measured")]
    if baseline is not None:
        wanted.append(("baseline, measured", baseline, "measured"))
    views, missing = [], []
    for name, run, side in wanted:
        found = _view(name, run, side, iteration)
        views += found
        if not found:
            missing.append(f"{name.capitalize()}: not drawn, not all of its times are logged.")
    return views, missing


def _view(name: str, evidence: Evidence, side: str, iteration: int) -> list[StepView]:
    """One view, or none where the times are not known."""
    timeline = evidence.timeline(side, iteration)
    contents = evidence.ranks.steps.get(iteration, {})
    return [StepView(name=name, timeline=timeline, contents=contents)] if timeline else []


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
    """The HTML page of a report, which needs no other file.

    Args:
        refresh_s: seconds after which a browser loads the page again; None: it does not.

    Raises:
        ReportError: jinja2 is not installed.
    """
    return _render("report.html.j2", report=report, refresh_s=refresh_s)


def _render(template: str, **values: Any) -> str:
    """A template of this package filled with values."""
    try:
        import jinja2
    except ImportError as error:
        raise ReportError(
            "the report needs jinja2: pip install 'sparsebalance-megatron[tools]'"
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sizes = {"frame_width": FRAME_WIDTH, "frame_height": FRAME_HEIGHT}
    sizes |= {"lines_width": LINES_WIDTH, "lines_height": LINES_HEIGHT}
    return environment.get_template(template).render(colours=COLOURS, **sizes, **values).lstrip()
