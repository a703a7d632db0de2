# SPDX-License-Identifier: Apache-2.0
"""Cuts micro-batches into segments of nearly equal predicted cost, and says what each takes.

A query reads the blocks before it, up to its budget, so a piece of a sample costs the difference
of two prefixes: tokens, attended pairs and visible pairs of blocks a..b are those of b blocks less
those of a blocks. Micro-batches are cut many at a time: each alone would take longer in Python than
in numpy.

A row is the micro-batches of a lockstep group's ranks at one position; of a rank that waits for no
other, one micro-batch. The ranks of a group begin every layer of a segment together. So the segment
takes the sum over layers of its slowest member, and the group is one pipeline. Groups that share
micro-batches are pipelines that begin shared operations together.

Shape legend: J = E x M rows, I samples of all micro-batches, A pieces (parts of samples), Y
prefixes, X columns, or places where samples may be cut.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, batched, chain, pairwise, starmap
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.step_costs import (
    SEQUENCES,
    TOKENS,
    VISIBLE,
    StepCosts,
    apart,
    joined,
)

_PLACES_PER_SEGMENT = 4
"""Places of a sample where it may be cut, for each segment that it may have."""
_LEAST_PLACES = 32
_PAIRS_AT_ONCE = 1 << 16
"""Numbers of block pairs of a column that fit a core's cache with what they are made of."""

MicroBatch = tuple[int, ...]
"""The samples of a micro-batch, in order."""
Row = tuple[MicroBatch, ...]
"""Micro-batches by member; one that members share is with each."""
Starts = tuple[int, ...]
"""Where the segments of a micro-batch begin, in blocks; the first is 0."""


class Cut(NamedTuple):
    """What the segments of a row take on every stage, and the most tokens of a rank."""

    ms_2UP: np.ndarray
    tokens_U: np.ndarray


class PlacedSegments:
    """The segments of a step's micro-batches: of all lockstep groups, one after another.

    Attributes:
        segments_EM: of each group's micro-batches.
        cp_sizes_EM: groups that share them.
    """

    def __init__(self, costs: StepCosts, where: Arrangement) -> None:
        self._costs, ranks = costs, costs.job.lockstep_ranks
        self.segments_EM = [list(map(len, of)) for of in where.segment_starts_blocks[::ranks]]
        groups = where.groups.of_lockstep(ranks)
        self.cp_sizes_EM = groups.cp_sizes_RM
        rows, starts = (
            [row for of_group in batched(of, ranks) for row in zip(*of_group, strict=True)]
            for of in (where.samples, where.segment_starts_blocks)
        )
        held_M, number_J = np.unique(groups.first_J, return_inverse=True)
        self._held = (
            [rows[place] for place in held_M.tolist()],
            [starts[place] for place in held_M.tolist()],
            held_M // self.cp_sizes_EM.shape[1] * ranks,
            self.cp_sizes_EM.reshape(-1)[held_M],
        )
        segments_J = np.concatenate(self.segments_EM)
        before_J = np.cumsum(segments_J) - segments_J
        first_M = np.cumsum(segments_J[held_M]) - segments_J[held_M]
        shared_U = np.repeat(first_M[number_J] - before_J, segments_J)
        self._held_U = shared_U + np.arange(len(shared_U))

    def ms(self, budgets_LS: np.ndarray) -> np.ndarray:
        """Ms [..., 2, U, P] of groups at budgets [..., L, S]."""
        ms_UWX, slowness_UWX, _ = _row_ms(self._costs, budgets_LS, *self._held)
        return joined(ms_UWX, self._costs.chunk_of_X, slowness_UWX)[..., self._held_U, :]

    def own_ms_2RPVM(self, budgets_LS: np.ndarray) -> np.ndarray:
        """[2, R, P, 1, M] ms of every rank's micro-batches, all segments together, without waiting
        in layers."""
        ms_2UWX, slowness_UWX, _ = _row_ms(self._costs, budgets_LS, *self._held)
        own_2UWP = apart(ms_2UWX, self._costs.chunk_of_X, slowness_UWX)[:, self._held_U]
        first_J = [0, *accumulate(chain.from_iterable(self.segments_EM))][:-1]
        own_2JWP = np.add.reduceat(own_2UWP, first_J, axis=1)
        own_2EMWP = own_2JWP.reshape(2, *self.cp_sizes_EM.shape, *own_2JWP.shape[2:])
        own_2EWPM = np.moveaxis(own_2EMWP, 2, -1)
        return own_2EWPM.reshape(2, -1, own_2EWPM.shape[3], 1, own_2EWPM.shape[4])

    def times(self, ms_2UP: np.ndarray) -> OperationTimes:
        """Times of operations, from those of groups' segments."""
        return OperationTimes.of_segments(self.segments_EM, ms_2UP, self.cp_sizes_EM)


