# SPDX-License-Identifier: Apache-2.0
"""Predictions as a table, and what follows from them as sentences."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from sparsebalance_megatron.config import flag_name
from sparsebalance_megatron.cost.memory import GIBIBYTE
from sparsebalance_megatron.predict.comparison import (
    GIVEN,
    ROWS,
    Comparison,
    TableRow,
    compare,
    even_stages,
    given_row,
    rows_of,
    speedup_lines,
    window_lines,
)
from sparsebalance_megatron.predict.outcome import Outcome, unhideable_steps
from sparsebalance_megatron.predict.workload import Workload
from sparsebalance_megatron.text_table import shown_ms, terminal_columns, text_table, wrapped
from sparsebalance_megatron.view.report.numbers import ratio_interval

_HIDDEN = 0.5
"""Share of a step within which its planning hides, whatever else the host does."""
_DEVICE_CHARACTERS, _HEADING_CHARACTERS = 14, 10

_COLUMNS = {
    "MFU": "operations of the model, recomputation left out, over what the GPUs could do",
    "over Megatron": "time of the fastest row Megatron over that of the row; in brackets the 95 % "
    "interval over steps, of fewer than six steps the least and the greatest",
    "bound ratio": "step time over the least that any placement could take",
    "idle": "share of the GPUs' time that no micro-batch fills",
    "coverage": "of the router's score mass, by the prior (k/n)^0.35: no training run is read",
    "GiB at most": "of the fullest GPU, counted, with every micro-batch at the token cap; * more "
    "than the device has",
}


def predicted(
    workload: Workload,
    order: str,
    *,
    with_flags: Callable[[str], Workload],
    explain: bool = False,
) -> tuple[Comparison, list[str]]:
    """A job in every way to plan it, and the lines that say what came out.

    ``with_flags``: the job with more flags; see :func:`.speedup_lines`.
    """
    ways = rows_of(workload)
    given = given_row(workload, ways)
    rows = [TableRow(names=(name,), workload=way.of(workload)) for name, way in ways.items()]
    found = compare(rows, (given,))
    verdict = [f"{row.names[0]}: left out, {why}." for row, why in found.refused]
    best = found.dense.names[0]
    if given != best:
        train = "These flags" if given == GIVEN else f"These flags train as {given}"
        verdict.append(f"{train}: {over(found.dense, found.given, best)}.")
    if (stages := even_stages(workload)) is not None:
        verdict.append(f"{stages}.")
    verdict += [
        f"{line}." for line in (*speedup_lines(found.given, with_flags), *window_lines(workload))
    ]
    if (window := workload.plan_settings.config.window) > 1:
        order += f", exchanged within {window} steps but in the first row"
    meanings = {
        name: f"{way.meaning}; by {way.attention(row.workload)}"
        for (name, way), row in zip(ways.items(), rows, strict=True)
        if explain
    }
    return found, prediction_lines(found, order, meanings=meanings, verdict=verdict)


def prediction_lines(
    comparison: Comparison,
    order: str,
    *,
    keys: Sequence[str] = ("",),
    meanings: Mapping[str, str],
    verdict: Sequence[str] = (),
) -> list[str]:
    """Whose times they are, the table, and what follows from it; with ``meanings`` of rows also
    what its columns are.

    ``keys`` are the headings of the names of rows, ``verdict`` the first sentences below the table.
    """
    given, columns = comparison.given, terminal_columns()
    steps, samples = len(given.workload.batches), len(given.workload.batches[0])
    header = (
        f"{given.workload.gpus} GPUs, {steps} step{'s' if steps != 1 else ''} of {samples} "
        f"samples, order {order}."
    )
    devices = {_short(row.workload) for row in comparison.rows}
    step = f"step ms,\n{devices.pop()}" if len(devices) == 1 else "step\nms"
    headings = ["\n".join(textwrap.wrap(key, _HEADING_CHARACTERS)) for key in keys]
    is_dense = all(row.workload.is_dense for row in comparison.rows)
    rows = [
        dict(zip(headings, row.names, strict=True))
        | _cells(row, comparison.without_plugin, step, has_coverage=not is_dense)
        for row in comparison.rows
    ]
    sentences = [
        *verdict,
        *_findings(given),
        *_remarks(given.workload),
    ]
    legend = [
        f"{name}: {text}"
        for name, text in {**meanings, **_COLUMNS}.items()
        if name != "coverage" or not is_dense
    ]
    if not meanings:
        legend = ["`sparse-balance plan --explain` says what rows and columns are."]

    def lines(texts: Sequence[str]) -> list[str]:
        return [line for text in texts for line in wrapped(text, columns)]

    return [
        *lines([header, _rates(given.workload)]),
        "",
        *text_table(rows, columns=columns, keys=len(keys)),
        "",
        *lines(sentences),
        *([""] if meanings else []),
        *lines(legend),
    ]


def over(before: TableRow, after: TableRow, name: str) -> str:
    """How many times as fast a row is as one of dense attention, and how sure that is."""
    spread = ratio_spread(before, after)
    text = f"{before.ms / after.ms:.2f} times as fast{_brackets(spread)} as {name}"
    if after.ms > before.ms:
        row = ROWS.get(before.names[-1])
        text += ": train " + ("without the plugin" if row and row.of_megatron else "in mode exact")
    return text + (", which is not sure: plan more --steps" if is_unsure(spread) else "")


def ratio_spread(before: TableRow, after: TableRow) -> tuple[float, float] | None:
    """What the ratio of two rows' times may be: its 95 % interval over steps, of few steps the
    least and the greatest; None of one step, or of rows whose steps differ. Where samples change
    steps within a window, over windows."""
    rows = (before, after)
    if before.outcome is None or after.outcome is None:
        return None
    window = max(row.workload.plan_settings.config.window for row in rows)
    firsts = range(0, len(before.workload.batches), window)
    if before.workload.batches != after.workload.batches or len(firsts) < 2:
        return None
    steps_ms = (row.outcome.step_ms for row in rows if row.outcome)
    both = [np.add.reduceat(np.array(each_ms), firsts) for each_ms in steps_ms]
    ratios = both[0] / both[1]
    return ratio_interval(*both) or (float(ratios.min()), float(ratios.max()))


def is_unsure(spread: tuple[float, float] | None) -> bool:
    return spread is not None and spread[0] < 1.0 < spread[1]


def _brackets(spread: tuple[float, float] | None) -> str:
    return "" if spread is None else f" ({spread[0]:.2f}-{spread[1]:.2f})"


def _rates(workload: Workload) -> str:
    """Whose times a prediction shows."""
    cost = workload.cost
    if cost.efficiency is None:
        return f"Times are those of {cost.device}: {cost.source}."
    source = cost.source
    if workload.is_dense:
        source = f"counted operations on {cost.device}, {cost.efficiency.without_selection}"
    return f"Nothing was measured: {source}. `sparse-balance profile` measures yours."


def _cells(row: TableRow, reference: TableRow, step: str, *, has_coverage: bool) -> dict[str, str]:
    """Cells of a row by their headings, of which ``step`` is the first; speeds are over the
    reference."""
    outcome, over = row.outcome, f"over\n{reference.names[-1]}"
    headings = (step, "tokens/s\na GPU", "MFU", over, "bound\nratio", "idle", "cover-\nage")
    cells = dict.fromkeys(headings, "-")
    if outcome is not None:
        coverage, share = outcome.coverage_mean, outcome.utilisation
        spread = None if row is reference else ratio_spread(reference, row)
        cells |= {
            step: shown_ms(row.ms),
            "tokens/s\na GPU": f"{outcome.tokens_per_second_per_gpu:,.0f}",
            "MFU": "-" if share is None else f"{share:.0%}",
            over: f"{reference.ms / row.ms:.2f}{_brackets(spread)}",
            "bound\nratio": f"{outcome.bound_ratio:.2f}",
            "idle": f"{outcome.bubble_share:.0%}",
            "cover-\nage": "-" if coverage is None else f"{coverage:.3f}",
        }
    if not has_coverage:
        del cells["cover-\nage"]
    return cells | {"GiB at\nmost": f"{row.at_most_gib:,.1f}{'' if row.fits else '*'}"}


def _short(workload: Workload) -> str:
    return workload.cost.device.removeprefix("NVIDIA ")[:_DEVICE_CHARACTERS]


def _memory(row: TableRow, outcome: Outcome) -> str:
    held_gib = max(stage.total_bytes for stage in outcome.stages) / GIBIBYTE
    memory, gpu_gib = row.workload.memory, row.gpu_gib
    text = (
        f"Memory: {held_gib:,.1f} GiB of the fullest GPU in these steps, at most "
        f"{row.at_most_gib:,.1f} with every micro-batch at the token cap (counted)"
    )
    if gpu_gib is None:
        return f"{text}."
    gpu = f"{gpu_gib:g} GiB of the {_short(row.workload)}"
    if row.fits:
        return f"{text}: fits the {gpu}; leave a tenth free."
    remedies = {
        "--sequence-parallel": memory.sequence_parallel,
        "--recompute-granularity full": memory.recompute_all,
        "--use-distributed-optimizer": memory.optimizer_ranks > 1,
    }
    unused = [flag for flag, is_used in remedies.items() if not is_used]
    use = f", use {' or '.join(unused)}" if unused else ""
    return (
        f"{text}: {'does' if held_gib > gpu_gib else 'may'} not fit the {gpu}. Raise "
        "--tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size "
        f"or --expert-model-parallel-size{use}, or lower "
        "--sparse-balance-max-tokens-per-micro-batch."
    )


def _findings(row: TableRow) -> Iterator[str]:
    outcome, workload, config = row.outcome, row.workload, row.workload.plan_settings.config
    assert outcome is not None
    if not workload.is_dense:
        tokens = max(config.dense_up_to_tokens, config.base_budget * config.block_size)
        yield (
            f"Documents of up to {tokens:,} tokens, {outcome.dense_tokens_share:.0%} of all "
            "tokens, read all of their blocks: they gain by placement alone."
        )
    yield _memory(row, outcome)
    if outcome.plan_ms > _HIDDEN * outcome.makespan_ms:
        yield (
            f"Planning takes {shown_ms(outcome.plan_ms)} ms of a core a step, which such steps do "
            f"not hide: lower {flag_name('plan_ms')}."
        )
    if count := unhideable_steps(workload):
        can_cut = workload.job.pipeline_stages > 1 and config.max_segments == 1
        who = "More" if workload.plan_settings.max_cp_size > 1 else "Several"
        yield (
            f"In {count} of {len(workload.batches)} steps one sample takes longer than all work "
            f"would, spread evenly: no placement makes ranks equal. {who} "
            f"ranks may share such samples ({flag_name('max_context_parallel')})"
            + (f", or {flag_name('max_segments')} cuts them." if can_cut else ".")
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
