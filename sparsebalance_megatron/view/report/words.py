# SPDX-License-Identifier: Apache-2.0
"""The numbers of one run, or of two side by side, as sentences and as tables of text."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsebalance_megatron.log.reader import RankLogs, RunLog
from sparsebalance_megatron.log.records import Place, RunHeader, StepRecord
from sparsebalance_megatron.plan.job import lockstep_notice
from sparsebalance_megatron.plan.pipeline.operation_times import stage_busy_ms
from sparsebalance_megatron.text_table import printable, shown_ms
from sparsebalance_megatron.view.report.numbers import Comparison, Numbers, RunSummary, is_dense

_OF_THE_JOB = ("data_parallel_size", "pipeline_stages", "virtual_stages", "micro_batches", "layers")
_SOFTWARE = ("megatron_core", "torch", "device", "cost_source")
_SLOW = 1.05
"""A device that takes so much longer than the median is named."""


def headline(numbers: Numbers) -> str:
    """The speedup, or without a baseline the parts of the mean step."""
    if (compared := numbers.comparison) is not None:
        if compared.speedup is None:
            return (
                "Speedup over the baseline: not measured. The runs share no timed step of equal "
                "samples."
            )
        words, why = f"Measured: {_times_as_fast(compared)} as the baseline", compared.explanation
        if why is None:
            return f"{words}."
        steps_ms = f"{shown_ms(why.run.step_ms)} ms instead of {shown_ms(why.baseline.step_ms)} ms"
        return f"{words}: a mean step takes {steps_ms}."
    split = numbers.run.split
    if split is None:
        return "No step of this run was measured whole."
    return (
        f"Measured: a mean step takes {shown_ms(split.step_ms)} ms: "
        f"{split.compute_ms / split.step_ms:.0%} computing, "
        f"{split.waiting_ms / split.step_ms:.0%} waiting, "
        f"{split.rest_ms / split.step_ms:.0%} the rest."
    )


def _times_as_fast(comparison: Comparison) -> str:
    interval = comparison.explanation and comparison.explanation.speedup_interval
    words = f"{comparison.speedup:.2f} times as fast"
    return f"{words} (95 % {interval[0]:.2f} - {interval[1]:.2f})" if interval else words


def changes(numbers: Numbers) -> list[str]:
    """Says where the gain is in a step, and what it is owed to as far as other runs tell."""
    why = numbers.comparison.explanation if numbers.comparison else None
    sentences = []
    if why is not None:
        parts = {
            "computing": why.run.compute_ms - why.baseline.compute_ms,
            "waiting": why.run.waiting_ms - why.baseline.waiting_ms,
            "optimizer and the rest": why.run.rest_ms - why.baseline.rest_ms,
        }
        signed = ", ".join(f"{name} {round(ms) or 0:+,d}" for name, ms in parts.items())
        sentences.append(f"From the baseline's {shown_ms(why.baseline.step_ms)} ms: {signed} ms.")
    measured = {
        name: each
        for name, each in numbers.beside.items()
        if each.over_baseline.speedup and each.run_over.speedup
    }
    sentences += [
        f"{name} is {_times_as_fast(each.over_baseline)} as the baseline, the run "
        f"{_times_as_fast(each.run_over)} as {name}."
        for name, each in measured.items()
    ]
    runs = {each.kind: each for each in measured.values()}
    if placed := runs.get("placement"):
        gains = {"placement": placed.over_baseline.speedup or 1.0}
        rest = placed.run_over.speedup or 1.0
        if fixed := runs.get("attention"):
            by_budgets = fixed.run_over.speedup or 1.0
            gains |= {"attention": rest / by_budgets, "budgets": by_budgets}
        else:
            gains["attention and budgets"] = rest
        sentences.append(f"The gain: {', '.join(f'{by:.2f} by {of}' for of, by in gains.items())}.")
    return sentences


def caveats(numbers: Numbers) -> list[str]:
    """What the numbers include, once where it holds for every run."""
    notices = {name: lockstep_notice(run.lockstep_ranks) for name, run in numbers.runs.items()}
    if len(set(notices.values())) == 1:
        notices = {"": notices["run"]}
    return [
        f"{name.capitalize()}: {notice}" if name else notice
        for name, notice in notices.items()
        if notice
    ]


def settings_that_differ(numbers: Numbers) -> list[str]:
    """A sentence for each run that the run is compared with; none of runs alike."""
    return [
        f"From {name} to the run: {'; '.join(each.differences)}."
        for name, each in numbers.comparisons.items()
        if each.differences
    ]


def descriptions(logs: Mapping[str, RunLog]) -> list[str]:
    """A sentence on every run by its name: what attention reads, and how samples are placed."""
    headers = {name: log.header for name, log in logs.items()}
    return [f"{name}: {_described(header.config)}." for name, header in headers.items() if header]


def _described(config: Mapping[str, Any]) -> str:
    tuning, placed = config.get("tuning"), _PLACED.get(str(config.get("batching")), "")
    if is_dense(config):
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


def numbers_table(numbers: Numbers, *, every: bool = False) -> list[dict[str, str]]:
    """The runs side by side, cells by their headings: rows that answer most questions, or every
    one. Dense attention has no coverage."""
    runs, hidden = numbers.runs, set[str]()
    if all(run.figures.get("coverage") in (None, 1.0) for run in runs.values()):
        hidden |= _OF_COVERAGE
    if all(run.window_steps == 1 for run in runs.values()):
        hidden |= _OF_WINDOWS
    rows = [
        {"": name} | {of: _shown(run, path, layout) for of, run in runs.items()}
        for name, path, layout in (_ROWS if every else _FIRST_ROWS)
        if name not in hidden
    ]
    return [row for row in rows if {*row.values()} != {row[""], _NOT_MEASURED}]


_NOT_MEASURED = "not measured"
_FIRST_ROWS = (
    ("mean step, ms", "split.step_ms", "ms"),
    ("tokens/s a GPU", "tokens_per_second_per_gpu", ",.0f"),
    ("model FLOP/s utilisation", "utilisation", ".1%"),
    ("  of the step waiting, ms", "split.waiting_ms", "ms"),
    ("  computing, ms", "split.compute_ms", "ms"),
    ("coverage, mean", "figures.coverage", "z.3f"),
    ("loss, last step", "loss_last", "z.4f"),
)
_ROWS = (
    *_FIRST_ROWS,
    ("iteration, ms (median)", "iteration_ms_median", "ms"),
    ("  of the step the rest, ms", "split.rest_ms", "ms"),
    ("imbalance of ranks, max/mean", "figures.imbalance", ".3f"),
    ("busiest rank, ms", "figures.busiest_rank_ms_measured", "ms"),
    ("  predicted", "figures.busiest_rank_ms_predicted", "ms"),
    ("lower bound of the step, ms", "figures.lower_bound_ms", "ms"),
    ("error of predicted rank times", "figures.predicted_error", ".1%"),
    ("work, relative to base budgets", "figures.work_ratio", ".1%"),
    ("coverage of base budgets", "figures.coverage_base", "z.4f"),
    ("loss, first step", "loss_first", "z.4f"),
    ("steps", "steps", "d"),
    ("  of them warm-up", "warm_up_steps", "d"),
    ("  of a window", "window_steps", "d"),
    ("tokens a step: deviation over mean", "tokens_variation", ".1%"),
    ("  correlation with the step before", "tokens_correlation", "+.2f"),
)
"""Rows of the table: words, a number's place in a summary, its layout."""
_OF_WINDOWS = {name for name, path, _ in _ROWS[-3:]}
_OF_COVERAGE = {name for name, path, _ in _ROWS if "coverage" in path or "work_ratio" in path}
"""Rows that stand only where a run has windows, or attends to less than everything."""


def _shown(run: RunSummary, path: str, layout: str) -> str:
    part, _, name = path.rpartition(".")
    if part == "figures":
        value = run.figures[name]
    else:
        within = run.split if part else run
        value = None if within is None else getattr(within, name)
    if value is None:
        return _NOT_MEASURED
    return shown_ms(value) if layout == "ms" else format(value, layout)


def slowest_device(steps: Sequence[StepRecord]) -> tuple[Place, float] | None:
    """The stage that exceeds its prediction most, and how many times as slow as the median it is;
    None where that is hardly slower, or not known. Steps of the last one's shape count."""
    alike = [each for each in steps if each.places == steps[-1].places and each.complete]
    if not alike or len(alike[-1].places) < 2:
        return None
    predicted_RP = np.sum([stage_busy_ms(each.predicted.times_2RPVM) for each in alike], axis=0)
    measured_RP = np.sum([stage_busy_ms(each.measured.own_2RPVM) for each in alike], axis=0)
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
