# SPDX-License-Identifier: Apache-2.0
"""Everything that the page of a run shows, gathered from its logs and those of a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sparsebalance_megatron.log.reader import RankLogs, RunLog, read_rank_logs, read_run_log
from sparsebalance_megatron.log.records import SIDES, CoverageRecord, RunHeader
from sparsebalance_megatron.view.report import words
from sparsebalance_megatron.view.report.numbers import (
    Comparison,
    RunSummary,
    compare,
    paired,
    settled,
    summarize,
)
from sparsebalance_megatron.view.report.pictures import step_picture
from sparsebalance_megatron.view.report.timeline import (
    Timeline,
    measured_timeline,
    named_places,
    predicted_timeline,
)


class ReportError(ValueError):
    """There is nothing to report, or nothing to report it with."""


def gather(log: RunLog, iteration: int) -> tuple[RankLogs, dict[str, Timeline]]:
    """What the ranks logged of a step, and its timelines that are known, by side."""
    ranks = read_rank_logs(log.directory, iteration)
    missing = [place for place in log.steps[-1].places if place not in ranks.headers]
    if ranks.headers and missing:
        problem = f"{log.directory / 'ranks'}: no log of {named_places(missing)}; left out"
        ranks = replace(ranks, problems=(*ranks.problems, problem))
    step = next((step for step in log.steps if step.iteration == iteration), None)
    if step is None:
        return ranks, {}
    found = {
        "predicted": predicted_timeline(step, log.schedule),
        "measured": measured_timeline(step, ranks.steps),
    }
    return ranks, {
        side: replace(timeline, contents=ranks.steps)
        for side, timeline in found.items()
        if timeline is not None
    }


def choose_iteration(log: RunLog, baseline: RunLog | None, asked: int | None) -> int:
    """The iteration asked for, or else one of the median time, after the warm-up, of the steps
    that both runs took."""
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
    whole = [step for step in candidates if step.complete]
    timed = sorted(
        (step for step in whole if step.iteration_ms is not None),
        key=lambda step: step.iteration_ms or 0.0,
    )
    return timed[len(timed) // 2].iteration if timed else (whole or log.steps)[-1].iteration


@dataclass(frozen=True, kw_only=True)
class Report:
    """Contents of a page.

    ``remarks``: on times and devices. ``timelines``: of the step that is drawn. ``missing``: what
    cannot be, and why. ``notes``: what the logs lack.
    """

    title: str
    headers: Mapping[str, RunHeader | None]
    numbers: RunSummary | Comparison
    remarks: Sequence[str]
    iteration: int
    timelines: Mapping[str, Timeline]
    missing: Sequence[str]
    coverage: CoverageRecord | None
    notes: Sequence[str]


def make_report(run_directory: Path, baseline_directory: Path | None, step: int | None) -> Report:
    """Everything a page shows; ``step`` is the iteration to draw, None a typical one."""
    log = read_run_log(run_directory)
    baseline_log = None if baseline_directory is None else read_run_log(baseline_directory)
    iteration = choose_iteration(log, baseline_log, step)
    ranks, of_run = gather(log, iteration)
    timelines = {f"this run, {side}": of_run.get(side) for side in reversed(SIDES)}
    problems = (*log.problems, *ranks.problems)
    numbers: RunSummary | Comparison = summarize(log.steps, log.lockstep_ranks)
    headers = {"This run": log.header}
    if baseline_log is not None:
        ranks_of_baseline, of_baseline = gather(baseline_log, iteration)
        timelines = {"baseline, measured": of_baseline.get("measured")} | timelines
        numbers = compare(baseline_log, log)
        problems += (*ranks_of_baseline.problems, *numbers.problems)
        headers = {"Baseline": baseline_log.header} | headers
    drawn = {name: timeline for name, timeline in timelines.items() if timeline}
    remarks = words.caveats(numbers)
    if (slowest := words.slowest_device(settled(log.steps))) is not None:
        remarks.append(f"This run's {words.slowest_text(*slowest, ranks)}.")
    logs = [log] if baseline_log is None else [log, baseline_log]
    return Report(
        # The last two parts of a directory name a run.
        title=" against ".join("/".join(each.directory.absolute().parts[-2:]) for each in logs),
        headers=headers,
        numbers=numbers,
        remarks=remarks,
        iteration=iteration,
        timelines=drawn,
        missing=[
            f"{name.capitalize()}: not drawn, its times are not logged."
            for name in timelines
            if name not in drawn
        ],
        coverage=log.coverage,
        notes=list(dict.fromkeys(problems)),
    )


def picture_of_both(run: RunLog, baseline: RunLog) -> tuple[int, str]:
    """A typical step of both runs as measured: its iteration, and an SVG file."""
    iteration = choose_iteration(run, baseline, None)
    named = {"baseline": baseline, "sparse balance": run}
    timelines = {
        name: timeline
        for name, log in named.items()
        if (timeline := gather(log, iteration)[1].get("measured"))
    }
    if len(timelines) < 2:
        raise ReportError(
            f"{baseline.directory} and {run.directory} share no step with measured times"
        )
    return iteration, step_picture(timelines).svg


def render_page(report: Report) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    step = step_picture(report.timelines) if report.timelines else None
    template = environment.get_template("report.html.j2")
    return template.render(report=report, step=step, words=words).lstrip()
