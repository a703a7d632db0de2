# SPDX-License-Identifier: Apache-2.0
"""Predictions as a table, and what follows from them as sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from sparsebalance_megatron.config import flag_name
from sparsebalance_megatron.cost.memory import GIBIBYTE
from sparsebalance_megatron.predict.comparison import (
    ROWS,
    Comparison,
    TableRow,
    compare_ways,
    even_stages,
    given_row,
    rows_of,
)
from sparsebalance_megatron.predict.outcome import unhideable_steps
from sparsebalance_megatron.predict.workload import Workload
from sparsebalance_megatron.text_table import shown_ms, text_table, wrapped

_MOSTLY_DENSE = 0.8
_DEVICE_CHARACTERS, _HEADING_CHARACTERS = 14, 10

_COLUMNS = {
    "speed": "total time of the first row over that of the row",
    "over dense": "time of the fastest row with dense attention over that of the row",
    "bound ratio": "step time over the least that any placement and allowed budgets could take",
    "idle": "share of the GPUs' time that no micro-batch fills",
    "coverage": "of the router's score mass, by the prior (k/n)^0.35: no training run is read",
    "GiB at most": "of the fullest GPU, counted, with every micro-batch at the token cap; * more "
    "than the device has",
    "plan ms": "that planning takes, median; it hides behind a longer step before",
}


def predicted(workload: Workload, order: str, columns: int) -> tuple[Comparison, list[str]]:
    """A job in every way to plan it, and the lines that say what came out."""
    ways = rows_of(workload)
    given = given_row(workload, ways)
    assert given is not None, "rows_of has one"
    rows = [TableRow(names=(name,), workload=way.of(workload)) for name, way in ways.items()]
    found = compare_ways(rows, (given,))
    verdict = [f"{name}: left out, {why}." for (name,), why in found.refused.items()]
    dense = found.dense.names[0]
    if given != dense:
        text = f"These flags train as {given}: {over_dense(found, dense)}."
        verdict.append(text)
    if (stages := even_stages(workload)) is not None:
        verdict.append(f"{stages}.")
    meanings = {
        name: f"{way.meaning}; by {way.attention(row.workload)}"
        for (name, way), row in zip(ways.items(), rows, strict=True)
    }
    return found, prediction_lines(found, order, columns, meanings=meanings, verdict=verdict)


def prediction_lines(
    comparison: Comparison,
    order: str,
    columns: int,
    *,
    keys: Sequence[str] = ("",),
    meanings: Mapping[str, str],
    verdict: Sequence[str] = (),
) -> list[str]:
    """Whose times they are, the table, what follows from it, and what its columns are.

    ``keys`` are the headings of the names of rows, ``verdict`` the first sentences below the table.
    """
    given, one_job = comparison.given, not keys[0]
    devices = {_short(row.workload) for row in comparison.rows}
    step = f"step ms,\n{devices.pop()}" if len(devices) == 1 else "step\nms"
    headings = ["\n".join(textwrap.wrap(key, _HEADING_CHARACTERS)) for key in keys]
    rows = [
        dict(zip(headings, row.names, strict=True))
        | _cells(row, comparison, step, with_speed=one_job)
        for row in comparison.rows
    ]
    sentences = [
        *verdict,
        *_dense_documents(given.workload),
        *_memory(given),
        *_findings(given),
        *_remarks(given.workload),
    ]
    explained = {name: text for name, text in _COLUMNS.items() if one_job or name != "speed"}
    return [
        *_wrapped([_header(given.workload, order), _rates(given.workload)], columns),
        "",
        *text_table(rows, columns=columns, keys=len(keys)),
        "",
        *_wrapped(sentences, columns),
        "",
        *_wrapped([f"{name}: {text}" for name, text in {**meanings, **explained}.items()], columns),
    ]


def over_dense(comparison: Comparison, dense_name: str) -> str:
    over = comparison.dense.ms / comparison.given.ms
    text = f"{over:.2f} times as fast as {dense_name}"
    if over >= 1.0:
        return text
    row = ROWS.get(comparison.dense.names[-1])
    mode = "without the plugin" if row is not None and row.of_megatron else "in mode exact"
    return f"{text}: train {mode}"


def _header(workload: Workload, order: str) -> str:
    steps, samples = len(workload.batches), len(workload.batches[0])
    return (
        f"{workload.gpus} GPUs, {steps} step{'s' if steps != 1 else ''} of {samples} samples, "
        f"order {order}."
    )


def _rates(workload: Workload) -> str:
    """Whose times a prediction shows."""
    cost = workload.cost
    if cost.efficiency is None:
        return f"Times are those of {cost.device}: {cost.source}."
    return (
        f"Times are those of the {cost.device}, counted, and of no other device: {cost.source}. "
        "Nothing was measured; `sparse-balance profile` measures yours."
    )


def _cells(row: TableRow, comparison: Comparison, step: str, *, with_speed: bool) -> dict[str, str]:
    outcome = row.outcome
    at_most = f"{row.at_most_bytes / GIBIBYTE:,.1f}{'' if row.fits else '*'}"
    cells = dict.fromkeys((step, "speed", "over\ndense", "bound\nratio", "idle", "coverage"), "-")
    cells |= {"GiB\nat most": at_most, "plan\nms": "-"}
    if outcome is not None:
        coverage = outcome.coverage_mean
        cells |= {
            step: shown_ms(row.ms),
            "speed": f"{comparison.rows[0].ms / row.ms:.2f}",
            "over\ndense": f"{comparison.dense.ms / row.ms:.2f}",
            "bound\nratio": f"{outcome.bound_ratio:.2f}",
            "idle": f"{outcome.bubble_share:.0%}",
            "coverage": "-" if coverage is None else f"{coverage:.3f}",
            "plan\nms": f"{outcome.plan_ms:.1f}",
        }
    if not with_speed:
        del cells["speed"]
    return cells


def _short(workload: Workload) -> str:
    return workload.cost.device.removeprefix("NVIDIA ")[:_DEVICE_CHARACTERS]


def _dense_documents(workload: Workload) -> Iterator[str]:
    config = workload.plan_settings.config
    if not workload.is_dense:
        covered_tokens = config.base_budget * config.block_size
        tokens = max(config.dense_up_to_tokens, covered_tokens)
        yield f"Dense documents: all of up to {tokens:,} tokens."


def _memory(row: TableRow) -> Iterator[str]:
    assert row.outcome is not None
    held = max(stage.total_bytes for stage in row.outcome.stages)
    gpu = f"{row.gpu_bytes / GIBIBYTE:g} GiB of the {_short(row.workload)}"
    text = (
        f"Memory: {held / GIBIBYTE:,.1f} GiB of the fullest GPU in these steps, at most "
        f"{row.at_most_bytes / GIBIBYTE:,.1f} with every micro-batch at the token cap (counted)"
    )
    if row.gpu_bytes == float("inf"):
        yield f"{text}."
    elif row.fits:
        yield f"{text}: fits the {gpu}; leave a tenth free."
    else:
        yield (
            f"{text}: {'does' if held > row.gpu_bytes else 'may'} not fit the {gpu}. Raise "
            "--tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size "
            "or --expert-model-parallel-size, use --recompute-granularity full or "
            "--use-distributed-optimizer, or lower --sparse-balance-max-tokens-per-micro-batch."
        )


def _findings(row: TableRow) -> Iterator[str]:
    outcome, workload = row.outcome, row.workload
    assert outcome is not None
    if outcome.dense_tokens_share > _MOSTLY_DENSE:
        yield (
            f"{outcome.dense_tokens_share:.0%} of the tokens are in documents that are attended to "
            "densely: what is gained comes from placement."
        )
    if count := unhideable_steps(workload):
        settings, job = workload.plan_settings, workload.job
        shared = settings.max_cp_size > 1
        cut = job.pipeline_stages > 1 and settings.config.max_segments == 1
        who = "More" if shared else "Several"
        yield (
            f"In {count} of {len(workload.batches)} steps one sample takes longer than all work "
            f"would, spread evenly: no placement makes ranks equal. {who} "
            f"ranks may share such samples ({flag_name('max_context_parallel')})"
            + (f", or {flag_name('max_segments')} cuts them." if cut else ".")
        )


def _remarks(workload: Workload) -> Iterator[str]:
    """What a prediction leaves out of this job."""
    memory = workload.memory
    if memory.shape.experts is not None:
        yield (
            "Experts: every expert is taken to get as many tokens as the others; how far routing "
            "is from that is not known here and comes on top, in time and in memory."
        )
    if memory.shape.tensor_parallel_size > 1:
        yield (
            "Tensor parallelism: what its ranks send one another takes no time here, which "
            "flatters layouts with more of it."
        )
    if memory.sharded_parameters:
        yield "Sharded parameters: gathering them takes no time here."


def _wrapped(sentences: Sequence[str], columns: int) -> list[str]:
    return [line for sentence in sentences for line in wrapped(sentence, columns)]
