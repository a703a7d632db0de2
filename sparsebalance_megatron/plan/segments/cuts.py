# SPDX-License-Identifier: Apache-2.0
"""Cuts micro-batches into segments of nearly equal predicted cost, and says what each takes.

A query reads the blocks before it, up to its budget, so a piece of a sample costs the difference
of two prefixes: tokens, attended pairs and visible pairs of blocks a..b are those of b blocks less
those of a blocks. Micro-batches are cut many at a time: each alone would take longer in Python than
in numpy.

Shape legend: R data-parallel ranks or candidates, U segments of a micro-batch or of all, I samples
of all micro-batches, E pieces (parts of samples), X places or columns, Y prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.plan.step_costs import (
    SEQUENCES,
    TOKENS,
    VISIBLE,
    Columns,
    StepCosts,
    as_lists,
    dense_layers,
)

_PLACES_PER_SEGMENT = 4
"""Places of a sample where it may be cut, for each segment that it may have."""
_LEAST_PLACES = 32

MicroBatch = tuple[int, ...]
"""The samples of a micro-batch, in order."""


class Cut(NamedTuple):
    """The segments of a micro-batch: where each begins, its ms on every stage, its tokens."""

    segment_starts_blocks: tuple[int, ...]
    forward_UP: np.ndarray
    backward_UP: np.ndarray
    tokens_U: np.ndarray


def cut_at(
    costs: StepCosts,
    budgets_LS: np.ndarray,
    micro_batches: Sequence[MicroBatch],
    segment_starts_blocks: Sequence[tuple[int, ...]],
    cp_sizes: Sequence[int] | None = None,
) -> list[Cut]:
    """Micro-batches in segments that begin at these blocks; times of an average device.

    Of a micro-batch that ranks share, each does a part of every segment's work, and receives the
    others' part of the keys and values so far.

    Args:
        cp_sizes: of the micro-batches; None for ranks alone.
    """
    columns = costs.by_chunk
    cp_size_M = np.ones(len(micro_batches), dtype=int) if cp_sizes is None else np.array(cp_sizes)
    ms_2UP, tokens_U = pieces(
        costs, columns, budgets_LS, micro_batches, segment_starts_blocks, costs.share_W[cp_size_M]
    )
    ms_2UP += whatever_it_holds_2C(costs)[:, None]
    ends = [*accumulate(map(len, segment_starts_blocks), initial=0)]
    for cp_size, (first, end) in zip(cp_size_M.tolist(), pairwise(ends), strict=True):
        if cp_size > 1:
            so_far_U1 = np.cumsum(tokens_U[first:end])[:, None] * costs.received_W[cp_size]
            ms_2UP[:, first:end] += so_far_U1 * columns.exchange_2X[:, None]
    return [
        Cut(blocks, ms_2UP[0, first:end], ms_2UP[1, first:end], tokens_U[first:end])
        for blocks, (first, end) in zip(segment_starts_blocks, pairwise(ends), strict=True)
    ]


def whatever_it_holds_2C(costs: StepCosts) -> np.ndarray:
    """[2, C] ms that a segment takes whatever it holds."""
    return costs.constant_2C + np.array(costs.segments.operation_ms)[:, None]


def pieces(
    costs: StepCosts,
    columns: Columns,
    budgets_LS: np.ndarray,
    micro_batches: Sequence[MicroBatch],
    segment_starts_blocks: Sequence[tuple[int, ...]],
    share_M: np.ndarray | float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Ms [2, U, X] of what segments hold, on an average device, and their tokens [U].

    Args:
        share_M: of the work of each micro-batch that a rank does.
    """
    sample_I = np.fromiter(chain.from_iterable(micro_batches), dtype=np.int64)
    blocks_I = costs.blocks_S[sample_I]
    # All micro-batches end to end, in blocks.
    start_I = np.cumsum(blocks_I) - blocks_I
    first_I = np.fromiter(accumulate(map(len, micro_batches[:-1]), initial=0), dtype=np.int64)
    segments_M = np.fromiter(map(len, segment_starts_blocks), dtype=np.int64)
    start_U = np.fromiter(chain.from_iterable(segment_starts_blocks), dtype=np.int64)
    start_U += np.repeat(start_I[first_I], segments_M)
    start_E = np.union1d(start_I, start_U)
    place_E = np.searchsorted(start_I, start_E, side="right") - 1
    bounds_2E = np.stack([start_E, np.append(start_E[1:], start_I[-1] + blocks_I[-1])])
    # Where dense attention needs a whole micro-batch on one rank.
    lists_M = (segments_M > 1) | (np.asarray(share_M) < 1.0)
    lists_I = np.repeat(lists_M, np.fromiter(map(len, micro_batches), dtype=np.int64))
    tokens_2E, ms_22EX = _prefix(
        *(costs, columns, budgets_LS, sample_I[place_E], bounds_2E - start_I[place_E]),
        lists_E=lists_I[place_E],
    )
    piece_U = np.searchsorted(start_E, start_U)
    work_2UX = np.add.reduceat(ms_22EX[:, 1] - ms_22EX[:, 0], piece_U, axis=1)
    slowness_M = np.where(segments_M > 1, costs.segments.slowness, 1.0) * share_M
    ms_2UX = (
        work_2UX * np.repeat(slowness_M, segments_M)[:, None]
        + np.diff(piece_U, append=len(start_E))[:, None] * columns.sparse_2XF[:, None, :, SEQUENCES]
    )
    return ms_2UX, np.add.reduceat(tokens_2E[1] - tokens_2E[0], piece_U)


