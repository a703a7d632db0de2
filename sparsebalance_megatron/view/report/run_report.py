# SPDX-License-Identifier: Apache-2.0
"""Everything that the page of a run shows, gathered from its logs and those of a baseline."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sparsebalance_megatron.log.reader import RankLogs, RunLog, read_rank_logs, read_run_log
from sparsebalance_megatron.log.records import SIDES, RunHeader
from sparsebalance_megatron.view.report import words
from sparsebalance_megatron.view.report.numbers import (
    Comparison,
    RunSummary,
    compare,
    paired,
    settled,
    summarize,
)
from sparsebalance_megatron.view.report.pictures import (
    Picture,
    coverage_picture,
    layers_picture,
    step_picture,
    waterfall,
)
from sparsebalance_megatron.view.report.timeline import (
    Timeline,
    measured_timeline,
    named_places,
    predicted_timeline,
)
from sparsebalance_megatron.view.report.words import caveats, slowest_device, slowest_text

_MOST_NOTES = 100


class ReportError(ValueError):
    """There is nothing to report, or nothing to report it with."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A run. ``ranks`` holds the iterations that were read."""

    log: RunLog
    ranks: RankLogs

    @property
    def problems(self) -> tuple[str, ...]:
        return (*self.log.problems, *self.ranks.problems)

    def timeline(self, side: str, iteration: int) -> Timeline | None:
        """Predicted or measured; None where it is not known."""
        step = next((step for step in self.log.steps if step.iteration == iteration), None)
        if step is None:
            return None
        contents = self.ranks.steps.get(iteration, {})
        if side == "predicted":
            timeline = predicted_timeline(step, self.log.schedule)
        else:
            timeline = measured_timeline(step, contents)
        return timeline and replace(timeline, contents=contents)

    def timelines(self, iteration: int) -> dict[str, Timeline]:
        """Those that are known, by side."""
        found = {side: self.timeline(side, iteration) for side in SIDES}
        return {side: timeline for side, timeline in found.items() if timeline}


def gather(log: RunLog, iterations: Collection[int]) -> Evidence:
    """Read what the ranks logged of the given iterations."""
    ranks = read_rank_logs(log.directory, iterations)
    missing = [place for place in log.steps[-1].places if place not in ranks.headers]
    if ranks.headers and missing:
        problem = f"{log.directory / 'ranks'}: no log of {named_places(missing)}; left out"
        ranks = replace(ranks, problems=(*ranks.problems, problem))
    return Evidence(log=log, ranks=ranks)


def choose_iteration(log: RunLog, baseline: RunLog | None, asked: int | None) -> int:
    """The iteration asked for, or else a typical one that was measured.

    Typical: of the median time, after the warm-up, of the steps that both runs took.

    Raises:
        ReportError: if the log does not hold the iteration asked for.
    """
    if asked is not None:
        known = [step.iteration for step in log.steps]
        if asked not in known:
            raise ReportError(
                f"--step {asked}: not in {log.directory}, whose iterations are "
                f"{known[0]} to {known[-1]}; choose one of them"
            )
        return asked
    pairs = paired(log, baseline) if baseline else []
    candidates = [new for _, new in pairs] or [*settled(log.steps)]
    timed = [step for step in candidates if step.complete and step.iteration_ms is not None]
    if not timed:
        return next(
            (step for step in reversed(candidates) if step.complete), log.steps[-1]
        ).iteration
    timed.sort(key=lambda step: step.iteration_ms or 0.0)
    return timed[len(timed) // 2].iteration


@dataclass(frozen=True, kw_only=True)
class Report:
    """Contents of a page.

    ``headers``: of the runs, by their names. ``remarks``: on times and devices. ``missing``: what
    cannot be drawn of the step, and why. ``notes``: what the logs lack.
    """

    title: str
    headers: Mapping[str, RunHeader | None]
    numbers: RunSummary | Comparison
    remarks: Sequence[str]
    waterfall: Picture | None
    iteration: int
    step: Picture | None
    missing: Sequence[str]
    coverage: Picture | None
    coverage_iteration: int
    layers: Picture | None
    notes: Sequence[str]

    @property
    def not_drawn(self) -> list[str]:
        """Names of the pictures that the page lacks, and what the step lacks."""
        pictures = {"step": self.step, "coverage": self.coverage}
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
    evidence = gather(log, {iteration})
    timelines = {
        "this run, measured": evidence.timeline("measured", iteration),
        "this run, predicted": evidence.timeline("predicted", iteration),
    }
    problems = evidence.problems
    numbers: RunSummary | Comparison = summarize(log.steps, log.lockstep_ranks)
    headers, why = {"This run": log.header}, None
    if baseline_log is not None:
        baseline = gather(baseline_log, {iteration})
        of_baseline = baseline.timeline("measured", iteration)
        timelines = {"baseline, measured": of_baseline} | timelines
        numbers = compare(baseline_log, log)
        problems += (*baseline.problems, *numbers.problems)
        why = numbers.explanation
        headers = {"Baseline": baseline_log.header} | headers
    drawn = {name: timeline for name, timeline in timelines.items() if timeline}
    remarks = caveats(numbers)
    if (slowest := slowest_device(settled(log.steps))) is not None:
        remarks.append(f"This run's {slowest_text(*slowest, evidence.ranks)}.")
    notes = list(dict.fromkeys(problems))
    if len(notes) > _MOST_NOTES:
        notes[_MOST_NOTES:] = [f"{len(notes) - _MOST_NOTES} more like these"]
    logs = [log] if baseline_log is None else [log, baseline_log]
    return Report(
        # The last two parts of a directory name a run.
        title=" against ".join("/".join(each.directory.absolute().parts[-2:]) for each in logs),
        headers=headers,
        numbers=numbers,
        remarks=remarks,
        waterfall=None if why is None else waterfall(why),
        iteration=iteration,
        step=step_picture(drawn) if drawn else None,
        missing=[
            f"{name.capitalize()}: not drawn, its times are not logged."
            for name in timelines
            if name not in drawn
        ],
        coverage=coverage_picture(log.coverage, log.header.config if log.header else {}),
        coverage_iteration=log.coverage.iteration if log.coverage else 0,
        layers=layers_picture(log.header),
        notes=notes,
    )


def picture_of_both(run: RunLog, baseline: RunLog) -> tuple[int, str]:
    """A typical step of both runs as measured: its iteration, and an SVG file.

    Raises:
        ReportError: if no step was measured in both.
    """
    iteration = choose_iteration(run, baseline, None)
    named = {"baseline": baseline, "sparse balance": run}
    timelines = {
        name: timeline
        for name, log in named.items()
        if (timeline := gather(log, {iteration}).timeline("measured", iteration))
    }
    if len(timelines) < 2:
        raise ReportError(
            f"{baseline.directory} and {run.directory} share no step with measured times"
        )
    return iteration, step_picture(timelines).svg


def render_page(report: Report) -> str:
    """The HTML page of a report, which needs no other file."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(report=report, words=words).lstrip()
