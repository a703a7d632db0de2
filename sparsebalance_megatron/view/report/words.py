# SPDX-License-Identifier: Apache-2.0
"""The numbers of one run, or of two side by side, as sentences and as tables of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sparsebalance_megatron.log.reader import RankLogs
from sparsebalance_megatron.log.records import SIDES, RunHeader, StepRecord
from sparsebalance_megatron.plan.job import lockstep_notice
from sparsebalance_megatron.text_table import shown_ms
from sparsebalance_megatron.view.report.numbers import Comparison, RunSummary, settled

_OF_THE_JOB = ("data_parallel_size", "pipeline_stages", "virtual_stages", "micro_batches", "layers")
_SOFTWARE = ("megatron_core", "torch", "device", "cost_source")
_MOST_WORST_STEPS = 5
_WORST_HEADINGS = (
    *("iteration", "lost, ms", "rank, stage", "host", "micro-batch", "tokens"),
    *("predicted, ms", "measured, ms", "ratio"),
)
_SETTINGS = ("block_size", "base_budget", "layer_budgets", "batching", "tuning")


def headline(numbers: RunSummary | Comparison) -> str:
    """The speedup, or without a baseline the parts of the mean step."""
    if isinstance(numbers, Comparison):
        return _speedup(numbers)
    if numbers.split is None:
        return "No step of this run was measured whole."
    split = numbers.split
    compute, waiting, rest = (
        f"{part_ms / split.step_ms:.0%}"
        for part_ms in (split.compute_ms, split.waiting_ms, split.rest_ms)
    )
    return (
        f"Measured: a mean step takes {ms_text(split.step_ms)} ms: {compute} computing, {waiting} "
        f"waiting, {rest} the rest."
    )


def _speedup(comparison: Comparison, baseline: str = "the baseline") -> str:
    if comparison.speedup is None:
        return (
            f"Speedup over {baseline}: not measured. The runs share no timed step of equal samples."
        )
    words = f"Measured: {comparison.speedup:.2f} times as fast as {baseline}"
    why = comparison.explanation
    if why is None:
        return f"{words}."
    if why.speedup_interval is not None:
        low, high = why.speedup_interval
        words += f" (95 % interval {low:.2f} to {high:.2f})"
    return (
        f"{words}: a mean step takes {ms_text(why.run.step_ms)} ms instead of "
        f"{ms_text(why.baseline.step_ms)} ms."
    )


def headlines_beside(beside: Mapping[str, Comparison]) -> list[str]:
    """The speedup over each of the other runs, by the names of their directories."""
    return [_speedup(comparison, name) for name, comparison in beside.items()]


def changes(numbers: RunSummary | Comparison) -> list[str]:
    """The waterfall as a line of text; none without a baseline."""
    why = numbers.explanation if isinstance(numbers, Comparison) else None
    if why is None:
        return []
    parts = ", ".join(f"{change.name} {change.signed}" for change in why.changes)
    return [f"From the baseline's {ms_text(why.baseline.step_ms)} ms: {parts} ms."]


def caveats(numbers: RunSummary | Comparison) -> list[str]:
    """Sentences on how the times of a rank's own work are known."""
    notices = {name: lockstep_notice(run.lockstep_ranks) for name, run in _by_name(numbers).items()}
    alike = len(set(notices.values())) == 1
    named = [
        notice if alike else f"{name.capitalize()}: {notice}"
        for name, notice in notices.items()
        if notice
    ]
    return list(dict.fromkeys(named))


def settings_that_differ(
    numbers: RunSummary | Comparison, beside: Mapping[str, Comparison] | None = None
) -> list[str]:
    """Sentences that precede every number of a comparison; none of runs alike."""
    compared = {"Runs": numbers} if isinstance(numbers, Comparison) else {}
    compared |= {f"The run and {name}": other for name, other in (beside or {}).items()}
    return [
        f"{names} differ in: {'; '.join(each.differences)}."
        for names, each in compared.items()
        if each.differences
    ]


def descriptions(headers: Mapping[str, RunHeader | None]) -> list[str]:
    """A sentence on every run by its name: what attention reads, and how samples are placed."""
    return [f"{name}: {_described(header.config)}." for name, header in headers.items() if header]


def _described(config: Mapping[str, Any]) -> str:
    tuning, placed = config.get("tuning"), _PLACED.get(str(config.get("batching")), "")
    if "dense:all" in str(config.get("layer_budgets")):
        return f"dense attention, {placed}"
    blocks, tokens = config.get("base_budget"), config.get("block_size")
    return (
        f"block-sparse attention, {_TUNED.get(str(tuning), tuning)} {blocks} blocks of {tokens} "
        f"tokens, {placed}"
    )


_PLACED = {
    "arrival": "samples in order of arrival",
    "length": "samples placed by tokens",
    "latency": "samples placed by predicted latency",
    "makespan": "samples placed for the shortest step",
}
_TUNED = {
    "off": "every sample at the base budget of",
    "raise": "budgets raised where ranks would wait, from the base budget of",
    "anchor": "budgets moved to the mean latency (the paper), around the base budget of",
}


def run_facts(header: RunHeader | None) -> str:
    """Facts about a run from the log's header."""
    if header is None:
        return "The log has no header: the run's shape is unknown."
    known = {name: getattr(header.job, name) for name in _OF_THE_JOB}
    known |= {name: getattr(header, name) for name in _SOFTWARE}
    config = header.config
    known |= {name: config[name] for name in _SETTINGS if config.get(name) is not None}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in known.items())


