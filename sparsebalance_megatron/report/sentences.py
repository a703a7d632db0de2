# SPDX-License-Identifier: Apache-2.0
"""What a run's numbers say, in plain sentences; each says what was measured and what predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebalance_megatron.report.comparison import Comparison, RunSummary


def comparison_findings(comparison: Comparison) -> list[str]:
    """Of a run against its baseline."""
    run, baseline = comparison.sparse_balance, comparison.baseline
    return [
        _speedup(comparison),
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
    return (
        f"Measured: {_times(comparison.speedup_total)} as the baseline in total time after the "
        f"warm-up; {_times(comparison.speedup)} by median iterations, "
        f"{_times(comparison.speedup_paired)} in the median step."
    )


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
    words = f"Predicted: the work is {run.work_ratio:.1%} of that at base budgets"
    if run.coverage_mean is not None and baseline.coverage_mean is not None:
        words += (
            f"; measured: the mean score coverage is {run.coverage_mean:.3f} against "
            f"{baseline.coverage_mean:.3f}"
        )
    if run.work_ratio < 0.995:
        words += ". What is below 100 % was cut, so the speedup is not balance alone"
    return [words + "."]


def _times(ratio: float | None) -> str:
    return "an unknown ratio" if ratio is None else f"{ratio:.2f} times as fast"


def _ms(value: float | None) -> str:
    if value is None:
        return "an unknown time"
    return f"{value:,.1f} ms" if value >= 1.0 else f"{value:.3g} ms"
