# SPDX-License-Identifier: Apache-2.0
"""What a run's numbers say, in plain sentences; each says what was measured and what predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebalance_megatron.report.comparison import Comparison, RunSummary
from sparsebalance_megatron.report.explanation import Explanation


def headline(numbers: RunSummary | Comparison) -> str:
    """The one sentence that a reader in a hurry reads."""
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
        f"Measured: a mean step takes {_ms(split.step_ms)}; stages compute {compute} of it, wait "
        f"{waiting}, and {rest} is the rest of the step."
    )


def comparison_findings(comparison: Comparison) -> list[str]:
    """Of a run against its baseline, below the headline."""
    run, baseline = comparison.sparse_balance, comparison.baseline
    return [
        *_why(comparison.explanation),
        *_imbalance(run, baseline),
        *_work(run, baseline),
        *run_findings(run),
    ]


def run_findings(run: RunSummary) -> list[str]:
    """Of a run alone: how far its predictions are to be trusted."""
    found = []
    if run.predicted_error is not None and run.predicted_ms is not None:
        found.append(
            f"Predicted against measured: the busiest rank of the median step computes "
            f"{_ms(run.measured_ms)} as measured and {_ms(run.predicted_ms)} as predicted; a "
            f"rank's predicted time is {run.predicted_error:.1%} off in the median."
        )
    if run.lower_bound_ms is not None:
        found.append(
            f"Predicted: no placement of these samples makes the median step shorter than "
            f"{_ms(run.lower_bound_ms)}."
        )
    return found


def subtitle(header: Mapping[str, Any]) -> str:
    """What ran, as far as the log's header says."""
    sizes = [
        (header.get("data_parallel_size"), "data-parallel rank"),
        (header.get("pipeline_stages"), "pipeline stage"),
        (header.get("virtual_stages"), "virtual stage"),
        (header.get("micro_batches"), "micro-batch"),
        (header.get("layers"), "layer"),
    ]
    parts = [
        f"{size} {name}{_plural(name) if size != 1 else ''}"
        for size, name in sizes
        if isinstance(size, int) and not (name == "virtual stage" and size == 1)
    ]
    config = header.get("config")
    if isinstance(config, Mapping):
        parts += [
            f"{name.replace('_', ' ')} {config[name]}"
            for name in ("block_size", "base_budget", "batching", "tuning")
            if config.get(name) is not None
        ]
    versions = [("megatron_core", "megatron-core"), ("torch", "torch")]
    parts += [f"{name} {header[key]}" for key, name in versions if header.get(key)]
    parts += [str(header[key]) for key in ("device",) if header.get(key)]
    if header.get("cost_source"):
        parts.append(f"costs: {header['cost_source']}")
    return (
        ", ".join(parts) or "The log has no header: the run's shape and configuration are unknown."
    )


def _plural(name: str) -> str:
    return "es" if name.endswith("batch") else "s"


def _speedup(comparison: Comparison) -> str:
    if comparison.speedup is None:
        return "Speedup: not measured, because a run has no iteration times."
    if comparison.speedup_total is None:
        return (
            f"Measured: {_times(comparison.speedup)} as the baseline by median iterations. Total "
            "times are not compared: the runs share no timed step, or saw other samples."
        )
    why = comparison.explanation
    interval = why.speedup_interval if why is not None else None
    words = f"Measured: {_times(comparison.speedup_total)} as the baseline"
    if interval is not None:
        words += f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})"
    if why is not None:
        words += (
            f": a mean step takes {_ms(why.run.step_ms)} instead of {_ms(why.baseline.step_ms)}"
        )
    return words + "."


def _why(explanation: Explanation | None) -> list[str]:
    """What the difference consists of, and what the machine had to do with it."""
    if explanation is None:
        return []
    changes = ", ".join(f"{change.name} {change.signed} ms" for change in explanation.changes)
    found = [
        f"Measured, but for the share of attention, which is predicted: from the baseline's "
        f"{_ms(explanation.baseline.step_ms)}, {changes}."
    ]
    if explanation.noisy:
        share = explanation.machine_ms / explanation.baseline.compute_ms
        found.append(
            f"The machine was not even: equal work took {abs(share):.0%} "
            f"{'longer' if share > 0 else 'less time'} in this run than in the baseline, and from "
            f"step to step it varied by {explanation.machine_spread:.0%}. Had equal work taken "
            f"equal time, this run would be {_times(explanation.speedup_on_an_even_machine)}."
        )
    return found


def _imbalance(run: RunSummary, baseline: RunSummary) -> list[str]:
    if run.rank_imbalance is None or baseline.rank_imbalance is None:
        return []
    return [
        f"Measured: the imbalance of ranks, max/mean of their computing times, is "
        f"{run.rank_imbalance:.3f} against {baseline.rank_imbalance:.3f}."
    ]


def _work(run: RunSummary, baseline: RunSummary) -> list[str]:
    """How much of a speedup is less attention."""
    if run.work_ratio is None:
        return []
    words = f"Predicted: computing, relative to fixed budgets, is {run.work_ratio:.1%}"
    if run.coverage_mean is not None and baseline.coverage_mean is not None:
        words += (
            f"; measured: the mean score coverage is {run.coverage_mean:.3f} against "
            f"{baseline.coverage_mean:.3f}"
        )
    if run.work_ratio < 0.995:
        words += (
            ". What is below 100 % was saved by reading less, so the speedup is not balance alone"
        )
    return [words + "."]


def _times(ratio: float | None) -> str:
    return "an unknown ratio" if ratio is None else f"{ratio:.2f} times as fast"


def _ms(value: float | None) -> str:
    if value is None:
        return "an unknown time"
    if value >= 100.0:
        return f"{value:,.0f} ms"
    return f"{value:,.1f} ms" if value >= 1.0 else f"{value:.3g} ms"
