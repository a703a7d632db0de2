# SPDX-License-Identifier: Apache-2.0
"""Predictions as tables, and what follows from them as sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from sparsebalance_megatron.cost.memory import GIBIBYTE
from sparsebalance_megatron.cost.rates import memory_gib
from sparsebalance_megatron.predict.comparison import Comparison, Layout, Layouts
from sparsebalance_megatron.predict.outcome import Outcome, unhideable_steps
from sparsebalance_megatron.predict.workload import Workload
from sparsebalance_megatron.text_table import shown_ms, text_table, wrapped

_MOSTLY_DENSE = 0.8
_MUCH_ROUTING = 0.15
_MUCH_WAITING = 0.15
_DEVICE_CHARACTERS, _KEY_CHARACTERS = 14, 10
_DOES_NOT_FIT = "*"

_OR_EXACT = ", which gains more: train with --sparse-balance-mode exact"

_COLUMNS = {
    "speed": "total time of the first row over that of the row",
    "over dense": "time of the fastest row with dense attention over that of the row",
    "bound ratio": "step time over the least that any placement and allowed budgets could take",
    "idle": "share of the GPUs' time that no micro-batch fills",
    "coverage": "of the router's score mass, by the prior (k/n)^0.35: no training run is read",
    "work ratio": "work over that at base budgets",
    "GiB at most": "of the fullest GPU, counted, with every micro-batch at the token cap; * more "
    "than the device has",
    "plan ms": "that planning takes, median; it hides behind the step before where that is longer",
}
_LAYOUT_COLUMNS = {
    "over dense": "fastest step with dense attention of all rows over the step of the row",
    "exact ms": "the same with --sparse-balance-mode exact: dense attention, placed by the plan",
    **{name: _COLUMNS[name] for name in ("idle", "coverage", "GiB at most")},
}


def rates_line(workload: Workload) -> str:
    """Whose times a prediction shows."""
    cost = workload.cost
    if cost.efficiency is None:
        return f"Times are those of {cost.device}: {cost.source}."
    return (
        f"Times are those of an {cost.device}, counted, and of no other device: {cost.source}. "
        "Nothing was measured; `sparse-balance profile` measures yours."
    )


def header_line(workload: Workload, order: str) -> str:
    """What was planned."""
    steps, samples = len(workload.batches), len(workload.batches[0])
    return (
        f"{workload.gpus} GPUs, {steps} step{'s' if steps != 1 else ''} of {samples} samples, "
        f"order {order}."
    )


def comparison_lines(comparison: Comparison, columns: int, *, layout: str | None) -> list[str]:
    """The table of one job, what follows from it, and what its columns are.

    Args:
        layout: a sentence about layers per stage, if there is one.
    """
    workload, given = comparison.workload, comparison.outcomes[comparison.given]
    sentences = [
        *_verdict(comparison),
        *_break_even(workload, comparison.slowness),
        *_memory(workload, given),
        *_findings(workload, given),
        *([layout] if layout else []),
        *remarks(workload),
    ]
    rows = [
        {"": name, **_cells(workload, outcome, comparison.over_dense(name))}
        for name, outcome in comparison.outcomes.items()
    ]
    return [
        *_wrapped([rates_line(workload)], columns),
        "",
        *text_table(rows, columns=columns),
        "",
        *_wrapped(sentences, columns),
        "",
        *_legend({**comparison.meanings, **_COLUMNS}, columns),
    ]


def layouts_lines(
    layouts: Layouts, flags: Sequence[str], fastest: str, fastest_dense: str, columns: int
) -> list[str]:
    """The table of layouts, the best of both kinds, and what its columns are.

    Args:
        flags: that vary, one for each entry of :attr:`.Layout.varied`.
        fastest, fastest_dense: flags of the best row, and of the best with dense attention.
    """
    best = layouts.found[0]
    assert best.given is not None
    keys = ["\n".join(textwrap.wrap(flag[2:], _KEY_CHARACTERS)) for flag in flags]
    step = _step_heading([each.workload for each in layouts.found])
    rows = [
        dict(zip(keys, each.varied, strict=True)) | _layout_cells(each, layouts.dense_ms, step)
        for each in layouts.found
    ]
    over = layouts.dense_ms / best.given.makespan_ms
    sentences = [
        f"Fastest: {fastest}: {shown_ms(best.given.makespan_ms)} ms, {over:.2f} times as "
        f"fast as the fastest with dense attention{_OR_EXACT if over < 1.0 else ''}.",
        f"Fastest with dense attention: {fastest_dense}: {shown_ms(layouts.dense_ms)} ms.",
        *_break_even(best.workload, layouts.slowness),
        *_memory(best.workload, best.given),
        *_findings(best.workload, best.given),
        *remarks(best.workload),
    ]
    return [
        *_wrapped([rates_line(best.workload)], columns),
        "",
        *text_table(rows, columns=columns, keys=len(keys)),
        "",
        *_wrapped(sentences, columns),
        "",
        *_legend(_LAYOUT_COLUMNS, columns),
    ]


def _cells(workload: Workload, outcome: Outcome, over_dense: float) -> dict[str, str]:
    return {
        _step_heading([workload]): shown_ms(outcome.makespan_ms),
        "speed": f"{outcome.speedup:.2f}",
        "over\ndense": f"{over_dense:.2f}",
        "bound\nratio": f"{outcome.bound_ratio:.2f}",
        "idle": f"{outcome.bubble_share:.0%}",
        "coverage": _coverage(outcome),
        "work\nratio": f"{outcome.work_ratio:.2f}",
        "GiB\nat most": _gibibytes(workload, outcome.at_most_bytes),
        "plan\nms": f"{outcome.plan_ms:.1f}",
    }


def _layout_cells(layout: Layout, dense_ms: float, step: str) -> dict[str, str]:
    given, exact = layout.given, layout.exact
    memory = {"GiB\nat most": _gibibytes(layout.workload, layout.at_most_bytes)}
    if given is None or exact is None:
        return dict.fromkeys((step, "over\ndense", "exact\nms", "coverage", "idle"), "-") | memory
    return {
        step: shown_ms(given.makespan_ms),
        "over\ndense": f"{dense_ms / given.makespan_ms:.2f}",
        "exact\nms": shown_ms(exact.makespan_ms),
        "coverage": _coverage(given),
        "idle": f"{given.bubble_share:.0%}",
        **memory,
    }


def _step_heading(workloads: Sequence[Workload]) -> str:
    """The heading of step times, with the device whose times they are."""
    devices = {_short(each.cost.device) for each in workloads}
    return f"step ms,\n{devices.pop()}" if len(devices) == 1 else "step\nms"


def _short(device: str) -> str:
    """A device's name without its maker's."""
    return device.removeprefix("NVIDIA ")[:_DEVICE_CHARACTERS]


def _coverage(outcome: Outcome) -> str:
    return "-" if outcome.coverage_mean is None else f"{outcome.coverage_mean:.3f}"


def _gibibytes(workload: Workload, most: float) -> str:
    limit = memory_gib(workload.cost.device)
    mark = _DOES_NOT_FIT if limit is not None and most > limit * GIBIBYTE else ""
    return f"{most / GIBIBYTE:,.1f}{mark}"


def _verdict(comparison: Comparison) -> Iterator[str]:
    name, dense = comparison.given, comparison.dense
    if name == dense:
        return
    over = comparison.over_dense(name)
    yield (
        f"These flags train as {name}: {over:.2f} times as fast as {dense}, the fastest here with "
        f"dense attention{_OR_EXACT if over < 1.0 else ''}."
    )


def _break_even(workload: Workload, slowness: float | None) -> Iterator[str]:
    """What sparse attention must reach for the job to gain over dense attention."""
    if slowness is None:
        return
    efficiency = workload.cost.efficiency
    if slowness == 0.0:
        yield "Break-even: no sparse attention makes this job faster than dense attention."
    elif efficiency is None:
        yield (
            "Break-even: the job gains over the fastest dense row while sparse attention takes "
            f"less than {slowness:.2f} times as long as in the cost table."
        )
    elif efficiency.sparse / slowness > 1.0:
        yield (
            "Break-even: this job cannot gain over dense attention, whatever share of the peak "
            "sparse attention reaches."
        )
    else:
        yield (
            f"Break-even: sparse attention must reach {efficiency.sparse / slowness:.0%} of peak "
            "for this job to gain over the fastest dense row; times above take "
            f"{efficiency.sparse:.0%}, and dense attention at {efficiency.dense:.0%}."
        )


def _memory(workload: Workload, outcome: Outcome) -> Iterator[str]:
    """Memory of the fullest stage, and whether it fits."""
    held, most = max(stage.total_bytes for stage in outcome.stages), outcome.at_most_bytes
    limit = memory_gib(workload.cost.device)
    text = (
        f"Memory: {held / GIBIBYTE:,.1f} GiB of the fullest GPU in these steps, at most "
        f"{most / GIBIBYTE:,.1f} with every micro-batch at the token cap (counted)"
    )
    if limit is None:
        yield f"{text}."
    elif most <= limit * GIBIBYTE:
        yield f"{text}, of {limit:g}; leave a tenth free."
    else:
        which = "does not fit" if held > limit * GIBIBYTE else "may not fit"
        yield (
            f"{text}: {which} the {limit:g} GiB of an {_short(workload.cost.device)}. Raise "
            "--tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size "
            "or --expert-model-parallel-size, use --recompute-granularity full or "
            "--use-distributed-optimizer, or lower --sparse-balance-max-tokens-per-micro-batch."
        )


def _findings(workload: Workload, outcome: Outcome) -> Iterator[str]:
    if outcome.dense_tokens_share > _MOSTLY_DENSE:
        yield (
            f"{outcome.dense_tokens_share:.0%} of the tokens are in documents that their budgets "
            "cover: sparse attention has little to save on them, and what is gained comes from "
            "placement."
        )
    if outcome.router_share > _MUCH_ROUTING:
        yield (
            f"Selecting blocks takes {outcome.router_share:.0%} of the compute time: a larger "
            "--sparse-balance-block-size makes it cheaper."
        )
    if outcome.bubble_share > _MUCH_WAITING:
        yield (
            f"{outcome.bubble_share:.0%} of the GPUs' time is idle: a larger --global-batch-size "
            "fills more of it."
        )
    if count := unhideable_steps(workload):
        yield (
            f"In {count} of {len(workload.batches)} steps one sample takes longer than all work "
            "would, spread evenly: no placement makes ranks equal. --context-parallel-size shares "
            "such samples, --sparse-balance-max-segments cuts them where there is a pipeline."
        )


def remarks(workload: Workload) -> list[str]:
    """What a prediction leaves out of this job."""
    job, memory = workload.job, workload.memory
    found = []
    if memory.shape.experts is not None:
        found.append(
            "Experts: every expert is taken to get as many tokens as the others; how far routing "
            "is from that is not known here and comes on top, in time and in memory."
        )
    if job.lockstep_ranks > 1:
        found.append(
            f"Groups of {job.lockstep_ranks} data-parallel ranks wait for one another in every "
            "layer: a step takes the slowest of each group, layer by layer."
        )
    if memory.shape.tensor_parallel_size > 1:
        found.append(
            "Tensor parallelism: what its ranks send one another takes no time here, which "
            "flatters layouts with more of it."
        )
    if memory.sharded_parameters:
        found.append("Sharded parameters: gathering them takes no time here.")
    return found


def _legend(meanings: Mapping[str, str], columns: int) -> list[str]:
    return _wrapped([f"{name}: {meaning}" for name, meaning in meanings.items()], columns)


def _wrapped(sentences: Sequence[str], columns: int) -> list[str]:
    return [line for sentence in sentences for line in wrapped(sentence, columns)]
