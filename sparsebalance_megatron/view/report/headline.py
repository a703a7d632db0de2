# SPDX-License-Identifier: Apache-2.0
"""A run's headline, and what its tables and pictures do not show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebalance_megatron.view.report.comparison import Comparison, RunSummary
from sparsebalance_megatron.view.report.comparison_table import ms_text

_SIZES = (
    *("data_parallel_size", "pipeline_stages", "virtual_stages", "micro_batches", "layers"),
    *("megatron_core", "torch", "device", "cost_source"),
)
_SETTINGS = ("block_size", "base_budget", "batching", "tuning")


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
    why = comparison.explanation
    words = f"Measured: {comparison.speedup_total:.2f} times as fast as the baseline"
    if why is not None and why.speedup_interval is not None:
        low, high = why.speedup_interval
        words += f" (95 % interval {low:.2f} to {high:.2f})"
    if why is not None:
        words += (
            f": a mean step takes {ms_text(why.run.step_ms)} ms instead of "
            f"{ms_text(why.baseline.step_ms)} ms"
        )
    return words + "."


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


def changes(comparison: Comparison) -> list[str]:
    """The waterfall as a line of text."""
    why = comparison.explanation
    if why is None:
        return []
    parts = ", ".join(f"{change.name} {change.signed}" for change in why.changes)
    return [f"From the baseline's {ms_text(why.baseline.step_ms)} ms: {parts} ms."]


def run_facts(header: Mapping[str, Any]) -> str:
    """What ran, as far as the log's header says."""
    config = header.get("config")
    settings = config if isinstance(config, Mapping) else {}
    known = [
        f"{name.replace('_', ' ')} {source[name]}"
        for source, names in ((header, _SIZES), (settings, _SETTINGS))
        for name in names
        if isinstance(source.get(name), str | int) and source[name] != ""
    ]
    return ", ".join(known) or "The log has no header: the run's shape is unknown."
