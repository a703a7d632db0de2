# SPDX-License-Identifier: Apache-2.0
"""Everything that the page of a run shows, gathered from its logs and those of a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sparsebalance_megatron.log.reader import RankLogs, RunLog, read_rank_logs, read_run_log
from sparsebalance_megatron.log.records import SIDES, RunHeader
from sparsebalance_megatron.view.report import words
from sparsebalance_megatron.view.report.numbers import (
    Beside,
    Comparison,
    RunSummary,
    compare,
    compare_beside,
    paired,
    settled,
    summarize,
    time_parts,
)
from sparsebalance_megatron.view.report.pictures import history_picture, step_picture
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
    """The iteration asked for, or else, after the warm-up, of the steps that both runs took the
    nearest to their medians in time and in waiting."""
    if asked is not None:
        known = [step.iteration for step in log.steps]
        if asked not in known:
            raise ReportError(
                f"--step {asked}: not in {log.directory}, whose iterations are "
                f"{known[0]} to {known[-1]}; choose one of them"
            )
        return asked
    pairs = paired(log, baseline) if baseline else [(step, step) for step in settled(log.steps)]
    whole = [pair for pair in pairs or [(each, each) for each in log.steps] if pair[1].complete]
    # [side][step][part]: the time of the step, and of it waiting.
    parts = np.array([time_parts([pair[side] for pair in whole]) for side in (0, 1)])
    values = np.stack([parts.sum(axis=2), parts[..., 1]])
    measured = np.isfinite(values).all(axis=(0, 1))
    if not measured.any():
        return (whole[-1][1] if whole else log.steps[-1]).iteration
    off = np.abs(values - np.median(values[..., measured], axis=2, keepdims=True))
    nearest = np.where(measured, off.sum(axis=(0, 1)), np.inf).argmin()
    return whole[int(nearest)][1].iteration


@dataclass(frozen=True, kw_only=True)
class Report:
    """Contents of a page.

    ``remarks``: on times and devices. ``timelines``: of the step that is drawn. ``missing``: what
    cannot be, and why. ``notes``: what the logs lack. ``histories``: runs that are drawn over their
    steps.
    """

    title: str
    headers: Mapping[str, RunHeader | None]
    numbers: RunSummary | Comparison
    remarks: Sequence[str]
    iteration: int
    timelines: Mapping[str, Timeline]
    missing: Sequence[str]
    notes: Sequence[str]
    beside: Mapping[str, Beside]
    histories: Mapping[str, RunLog]


def make_report(
    run_directory: Path,
    baseline_directory: Path | None,
    step: int | None,
    beside: Sequence[Path] = (),
) -> Report:
    """Everything a page shows; ``step`` is the iteration to draw, None a typical one."""
    log = read_run_log(run_directory)
    baseline_log = None if baseline_directory is None else read_run_log(baseline_directory)
    iteration = choose_iteration(log, baseline_log, step)
    ranks, of_run = gather(log, iteration)
    timelines = {f"this run, {side}": of_run.get(side) for side in reversed(SIDES)}
    problems = (*log.problems, *ranks.problems)
    numbers: RunSummary | Comparison = summarize(log.steps, log.header)
    headers = {"This run": log.header}
    others: dict[str, Beside] = {}
    if baseline_log is not None:
        others = compare_beside(baseline_log, log, beside)
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
        notes=list(dict.fromkeys(problems)),
        beside=others,
        histories={"run": log} | ({} if baseline_log is None else {"baseline": baseline_log}),
    )


def picture_of_both(run: RunLog, baseline: RunLog) -> tuple[int, str]:
    """A typical step of both runs as measured: its iteration, and an SVG file."""
    iteration = choose_iteration(run, baseline, None)
    named = {"baseline": baseline, "run": run}
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
    history = history_picture(report.histories)
    template = environment.get_template("report.html.j2")
    return template.render(report=report, step=step, history=history, words=words).lstrip()