class Table(NamedTuple):
    """Text in rows; a cell is empty where the logs do not say."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def _by_name(numbers: RunSummary | Comparison) -> dict[str, RunSummary]:
    if isinstance(numbers, RunSummary):
        return {"this run": numbers}
    return {"baseline": numbers.baseline, "sparse balance": numbers.sparse_balance}


def numbers_table(
    numbers: RunSummary | Comparison, beside: Mapping[str, Comparison] | None = None
) -> Table:
    """The runs side by side, and where each number comes from."""
    runs = {name: other.baseline for name, other in (beside or {}).items()} | _by_name(numbers)
    rows = [(name, *map(text, runs.values()), kind) for name, kind, text in _rows()]
    return Table(("", *runs, "how it is known"), rows)


def _rows() -> Iterator[tuple[str, str, Callable[[RunSummary], str]]]:
    """What each number is, where it comes from, and its text."""
    yield "iteration, ms (median)", "measured", lambda run: ms_text(run.iteration_ms_median)
    yield "mean step, ms", "measured", lambda run: _part(run, "step_ms")
    yield "  of it waiting, ms", "measured", lambda run: _part(run, "waiting_ms")
    yield "  of it computing, ms", "measured", lambda run: _part(run, "compute_ms")
    yield "  of it the rest, ms", "measured", lambda run: _part(run, "rest_ms")
    for name, kind, figure, layout in _FIGURES:
        yield name, kind, partial(_figure, name=figure, layout=layout)
    yield "loss, first step", "measured", lambda run: text_of(run.loss_first, "z.4f")
    yield "loss, last step", "measured", lambda run: text_of(run.loss_last, "z.4f")
    yield "steps, of them warm-up", "logged", lambda run: f"{run.steps}, {run.warm_up_steps}"


_FIGURES = (
    ("imbalance of ranks, max/mean", "measured", "imbalance", ".3f"),
    ("busiest rank, ms: measured", "measured", "busiest_rank_ms_measured", "ms"),
    ("busiest rank, ms: predicted", "predicted", "busiest_rank_ms_predicted", "ms"),
    ("step, ms: predicted lower bound", "predicted", "lower_bound_ms", "ms"),
    ("error of predicted rank times", "both", "predicted_error", ".1%"),
    ("work, relative to base budgets", "predicted", "work_ratio", ".1%"),
    ("score coverage (mean)", "measured", "coverage", "z.4f"),
    ("  of base budgets", "measured", "coverage_base", "z.4f"),
    ("  as planned", "predicted", "coverage_predicted", "z.4f"),
    ("  gained over base budgets, by tokens", "measured", "coverage_gained_by_token", "+z.4f"),
)
"""Rows of a run's figures: words, where a figure comes from, its name, its layout."""


def _figure(run: RunSummary, *, name: str, layout: str) -> str:
    value = run.figures[name]
    return ms_text(value) if layout == "ms" else text_of(value, layout)


def ms_text(value: float | None) -> str:
    """A time without its unit."""
    return "not measured" if value is None else shown_ms(value)


def _part(run: RunSummary, name: str) -> str:
    """A part of the mean step's time, in ms."""
    return ms_text(None if run.split is None else getattr(run.split, name))


def text_of(value: float | None, layout: str) -> str:
    """A number in a layout."""
    return "not measured" if value is None else format(value, layout)


def worst_steps(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Steps after the warm-up whose busiest rank exceeded its prediction most, worst first.

    Without a cost table predicted times are relative, so they are scaled to the median step.
    """
    known = [
        (step, step.figures.busiest_rank_ms_measured, step.figures.busiest_rank_ms_predicted)
        for step in settled(steps)
        if step.figures.busiest_rank_ms_measured and step.figures.busiest_rank_ms_predicted
    ]
    if not known:
        return []
    scale = float(np.median([measured_ms / predicted_ms for _, measured_ms, predicted_ms in known]))
    lost = [(measured_ms - scale * predicted_ms, step) for step, measured_ms, predicted_ms in known]
    lost.sort(key=lambda each: -each[0])
    return [step for lost_ms, step in lost[:_MOST_WORST_STEPS] if lost_ms > 0.0]


def worst_table(steps: Iterable[StepRecord], ranks: RankLogs) -> Table:
    """The micro-batch of every step that exceeded its prediction most, on one stage.

    The step that lost most comes first.
    """
    found = [_worst_row(step, ranks) for step in steps if step.complete]
    rows = [row for _, row in sorted(found, key=lambda each: -each[0])]
    return Table(_WORST_HEADINGS, rows)


def _worst_row(record: StepRecord, ranks: RankLogs) -> tuple[float, tuple[str, ...]]:
    """Milliseconds of the worst micro-batch above its prediction, and the cells of its row."""
    predicted_RPM, measured_RPM = (record.times_2RPVM(side).sum(axis=(0, 3)) for side in SIDES)
    scale = float(measured_RPM.sum() / predicted_RPM.sum()) if predicted_RPM.sum() > 0.0 else 1.0
    excess_RPM = measured_RPM - scale * predicted_RPM
    place = np.unravel_index(excess_RPM.argmax(), excess_RPM.shape)
    rank, stage, position = map(int, place)
    header = ranks.headers.get((rank, stage))
    step = ranks.steps.get(record.iteration, {}).get((rank, stage))
    held = [each for each in step.micro_batches if each.position == position] if step else []
    expected_ms = scale * predicted_RPM[place]
    row = (
        str(record.iteration),
        f"{excess_RPM[place]:,.0f}",
        f"{rank}, {stage}",
        header.host if header else "",
        str(position),
        f"{held[0].tokens:,}" if held else "",
        f"{predicted_RPM[place]:,.4g}",
        f"{measured_RPM[place]:,.4g}",
        f"{measured_RPM[place] / expected_ms:.2f}" if expected_ms > 0.0 else "",
    )
    return float(excess_RPM[place]), row
