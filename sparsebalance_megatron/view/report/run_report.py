# SPDX-License-Identifier: Apache-2.0
"""Everything that the page of a run shows, gathered from its logs and those of a baseline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sparsebalance_megatron.log.reader import RankLogs, RunLog, read_rank_logs, read_run_log
from sparsebalance_megatron.view.report import words
from sparsebalance_megatron.view.report.numbers import (
    Numbers,
    numbers_of,
    paired,
    settled,
    time_parts,
)
from sparsebalance_megatron.view.report.pictures import (
    Timeline,
    history_picture,
    measured_timeline,
    named_places,
    step_picture,
)


class ReportError(ValueError):
    """There is nothing to report, or nothing to report it with."""


def gather(log: RunLog, iteration: int) -> tuple[RankLogs, Timeline | None]:
    """What the ranks logged of a step, and its timeline where they did."""
    ranks = read_rank_logs(log.directory, iteration)
    missing = [place for place in log.steps[-1].places if place not in ranks.headers]
    if ranks.headers and missing:
        problem = f"{log.directory / 'ranks'}: no log of {named_places(missing)}; left out"
        ranks = replace(ranks, problems=(*ranks.problems, problem))
    step = next((step for step in log.steps if step.iteration == iteration), None)
    return ranks, None if step is None else measured_timeline(step, ranks.steps)


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
    pairs = pairs or [(step, step) for step in log.steps]
    # [side][step][part]: the time of the step, and of it waiting.
    parts = np.array([time_parts([pair[side] for pair in pairs]) for side in (0, 1)])
    values = np.stack([parts.sum(axis=2), parts[..., 1]])
    measured = np.isfinite(values).all(axis=(0, 1))
    if not measured.any():
        return log.steps[-1].iteration
    off = np.abs(values - np.median(values[..., measured], axis=2, keepdims=True))
    nearest = np.where(measured, off.sum(axis=(0, 1)), np.inf).argmin()
    return pairs[int(nearest)][1].iteration


@dataclass(frozen=True, kw_only=True)
class Report:
    """Contents of a page.

    ``remarks``: on times and devices. ``timelines``: of the step that is drawn. ``notes``: what the
    logs lack.
    """

    title: str
    logs: Mapping[str, RunLog]
    numbers: Numbers
    remarks: Sequence[str]
    iteration: int
    timelines: Mapping[str, Timeline]
    notes: Sequence[str]

    @property
    def missing(self) -> list[str]:
        """What cannot be drawn, and why."""
        names = [name.capitalize() for name in self.logs if name not in self.timelines]
        return [f"{name}: not drawn, its times are not logged." for name in names]


def make_report(
    run_directory: Path,
    baseline_directory: Path | None,
    step: int | None,
    beside: Sequence[Path] = (),
) -> Report:
    """Everything a page shows; ``step`` is the iteration to draw, None a typical one."""
    log = read_run_log(run_directory)
    baseline = None if baseline_directory is None else read_run_log(baseline_directory)
    logs = {"run": log} if baseline is None else {"baseline": baseline, "run": log}
    numbers = numbers_of(log, baseline, beside)
    iteration = choose_iteration(log, baseline, step)
    gathered = {name: gather(each, iteration) for name, each in logs.items()}
    of_ranks = [problem for ranks, _ in gathered.values() for problem in ranks.problems]
    remarks = words.caveats(numbers)
    if (slowest := words.slowest_device(settled(log.steps))) is not None:
        remarks.append(f"This run's {words.slowest_text(*slowest, gathered['run'][0])}.")
    return Report(
        # The last two parts of a directory name a run.
        title=" over ".join(
            "/".join(each.directory.absolute().parts[-2:]) for each in reversed(logs.values())
        ),
        logs=logs,
        numbers=numbers,
        remarks=remarks,
        iteration=iteration,
        timelines={name: timeline for name, (_, timeline) in gathered.items() if timeline},
        notes=[*(numbers.problems or log.problems), *of_ranks],
    )


def picture_of_both(run: RunLog, baseline: RunLog) -> tuple[int, str]:
    """A typical step of both runs as measured: its iteration, and an SVG file."""
    iteration = choose_iteration(run, baseline, None)
    named = {"baseline": baseline, "run": run}
    timelines = {
        name: timeline for name, log in named.items() if (timeline := gather(log, iteration)[1])
    }
    if len(timelines) < 2:
        raise ReportError(
            f"{baseline.directory} and {run.directory} share no step with measured times"
        )
    return iteration, step_picture(timelines)[0]


def render_page(report: Report) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    step, remarks = step_picture(report.timelines) if report.timelines else ("", [])
    template = environment.get_template("report.html.j2")
    return template.render(
        report=report,
        step=step,
        step_remarks=remarks + report.missing,
        history=history_picture(report.logs),
        words=words,
    ).lstrip()