def row_cuts(
    costs: StepCosts,
    budgets_LS: np.ndarray,
    rows: Sequence[Row],
    starts: Sequence[tuple[Starts, ...]],
    first_ranks: Sequence[int],
    cp_sizes: Sequence[int],
) -> list[Cut]:
    """Rows in segments, on the devices of their ranks.

    Args:
        starts: of the segments of every member of every row.
        first_ranks: on which each row begins.
        cp_sizes: ranks that share a row of one micro-batch.
    """
    ms_2UWX, slowness_UWX, tokens_UW = _row_ms(
        *(costs, budgets_LS, rows, starts), np.array(first_ranks), np.array(cp_sizes)
    )
    ms_2UP, tokens_U = joined(ms_2UWX, costs.chunk_of_X, slowness_UWX), tokens_UW.max(axis=1)
    ends = accumulate((len(of_row[0]) for of_row in starts), initial=0)
    return [Cut(ms_2UP[:, part], tokens_U[part]) for part in starmap(slice, pairwise(ends))]


def _row_ms(
    costs: StepCosts,
    budgets_LS: np.ndarray,
    rows: Sequence[Row],
    starts: Sequence[tuple[Starts, ...]],
    first_rank_J: np.ndarray,
    cp_size_J: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ms [..., 2, U, W, X] of the segments of rows on every member, of an average device, at
    budgets [..., L, S], how slow the devices are, and the tokens [U, W] of each rank.

    Of a micro-batch that ranks share, each does a part of every segment's work, and receives the
    others' part of the keys and values so far.
    """
    members = costs.job.lockstep_ranks
    micro_batches, starts_M = list(chain.from_iterable(rows)), list(chain.from_iterable(starts))
    cp_size_M = np.repeat(cp_size_J, members)
    ms, tokens_U = _pieces(costs, budgets_LS, micro_batches, starts_M, cp_size_M)
    ms += costs.constant_2X[:, None]
    ms[..., costs.own :] += np.array(costs.segments.operation_ms)[:, None, None]
    segments_M = np.array(list(map(len, starts_M)))
    first_M = np.cumsum(segments_M) - segments_M
    cp_size_U = np.repeat(cp_size_M, segments_M)
    if cp_size_J.max() > 1:
        dense_MX = np.array([costs.dense_tokens_SX[list(of)].sum(0) for of in micro_batches])
        more_2M = costs.heads_more_2W[:, cp_size_M] * (segments_M == 1)
        ms += np.repeat(dense_MX * more_2M[..., None], segments_M, axis=1)
        until_U = np.cumsum(tokens_U)
        so_far_U = until_U - np.repeat((until_U - tokens_U)[first_M], segments_M)
        whole_M = segments_M == 1
        share_2M = np.where(whole_M, costs.received_2W[:, cp_size_M], costs.received_W[cp_size_M])
        received_2U = so_far_U * np.repeat(share_2M, segments_M, axis=1)
        ms += received_2U[..., None] * costs.exchange_2X[:, None]
    # From member by member to segment by segment.
    segments_J = segments_M[::members]
    of_row_U = np.arange(segments_J.sum()) - np.repeat(
        np.cumsum(segments_J) - segments_J, segments_J
    )
    member_W = np.arange(members)
    order_UW = np.repeat(first_M.reshape(-1, members), segments_J, axis=0) + of_row_U[:, None]
    rank_UW = np.repeat(first_rank_J, segments_J)[:, None] + member_W
    slowness_UWX = costs.slowness(cp_size_U[order_UW], rank_UW, costs.chunk_of_X)
    return ms[..., order_UW, :], slowness_UWX, -(-tokens_U // cp_size_U)[order_UW]


def joined_2UP(cuts: Iterable[Cut]) -> np.ndarray:
    """[2, U, P] ms of the segments of all cuts, one after another."""
    return np.concatenate([cut.ms_2UP for cut in cuts], axis=1)


def _pieces(
    costs: StepCosts,
    budgets_LS: np.ndarray,
    micro_batches: Sequence[MicroBatch],
    starts: Sequence[Starts],
    cp_size_M: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Ms [..., 2, U, X] of what segments hold, on an average device, at budgets [..., L, S], and
    their tokens [U].
    """
    sample_I = np.fromiter(chain.from_iterable(micro_batches), dtype=np.int64)
    blocks_I = costs.blocks_S[sample_I]
    # All micro-batches end to end, in blocks.
    start_I = np.cumsum(blocks_I) - blocks_I
    first_I = np.fromiter(accumulate(map(len, micro_batches[:-1]), initial=0), dtype=np.int64)
    segments_M = np.fromiter(map(len, starts), dtype=np.int64)
    start_U = np.fromiter(chain.from_iterable(starts), dtype=np.int64)
    start_U += np.repeat(start_I[first_I], segments_M)
    start_A = np.union1d(start_I, start_U)
    place_A = np.searchsorted(start_I, start_A, side="right") - 1
    bounds_2A = np.stack([start_A, np.append(start_A[1:], start_I[-1] + blocks_I[-1])])
    is_slower_M = (segments_M > 1) | (costs.gathering_share_W[cp_size_M] > 0.0)
    is_slower_I = np.repeat(is_slower_M, list(map(len, micro_batches)))
    held_A = sample_I[place_A], bounds_2A - start_I[place_A], is_slower_I[place_A]
    tokens_2A, ms = _prefix(costs, budgets_LS, *held_A)
    piece_U = np.searchsorted(start_A, start_U)
    work = np.add.reduceat(ms[..., 1, :, :] - ms[..., 0, :, :], piece_U, axis=-2)
    slowness_M = np.where(segments_M > 1, costs.segments.slowness, 1.0) * costs.share_W[cp_size_M]
    work *= np.repeat(slowness_M, segments_M)[:, None]
    pieces_U1 = np.diff(piece_U, append=len(start_A))[:, None]
    work += pieces_U1 * costs.sparse_2XF[:, None, :, SEQUENCES]
    return work, np.add.reduceat(tokens_2A[1] - tokens_2A[0], piece_U)


def _prefix(
    costs: StepCosts,
    budgets_LS: np.ndarray,
    sample_A: np.ndarray,
    blocks_YA: np.ndarray,
    is_slower_A: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [Y, A] of the first blocks of samples and, at budgets [..., L, S], their ms
    [..., 2, Y, A, X].

    What a micro-batch and a sequence cost whatever their length is not in it.

    Args:
        is_slower_A: whether dense attention takes longer than in one piece on a rank by itself.
    """
    tokens_YA = np.minimum(blocks_YA * costs.block_size, costs.lengths_tokens_S[sample_A])
    length_YA = tokens_YA / costs.block_size
    in_column_XL = costs.column_of_L == np.arange(len(costs.chunk_of_X))[:, None]
    levels, columns_X = budgets_LS.shape[:-2], len(in_column_XL)
    budgets_QLS = budgets_LS.reshape(-1, *budgets_LS.shape[-2:])
    pairs_QXYA = np.empty((len(budgets_QLS), columns_X, *length_YA.shape))
    at_once = max(1, _PAIRS_AT_ONCE * columns_X // (costs.job.layers * length_YA.size))
    for first in range(0, len(budgets_QLS), at_once):
        some = slice(first, first + at_once)
        for column, layers_L in enumerate(in_column_XL):
            budgets_QL1A = budgets_QLS[some][:, layers_L][..., None, sample_A]
            pairs_QLYA = costs.work.attended_pairs(length_YA, budgets_QL1A)
            dense_L1A = costs.dense_LS[layers_L][:, None, sample_A]
            pairs_QXYA[some, column] = np.where(dense_L1A, 0.0, pairs_QLYA).sum(axis=1)
    pairs_XYA = pairs_QXYA.reshape(*levels, columns_X, *length_YA.shape)
    visible_YA = costs.work.visible_pairs(length_YA)
    dense_AX, pair_2X = costs.dense_SX[sample_A], costs.pair_2C[:, costs.chunk_of_X]
    slower_2X = costs.slower_dense_2C[:, costs.chunk_of_X]
    slower_2AX = (dense_AX * is_slower_A[:, None]) * slower_2X[:, None]

    def ms_2AX(feature: int, sparse: float = 1.0) -> np.ndarray:
        sparse_21X, denser_21X = (
            x[:, None, :, feature] for x in (costs.sparse_2XF, costs.denser_2XF)
        )
        return np.asarray(sparse * sparse_21X + dense_AX * denser_21X)

    return tokens_YA, (
        tokens_YA[..., None] * ms_2AX(TOKENS)[:, None]
        + visible_YA[..., None] * (slower_2AX + ms_2AX(VISIBLE))[:, None]
        # What a piece costs whatever its length is added for each.
        + (tokens_YA > 0)[..., None] * ms_2AX(SEQUENCES, sparse=0.0)[:, None]
        + np.moveaxis(pairs_XYA, -3, -1)[..., None, :, :, :] * pair_2X[:, None, None]
    )


class Places:
    """Places at equal distances where samples may be cut.

    Args:
        max_segments: that a sample may have.

    Attributes:
        work_S: ms of every sample on all stages, forward and backward.
    """

    def __init__(self, costs: StepCosts, budgets_LS: np.ndarray, max_segments: int) -> None:
        places = max(_LEAST_PLACES, _PLACES_PER_SEGMENT * max_segments)
        blocks_XS = np.rint(costs.blocks_S * (np.arange(places + 1) / places)[:, None])
        blocks_XS = blocks_XS.astype(np.int64)
        every_S = np.arange(len(costs.blocks_S))
        _, ms_2XSP = _prefix(costs, budgets_LS, every_S, blocks_XS, every_S >= 0)
        self._costs = costs
        # What a dense sample saves whatever its length, it saves wherever it is cut.
        saved_S = costs.dense_SX @ costs.denser_2XF[..., SEQUENCES].clip(None, 0.0).sum(axis=0)
        work_XS = ms_2XSP.sum(axis=(0, 3)) - (blocks_XS > 0) * saved_S
        self._work_SX, self._blocks_SX = work_XS.T, blocks_XS.T
        self.work_S = self._work_SX[:, -1]
        self._along: dict[MicroBatch, tuple[np.ndarray, ...]] = {}

    def starts(
        self, row: Row, segments: int, least_tokens: int, least_blocks: int = 1
    ) -> tuple[Starts, ...]:
        """Where the segments of members begin that are cut alike: near equal shares of the work of
        each.

        They are fewer where a segment would have too few tokens in every member, or a member too
        few blocks.
        """
        if segments == 1:
            return ((0,),) * len(row)
        blocks = min(int(self._costs.blocks_S[list(samples)].sum()) for samples in row)
        for number in range(min(segments, blocks // least_blocks), 1, -1):
            ends = [self._ends(samples, number, least_blocks) for samples in row]
            if np.diff([tokens_U for _, tokens_U in ends]).max(axis=0).min() >= least_tokens:
                return tuple(tuple(blocks_U[:-1].tolist()) for blocks_U, _ in ends)
        return ((0,),) * len(row)

    def _ends(
        self, samples: MicroBatch, segments: int, least_blocks: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Blocks and tokens before each segment of a micro-batch and at its end: at the places
        nearest to equal work, moved as far as the least blocks ask for."""
        if samples not in self._along:
            self._along[samples] = self._places_along(samples)
        tokens_I, first_block_I, first_token_I, work_X, blocks_X = self._along[samples]
        number_U = np.arange(segments + 1)
        wanted_U = work_X[-1] * number_U / segments
        after_U = np.searchsorted(work_X, wanted_U).clip(1, len(work_X) - 1)
        before_is_nearer_U = wanted_U - work_X[after_U - 1] <= work_X[after_U] - wanted_U
        blocks_U = blocks_X[after_U - before_is_nearer_U]
        least_U = least_blocks * number_U
        blocks_U = np.maximum.accumulate(blocks_U - least_U) + least_U
        blocks_U = np.minimum(blocks_U, blocks_X[-1] - least_U[::-1])
        place_U = np.searchsorted(first_block_I, blocks_U, side="right") - 1
        in_sample_U = (blocks_U - first_block_I[place_U]) * self._costs.block_size
        return blocks_U, first_token_I[place_U] + np.minimum(in_sample_U, tokens_I[place_U])

    def _places_along(self, samples: MicroBatch) -> tuple[np.ndarray, ...]:
        """Tokens of the samples, blocks and tokens before each, and work and blocks before every
        place of the micro-batch."""
        samples_I = list(samples)
        blocks_I, tokens_I, work_I = (
            of_S[samples_I]
            for of_S in (self._costs.blocks_S, self._costs.lengths_tokens_S, self.work_S)
        )
        first_block_I, first_token_I, before_I = (
            np.cumsum(of_I) - of_I for of_I in (blocks_I, tokens_I, work_I)
        )
        work_X = (self._work_SX[samples_I] + before_I[:, None]).reshape(-1)
        blocks_X = (self._blocks_SX[samples_I] + first_block_I[:, None]).reshape(-1)
        return tokens_I, first_block_I, first_token_I, work_X, blocks_X