def _prefix(
    costs: StepCosts,
    columns: Columns,
    budgets_LS: np.ndarray,
    sample_E: np.ndarray,
    blocks_YE: np.ndarray,
    *,
    lists_E: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [Y, E] and ms [2, Y, E, X] of the first blocks of samples, in one piece.

    What a micro-batch and a sequence cost whatever their length is not in it. ``lists_E``: lists of
    all blocks stand for dense attention.
    """
    tokens_YE = np.minimum(blocks_YE * costs.block_size, costs.lengths_tokens_S[sample_E])
    length_YE = tokens_YE / costs.block_size
    in_column_XL = columns.column_of_L == np.arange(columns.pair_2X.shape[1])[:, None]
    pairs_XYE = np.stack(
        [
            np.where(
                costs.dense_LS[layers_L][:, None, sample_E],
                0.0,
                costs.work.attended_pairs(length_YE, budgets_LS[layers_L][:, None, sample_E]),
            ).sum(0)
            for layers_L in in_column_XL
        ]
    )
    visible_YE = costs.work.visible_pairs(length_YE)
    dense_EX = dense_layers(costs.dense_LS, columns.column_of_L, len(in_column_XL))[sample_E]

    lists_2XF = as_lists(columns.denser_2XF, costs.covered_pair_share * columns.pair_2X)

    def ms_2EX(feature: int, sparse: float = 1.0) -> np.ndarray:
        sparse_21X, denser_21X, lists_21X = (
            x[:, None, :, feature] for x in (columns.sparse_2XF, columns.denser_2XF, lists_2XF)
        )
        denser_2EX = np.where(lists_E[:, None], lists_21X, denser_21X)
        return np.asarray(sparse * sparse_21X + dense_EX * denser_2EX)

    return tokens_YE, (
        tokens_YE[..., None] * ms_2EX(TOKENS)[:, None]
        + visible_YE[..., None] * ms_2EX(VISIBLE)[:, None]
        # What a piece costs whatever its length is added for each.
        + (tokens_YE > 0)[..., None] * ms_2EX(SEQUENCES, sparse=0.0)[:, None]
        + pairs_XYE.transpose(1, 2, 0) * columns.pair_2X[:, None, None]
    )


@dataclass(frozen=True, kw_only=True)
class Places:
    """Places at equal distances where samples may be cut, and the work before each place.

    ``blocks_SX``: from 0 to all blocks, never falling. ``work_SX``: ms on all stages, forward and
    backward.
    """

    costs: StepCosts
    budgets_LS: np.ndarray
    blocks_SX: np.ndarray
    work_SX: np.ndarray

    @classmethod
    def at(cls, costs: StepCosts, budgets_LS: np.ndarray, max_segments: int) -> Places:
        """The places of samples that may have so many segments."""
        places = max(_LEAST_PLACES, _PLACES_PER_SEGMENT * max_segments)
        blocks_XS = np.rint(costs.blocks_S * (np.arange(places + 1) / places)[:, None])
        blocks_XS = blocks_XS.astype(np.int64)
        _, ms_2XSP = _prefix(
            costs,
            costs.by_chunk,
            budgets_LS,
            np.arange(len(costs.blocks_S)),
            blocks_XS,
            lists_E=np.ones(len(costs.blocks_S), dtype=bool),
        )
        return cls(
            costs=costs,
            budgets_LS=budgets_LS,
            blocks_SX=blocks_XS.T,
            work_SX=np.ascontiguousarray(ms_2XSP.sum(axis=(0, 3)).T),
        )

    @cached_property
    def work_S(self) -> np.ndarray:
        """[S] ms of every sample on all stages, forward and backward."""
        return self.work_SX[:, -1]

    def segment_starts_blocks(
        self, micro_batches: Sequence[MicroBatch], segments: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """First blocks of segments: the places nearest to equal shares of the work."""
        parts = max(map(len, micro_batches))
        sample_MI = np.array([(*each, *each[:1] * (parts - len(each))) for each in micro_batches])
        held_MI = np.arange(parts) < np.array(list(map(len, micro_batches)))[:, None]
        work_MI = np.where(held_MI, self.work_S[sample_MI], 0.0).cumsum(axis=1)
        blocks_MI = np.where(held_MI, self.costs.blocks_S[sample_MI], 0).cumsum(axis=1)
        # Places of absent samples equal those of the end.
        work_MIX, blocks_MIX = (
            np.where(
                held_MI[..., None], of_SX[sample_MI] + before_MI[..., None], end_M[:, None, None]
            )
            for of_SX, before_MI, end_M in (
                (self.work_SX, _before(work_MI), work_MI[:, -1]),
                (self.blocks_SX, _before(blocks_MI), blocks_MI[:, -1]),
            )
        )
        segments_M = np.array(segments)
        wanted_MU = work_MI[:, -1:] * np.arange(1, segments_M.max()) / segments_M[:, None]
        off_MUX = np.abs(work_MIX.reshape(len(segments_M), 1, -1) - wanted_MU[..., None])
        found_MU = np.take_along_axis(
            blocks_MIX.reshape(len(segments_M), -1), off_MUX.argmin(axis=2), axis=1
        )
        return [
            (0, *sorted({*blocks[: count - 1]} - {0, end}))
            for blocks, count, end in zip(
                found_MU.tolist(), segments, blocks_MI[:, -1].tolist(), strict=True
            )
        ]


def _before(sums_MI: np.ndarray) -> np.ndarray:
    """Running sums without each one's own part."""
    return np.pad(sums_MI[:, :-1], ((0, 0), (1, 0)))
