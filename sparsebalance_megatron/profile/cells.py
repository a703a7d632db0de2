# SPDX-License-Identifier: Apache-2.0
"""Measurements of a cost table: a plan of cells, medians of repeated runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.cost.table import CostRow
from sparsebalance_megatron.megatron.timing import Clock


@dataclass(frozen=True, kw_only=True)
class Thoroughness:
    """Effort of measuring.

    Attributes:
        seconds_per_cell: repeat a measurement for that long.
        divisors: sequences of one document are the sequence length over each of these.
        documents: one half as long as the longest of those is also measured cut into so many.
        most_dense_blocks: of a document, up to which dense attention is measured too.
    """

    warm_up: int
    least_repeats: int
    most_repeats: int
    seconds_per_cell: float
    divisors: tuple[int, ...]
    documents: tuple[int, ...]
    most_dense_blocks: int


_LEAST_DENSE_CELLS = 2
"""The shortest sequences, on which dense attention is measured whatever their blocks."""
FULL = Thoroughness(
    warm_up=2,
    least_repeats=5,
    most_repeats=30,
    seconds_per_cell=2.0,
    divisors=(1, 2, 4, 8, 16, 32, 64),
    documents=(2, 5, 16, 48),
    most_dense_blocks=1024,
)
QUICK = Thoroughness(
    warm_up=1,
    least_repeats=2,
    most_repeats=10,
    seconds_per_cell=0.1,
    divisors=(2, 4, 8, 16),
    documents=(6,),
    most_dense_blocks=16,
)


class Cell(NamedTuple):
    """A part to time on one micro-batch."""

    part: Part
    lengths_tokens: tuple[int, ...]
    budget_blocks: int


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A part of the model on one micro-batch; ``backward`` starts from what ``forward`` returns."""

    forward: Callable[[], Any]
    backward: Callable[[Any], None] | None


def plan_cells(
    longest_tokens: int,
    config: SparseBalanceConfig,
    thoroughness: Thoroughness,
    *,
    has_experts: bool = False,
) -> list[Cell]:
    """Cells to measure, short sequences first, so that one-time work falls on them.

    Attention runs at powers of four, at the base budget, and at all blocks where that is
    affordable, sparse and dense; other parts run at the base budget only.
    """
    left_out = {Part.DENSE_ATTENTION} if has_experts else {Part.DENSE_ATTENTION, Part.EXPERTS}
    cuts = [_cut(longest_tokens // divisor, 1) for divisor in thoroughness.divisors]
    cuts += [_cut(max(cuts)[0] // 2, documents) for documents in thoroughness.documents]
    cuts = sorted({cut for cut in cuts if min(cut) >= 1}, key=lambda cut: (sum(cut), cut))
    cells = []
    for number, lengths in enumerate(cuts):
        blocks = -(-max(lengths) // config.block_size)
        base = min(config.base_budget, blocks)
        dense = {blocks} if blocks <= thoroughness.most_dense_blocks else set()
        fours = {4**power for power in range(8) if 4**power <= min(blocks, 2 * config.base_budget)}
        cells += [Cell(part, lengths, base) for part in Part if part not in left_out]
        if dense or number < _LEAST_DENSE_CELLS:
            cells.append(Cell(Part.DENSE_ATTENTION, lengths, blocks))
        budgets = sorted((fours | dense) - {base})
        cells += [Cell(Part.ATTENTION, lengths, budget) for budget in budgets]
    return cells


def _cut(tokens: int, documents: int) -> tuple[int, ...]:
    """``documents`` lengths that rise evenly and sum to ``tokens``; 0 where they do not fit."""
    total = documents * (documents + 1) // 2
    ends = [tokens * (i * (i + 1) // 2) // total for i in range(documents + 1)]
    return tuple(end - start for start, end in pairwise(ends))


def measure(timed: Timed, cell: Cell, thoroughness: Thoroughness, clock: Clock) -> list[CostRow]:
    """Time a part as often as ``thoroughness`` says: a row per direction that it runs in."""
    for _ in range(thoroughness.warm_up):
        time_once(timed, clock)
    runs_ms: list[tuple[float, ...]] = []
    while len(runs_ms) < thoroughness.most_repeats and (
        len(runs_ms) < thoroughness.least_repeats
        or sum(map(sum, runs_ms)) < thoroughness.seconds_per_cell * 1e3
    ):
        runs_ms.append(time_once(timed, clock))
    # One column, not two, where there is no backward.
    columns_ms = zip(Direction, zip(*runs_ms, strict=True), strict=False)
    return [
        CostRow(
            part=cell.part,
            direction=direction,
            lengths_tokens=cell.lengths_tokens,
            budget_blocks=cell.budget_blocks if cell.part is Part.ATTENTION else None,
            **median_and_spread(times_ms),
        )
        for direction, times_ms in columns_ms
    ]


def time_once(timed: Timed, clock: Clock) -> tuple[float, ...]:
    """ms of the forward and, where there is one, of the backward."""
    marks = [clock.mark()]
    output = timed.forward()
    marks.append(clock.mark())
    if timed.backward is not None:
        timed.backward(output)
        marks.append(clock.mark())
    return tuple(clock.elapsed_ms(begin, end) for begin, end in pairwise(marks))


def median_and_spread(times_ms: Sequence[float]) -> dict[str, Any]:
    """Median, median deviation from it, and number of repeats, by their names in cost tables."""
    median_ms = float(np.median(times_ms))
    return {
        "ms_median": median_ms,
        "ms_spread": float(np.median(np.abs(np.array(times_ms) - median_ms))),
        "repeats": len(times_ms),
    }


def with_backward(forward: Callable[[], Tensor], *inputs: Tensor) -> Timed:
    """A part and its backward from gradients of ones. Parameters accumulate, as in training; inputs
    start afresh."""
    gradient = torch.ones_like(forward())

    def backward(output: Tensor) -> None:
        for leaf in inputs:
            leaf.grad = None
        output.backward(gradient)

    return Timed(forward=forward, backward=backward)
