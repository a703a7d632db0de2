# SPDX-License-Identifier: Apache-2.0
"""The numbers of one run, or of two side by side, as sentences and as rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from sparsebalance_megatron.log.records import RunHeader
from sparsebalance_megatron.view.report.comparison import Comparison, RunSummary

_SIZES = (
    *("data_parallel_size", "pipeline_stages", "virtual_stages", "micro_batches", "layers"),
    *("megatron_core", "torch", "device", "cost_source"),
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


def _speedup(comparison: Comparison) -> str:
    if comparison.speedup is None:
        return "Speedup: not measured, because a run has no iteration times."
    if comparison.speedup_total is None:
        return (
            f"Measured: {comparison.speedup:.2f} times as fast as the baseline by median "
            "iterations. Total times are not compared: the runs share no timed step, or saw other "
            "samples."
        )
    words = f"Measured: {comparison.speedup_total:.2f} times as fast as the baseline"
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


def noise(numbers: RunSummary | Comparison) -> list[str]:
    """How noisy the machine was, and the speedup without that; empty where it was not noisy."""
    why = numbers.explanation if isinstance(numbers, Comparison) else None
    if why is None or not why.noisy:
        return []
    share = why.machine_ms / why.baseline.compute_ms
    return [
        f"Noise: equal work took {share:+.0%} time in this run, and varied by "
        f"{why.machine_spread:.0%} from step to step. Speedup without noise: "
        f"{why.speedup_on_an_even_machine:.2f}."
    ]


def changes(numbers: RunSummary | Comparison) -> list[str]:
    """The waterfall as a line of text; none without a baseline."""
    why = numbers.explanation if isinstance(numbers, Comparison) else None
    if why is None:
        return []
    parts = ", ".join(f"{change.name} {change.signed}" for change in why.changes)
    return [f"From the baseline's {ms_text(why.baseline.step_ms)} ms: {parts} ms."]


def run_facts(header: RunHeader | None) -> str:
    """What ran, as far as the log's header says."""
    if header is None:
        return "The log has no header: the run's shape is unknown."
    known = {name: getattr(header, name) for name in _SIZES}
    config = header.config
    known |= {name: config[name] for name in _SETTINGS if config.get(name) is not None}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in known.items())


class Row(NamedTuple):
    """One line of the table; ``kind``: where the number comes from."""

    name: str
    kind: Literal["measured", "predicted", "both", "logged"]
    value: Callable[[RunSummary], str]


ROWS = (
    Row("iteration, ms (median)", "measured", lambda run: ms_text(run.iteration_ms_median)),
    Row("mean step, ms", "measured", lambda run: _part(run, "step_ms")),
    Row("  of it computing, ms", "measured", lambda run: _part(run, "compute_ms")),
    Row("  of it waiting, ms", "measured", lambda run: _part(run, "waiting_ms")),
    Row("  of it the rest, ms", "measured", lambda run: _part(run, "rest_ms")),
    Row("imbalance of ranks, max/mean", "measured", lambda run: _text(run.rank_imbalance, ".3f")),
    Row("busiest rank, ms: measured", "measured", lambda run: ms_text(run.measured_ms)),
    Row("busiest rank, ms: predicted", "predicted", lambda run: ms_text(run.predicted_ms)),
    Row("step, ms: predicted lower bound", "predicted", lambda run: ms_text(run.lower_bound_ms)),
    Row("error of predicted rank times", "both", lambda run: _text(run.predicted_error, ".1%")),
    Row(
        "computing, relative to fixed budgets",
        "predicted",
        lambda run: _text(run.work_ratio, ".1%"),
    ),
    Row("score coverage (mean)", "measured", lambda run: _text(run.coverage_mean, ".4f")),
    Row(
        "  above fixed budgets, by samples",
        "measured",
        lambda run: _text(run.coverage_gain, "+.4f"),
    ),
    Row(
        "  above fixed budgets, by tokens",
        "measured",
        lambda run: _text(run.coverage_gain_by_token, "+.4f"),
    ),
    Row("loss, first step", "measured", lambda run: _text(run.loss_first, ".4f")),
    Row("loss, last step", "measured", lambda run: _text(run.loss_last, ".4f")),
    Row("steps, of them warm-up", "logged", lambda run: f"{run.steps}, {run.warm_up_steps}"),
)


def columns_of(numbers: RunSummary | Comparison) -> dict[str, RunSummary]:
    """The runs by what they are called."""
    if isinstance(numbers, Comparison):
        return {"baseline": numbers.baseline, "sparse balance": numbers.sparse_balance}
    return {"this run": numbers}


def ms_text(value: float | None) -> str:
    """A time without its unit. Relative times can be far below a millisecond."""
    if value is not None and value >= 100.0:
        return _text(value, ",.0f")
    return _text(value, ".1f" if value is None or value >= 1.0 else ".3g")


def _part(run: RunSummary, name: str) -> str:
    """A part of the mean step's time, in ms."""
    return ms_text(None if run.split is None else getattr(run.split, name))


def _text(value: float | None, layout: str) -> str:
    return "not measured" if value is None else format(value, layout)
