# SPDX-License-Identifier: Apache-2.0
"""The numbers of one run, or of two side by side, as sentences and as tables of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsebalance_megatron.layer_budgets import DENSE, base_budgets
from sparsebalance_megatron.log.reader import RankLogs
from sparsebalance_megatron.log.records import SIDES, CoverageRecord, Place, RunHeader, StepRecord
from sparsebalance_megatron.plan.job import lockstep_notice
from sparsebalance_megatron.plan.pipeline.operation_times import stage_busy_ms
from sparsebalance_megatron.text_table import printable, shown_ms
from sparsebalance_megatron.view.report.numbers import Comparison, RunSummary

_OF_THE_JOB = ("data_parallel_size", "pipeline_stages", "virtual_stages", "micro_batches", "layers")
_SOFTWARE = ("megatron_core", "torch", "device", "cost_source")
_SLOW = 1.05
"""A device that takes so much longer than the median is named."""


def headline(numbers: RunSummary | Comparison) -> str:
    """The speedup, or without a baseline the parts of the mean step."""
    if isinstance(numbers, Comparison):
        return speedup_text(numbers)
    if numbers.split is None:
        return "No step of this run was measured whole."
    split = numbers.split
    compute, waiting, rest = (
        f"{part_ms / split.step_ms:.0%}"
        for part_ms in (split.compute_ms, split.waiting_ms, split.rest_ms)
    )
    return (
        f"Measured: a mean step takes {shown_ms(split.step_ms)} ms: {compute} computing, {waiting} "
        f"waiting, {rest} the rest."
    )


def speedup_text(comparison: Comparison, baseline: str = "the baseline") -> str:
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
        f"{words}: a mean step takes {shown_ms(why.run.step_ms)} ms instead of "
        f"{shown_ms(why.baseline.step_ms)} ms."
    )


def changes(numbers: RunSummary | Comparison) -> list[str]:
    why = numbers.explanation if isinstance(numbers, Comparison) else None
    if why is None:
        return []
    parts = ", ".join(f"{change.name} {change.signed}" for change in why.changes)
    return [f"From the baseline's {shown_ms(why.baseline.step_ms)} ms: {parts} ms."]


def caveats(numbers: RunSummary | Comparison) -> list[str]:
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
    if header is None:
        return "The log has no header: the run's shape is unknown."
    known = {name: getattr(header.job, name) for name in _OF_THE_JOB}
    known |= {name: getattr(header, name) for name in _SOFTWARE}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in known.items())


Row = dict[str, str]
"""Cells of a table by their headings, of which each row has the same."""


def _by_name(numbers: RunSummary | Comparison) -> dict[str, RunSummary]:
    if isinstance(numbers, RunSummary):
        return {"this run": numbers}
    return {"baseline": numbers.baseline, "sparse balance": numbers.sparse_balance}


def numbers_table(
    numbers: RunSummary | Comparison, beside: Mapping[str, Comparison] | None = None
) -> list[Row]:
    """The runs side by side, and where each number comes from."""
    runs = {name: other.baseline for name, other in (beside or {}).items()} | _by_name(numbers)
    return [
        {
            "": name,
            **{of: _shown(run, path, layout) for of, run in runs.items()},
            HOW_KNOWN: kind,
        }
        for name, kind, path, layout in _ROWS
        if path not in _OF_WINDOWS or any(run.window_steps > 1 for run in runs.values())
    ]


HOW_KNOWN = "how it is known"


_ROWS = (
    ("iteration, ms (median)", "measured", "iteration_ms_median", "ms"),
    ("mean step, ms", "measured", "split.step_ms", "ms"),
    ("  of it waiting, ms", "measured", "split.waiting_ms", "ms"),
    ("  of it computing, ms", "measured", "split.compute_ms", "ms"),
    ("  of it the rest, ms", "measured", "split.rest_ms", "ms"),
    ("imbalance of ranks, max/mean", "measured", "figures.imbalance", ".3f"),
    ("busiest rank, ms: measured", "measured", "figures.busiest_rank_ms_measured", "ms"),
    ("busiest rank, ms: predicted", "predicted", "figures.busiest_rank_ms_predicted", "ms"),
    ("step, ms: predicted lower bound", "predicted", "figures.lower_bound_ms", "ms"),
    ("error of predicted rank times", "both", "figures.predicted_error", ".1%"),
    ("work, relative to base budgets", "predicted", "figures.work_ratio", ".1%"),
    ("score coverage (mean)", "measured", "figures.coverage", "z.4f"),
    ("  of base budgets", "measured", "figures.coverage_base", "z.4f"),
    ("  as planned", "predicted", "figures.coverage_predicted", "z.4f"),
    (
        "  gained over base budgets, by tokens",
        *("measured", "figures.coverage_gained_by_token", "+z.4f"),
    ),
    ("loss, first step", "measured", "loss_first", "z.4f"),
    ("loss, last step", "measured", "loss_last", "z.4f"),
    ("steps", "logged", "steps", "d"),
    ("  of them warm-up", "logged", "warm_up_steps", "d"),
    ("  of a window", "logged", "window_steps", "d"),
    ("tokens a step: deviation over mean", "logged", "tokens_variation", ".1%"),
    ("  correlation with the step before", "logged", "tokens_correlation", "+.2f"),
)
"""Rows of the table: words, where a number comes from, its place in a summary, its layout."""
_OF_WINDOWS = ("window_steps", "tokens_variation", "tokens_correlation")
"""Places of rows that stand only beside a run with windows."""


def _shown(run: RunSummary, path: str, layout: str) -> str:
    part, _, name = path.rpartition(".")
    if part == "figures":
        value = run.figures[name]
    else:
        within = run.split if part else run
        value = None if within is None else getattr(within, name)
    if value is None:
        return "not measured"
    return shown_ms(value) if layout == "ms" else format(value, layout)


def coverage_table(record: CoverageRecord | None) -> list[Row]:
    """Coverage at budgets of powers of two, the mean of the layers and the least, by length in
    blocks; every budget covers one block."""
    if record is None:
        return []
    budgets = [budget for budget in record.grid if budget.bit_count() == 1]
    rows = []
    for bucket, blocks in enumerate(record.bucket_blocks):
        curves_LK = record.curves_LUK[:, bucket]
        curves_LK = curves_LK[np.isfinite(curves_LK).all(axis=1)]
        if blocks == 1 or not len(curves_LK):
            continue
        least = 1 << bucket
        row = {"blocks": f"{least} to {blocks}" if least < blocks else str(blocks)}
        for budget in budgets:
            each_L = curves_LK[:, record.grid.index(budget)]
            cell = f"{each_L.mean():.3f} ({each_L.min():.3f})"
            row[str(budget)] = cell if budget < blocks else ""
        rows.append(row)
    return rows


def layers_table(header: RunHeader | None) -> list[Row]:
    """Base budgets by layer, largest first; no rows where all layers have the same."""
    config = header.config if header else {}
    if header is None or config.get("layer_budgets") is None:
        return []
    budget_L = base_budgets(config["base_budget"], config["layer_budgets"], header.job.layers)
    layers: dict[int, list[str]] = {}
    for layer, budget in enumerate(budget_L):
        layers.setdefault(budget, []).append(str(layer))
    rows = [
        {
            "base budget, blocks": "all: dense" if budget == DENSE else str(budget),
            "layers": ", ".join(layers[budget]),
        }
        for budget in sorted(layers, reverse=True)
    ]
    return rows if len(rows) > 1 else []


def slowest_device(steps: Sequence[StepRecord]) -> tuple[Place, float] | None:
    """The stage that exceeds its prediction most, and how many times as slow as the median it is;
    None where that is hardly slower, or not known. Steps of the last one's shape count."""
    alike = [each for each in steps if each.shape[:2] == steps[-1].shape[:2] and each.complete]
    if not alike or len(alike[-1].places) < 2:
        return None
    predicted_RP, measured_RP = (
        np.sum([stage_busy_ms(each.times_2RPVM(side)) for each in alike], axis=0) for side in SIDES
    )
    if not (predicted_RP > 0.0).all():
        return None
    ratio_RP = measured_RP / predicted_RP
    typical, slowest = float(np.median(ratio_RP)), float(ratio_RP.max())
    if not slowest > _SLOW * typical > 0.0:
        return None
    return alike[-1].places[int(ratio_RP.argmax())], slowest / typical


def slowest_text(place: Place, slowness: float, ranks: RankLogs) -> str:
    rank, stage = place
    where = f" on {printable(ranks.headers[place].host)}" if place in ranks.headers else ""
    return (
        f"slowest: rank {rank} stage {stage}{where}, {slowness:.2f} times the median time for its "
        "work"
    )
