# SPDX-License-Identifier: Apache-2.0
"""Cuts micro-batches into segments of nearly equal predicted cost, and says what each takes.

A query reads the blocks before it, up to its budget, so a piece of a sample costs the difference
of two prefixes: tokens, attended pairs and visible pairs of blocks a..b are those of b blocks less
those of a blocks. Micro-batches are cut many at a time: each alone would take longer in Python than
in numpy.

A row is the micro-batches of neighbouring ranks at one position. The ranks of a lockstep group
begin every layer of a segment together. So the segment takes the sum over layers of its slowest
member, and the group is one pipeline. Ranks that share micro-batches and do not wait in layers are
pipelines that begin shared operations together.

Shape legend: Q levels of budgets, R data-parallel ranks, C = P chunks, W members of a row, U
segments of a member or of all, I samples of all micro-batches, E pieces (parts of samples), Y
prefixes, X places or columns: L layers, then C embeddings and heads, then C experts.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, batched, chain, pairwise, starmap
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.context_groups import first_places
from sparsebalance_megatron.plan.lockstep_times import slowness_of_members_EWX
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.step_costs import (
    SEQUENCES,
    TOKENS,
    VISIBLE,
    Columns,
    StepCosts,
    dense_layers,
    of_lockstep_groups,
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
    """What the segments of a micro-batch, or of a lockstep group's row, take on every stage, and
    their tokens on a rank."""

    ms_2UP: np.ndarray
    tokens_U: np.ndarray


def rows_of(placement: Placement, members: int) -> list[list[Row]]:
    """The rows of every group in order."""
    return [list(zip(*ranks, strict=True)) for ranks in batched(placement, members)]


def segmented_times(
    costs: StepCosts, where: Arrangement, budgets_LS: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[2, R, P, 1, M] ms of every micro-batch, all its segments together, [R] makespans, and
    [2, U, P] ms of the segments of all ranks, one after another, on all ranks that share them.

    In lockstep groups, makespans and ms of segments are the group's, those of micro-batches each
    rank's by itself.
    """
    cp_sizes_RM = where.cp_sizes_RM
    segments_RM = [list(map(len, of_rank)) for of_rank in where.segment_starts_blocks]
    own_2UP = _own_segment_ms(costs, where, budgets_LS)
    first_J = [0, *accumulate(chain.from_iterable(segments_RM))][:-1]
    ms_2JP = np.add.reduceat(own_2UP, first_J, axis=1)
    times_2RPM = ms_2JP.reshape(2, *cp_sizes_RM.shape, -1).swapaxes(2, 3)
    lockstep = costs.job.lockstep_ranks > 1
    ms_2UP = _lockstep_2UP(costs, where, budgets_LS) if lockstep else own_2UP
    times = OperationTimes.of_segments(segments_RM, ms_2UP, cp_sizes_RM)
    return times_2RPM[:, :, :, None], makespans_ms(times), ms_2UP


def segment_ms_Q2UP(costs: StepCosts, where: Arrangement, budgets_QLS: np.ndarray) -> np.ndarray:
    """Ms of the segments of all ranks at several budgets, as those of :func:`segmented_times`."""
    if costs.job.lockstep_ranks > 1:
        return np.stack([_lockstep_2UP(costs, where, budgets_LS) for budgets_LS in budgets_QLS])
    return _own_segment_ms(costs, where, budgets_QLS)


def _own_segment_ms(costs: StepCosts, where: Arrangement, budgets_LS: np.ndarray) -> np.ndarray:
    """Ms [..., 2, U, P] of the segments of all ranks, each by itself, at budgets [..., L, S]."""
    cp_size_J, first_J = where.cp_sizes_RM.reshape(-1), first_places(where.cp_sizes_RM)
    held_M, number_J = np.unique(first_J, return_inverse=True)
    micro_batches, starts = (
        list(chain.from_iterable(of)) for of in (where.samples, where.segment_starts_blocks)
    )
    ms, _ = _segments(
        costs,
        budgets_LS,
        [micro_batches[place] for place in held_M.tolist()],
        [starts[place] for place in held_M.tolist()],
        held_M // where.cp_sizes_RM.shape[1],
        cp_size_J[held_M],
    )
    if len(held_M) == len(first_J):
        return ms
    segments_J = np.array(list(map(len, starts)))
    first_segment_M = np.cumsum(segments_J[held_M]) - segments_J[held_M]
    before_J = np.cumsum(segments_J) - segments_J
    shared_U = np.repeat(first_segment_M[number_J] - before_J, segments_J)
    return ms[..., shared_U + np.arange(len(shared_U)), :]


def micro_batch_cuts(
    costs: StepCosts,
    budgets_LS: np.ndarray,
    micro_batches: Sequence[MicroBatch],
    starts: Sequence[Starts],
    first_ranks: Sequence[int],
    cp_sizes: Sequence[int],
) -> list[Cut]:
    """Micro-batches in segments, on the devices of their ranks."""
    ms_2UP, tokens_U = _segments(
        *(costs, budgets_LS, micro_batches, starts), np.array(first_ranks), np.array(cp_sizes)
    )
    parts = starmap(slice, pairwise(accumulate(map(len, starts), initial=0)))
    return [Cut(ms_2UP[:, part], tokens_U[part]) for part in parts]


def _segments(
    costs: StepCosts,
    budgets_LS: np.ndarray,
    micro_batches: Sequence[MicroBatch],
    starts: Sequence[Starts],
    first_rank_M: np.ndarray,
    cp_size_M: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Ms [..., 2, U, P] of the segments of micro-batches on the devices of their ranks, at budgets
    [..., L, S], and their tokens [U] on a rank.

    Of a micro-batch that ranks share, each does a part of every segment's work, and receives the
    others' part of the keys and values so far.
    """
    ms, tokens_U = _pieces(costs, costs.by_chunk, budgets_LS, micro_batches, starts, cp_size_M)
    ms += _whatever_it_holds_2C(costs)[:, None]
    segments_M = np.array(list(map(len, starts)))
    cp_size_U = np.repeat(cp_size_M, segments_M)
    if cp_size_M.max() > 1:
        dense_MX = np.array(
            [costs.by_chunk.dense_tokens_SX[list(of)].sum(0) for of in micro_batches]
        )
        more_2M = costs.heads_more_2W[:, cp_size_M] * (segments_M == 1)
        ms += np.repeat(dense_MX * more_2M[..., None], segments_M, axis=1)
        until_U = np.cumsum(tokens_U)
        first_M = np.cumsum(segments_M) - segments_M
        so_far_U = until_U - np.repeat((until_U - tokens_U)[first_M], segments_M)
        whole_M = segments_M == 1
        share_2M = np.where(whole_M, costs.received_2W[:, cp_size_M], costs.received_W[cp_size_M])
        received_2U = so_far_U * np.repeat(share_2M, segments_M, axis=1)
        ms += received_2U[..., None] * costs.by_chunk.exchange_2X[:, None]
    if (costs.slowness_RP != 1.0).any():
        ranks = zip(first_rank_M.tolist(), cp_size_M.tolist(), strict=True)
        slowest_MP = [costs.slowness_RP[rank : rank + size].max(axis=0) for rank, size in ranks]
        ms *= np.repeat(slowest_MP, segments_M, axis=0)
    return ms, -(-tokens_U // cp_size_U)


def row_cuts(
    costs: StepCosts,
    budgets_LS: np.ndarray,
    rows: Sequence[Row],
    starts: Sequence[tuple[Starts, ...]],
    groups: Sequence[int],
) -> list[Cut]:
    """Rows of lockstep groups in segments: what the group takes for each on its devices, and the
    most tokens of a member.

    Args:
        starts: of the segments of every member of every row.
        groups: whose devices run each row.
    """
    members, columns = costs.job.lockstep_ranks, costs.by_layer
    ms_2UX, tokens_U = _pieces(
        costs,
        columns,
        budgets_LS,
        list(chain.from_iterable(rows)),
        list(chain.from_iterable(starts)),
    )
    slowness_EWX = slowness_of_members_EWX(costs)
    slowest_EC = slowness_EWX[..., columns.own :].max(axis=1)
    cuts = []
    ends = accumulate((members * len(of_row[0]) for of_row in starts), initial=0)
    for group, part in zip(groups, pairwise(ends), strict=True):
        ms_2WUX = ms_2UX[:, slice(*part)].reshape(2, members, -1, len(columns.chunk_of_X))
        ms_2UP = of_lockstep_groups(ms_2WUX, slowness_EWX[group], columns.chunk_of_X)
        ms_2UP += (_whatever_it_holds_2C(costs) * slowest_EC[group])[:, None]
        cuts.append(Cut(ms_2UP, tokens_U[slice(*part)].reshape(members, -1).max(axis=0)))
    return cuts


def _lockstep_2UP(costs: StepCosts, where: Arrangement, budgets_LS: np.ndarray) -> np.ndarray:
    """[2, U, P] ms of the segments of all ranks, one after another: on each those of its group."""
    members, positions = costs.job.lockstep_ranks, len(where.samples[0])
    rows, starts = (
        list(chain.from_iterable(rows_of(of, members)))
        for of in (where.samples, where.segment_starts_blocks)
    )
    groups = [number // positions for number in range(len(rows))]
    of_groups = batched(row_cuts(costs, budgets_LS, rows, starts, groups), positions)
    return np.concatenate([joined_2UP(cuts) for cuts in of_groups for _ in range(members)], axis=1)


def joined_2UP(cuts: Iterable[Cut]) -> np.ndarray:
    """[2, U, P] ms of the segments of all cuts, one after another."""
    return np.concatenate([cut.ms_2UP for cut in cuts], axis=1)


def _whatever_it_holds_2C(costs: StepCosts) -> np.ndarray:
    """[2, C] ms that a segment takes whatever it holds."""
    return costs.constant_2C + np.array(costs.segments.operation_ms)[:, None]


def _pieces(
    costs: StepCosts,
    columns: Columns,
    budgets_LS: np.ndarray,
    micro_batches: Sequence[MicroBatch],
    starts: Sequence[Starts],
    cp_size_M: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Ms [..., 2, U, X] of what segments hold, on an average device, at budgets [..., L, S], and
    their tokens [U].

    Args:
        cp_size_M: ranks that share each micro-batch; None where none do.
    """
    if cp_size_M is None:
        cp_size_M = np.ones(len(micro_batches), dtype=np.int64)
    sample_I = np.fromiter(chain.from_iterable(micro_batches), dtype=np.int64)
    blocks_I = costs.blocks_S[sample_I]
    # All micro-batches end to end, in blocks.
    start_I = np.cumsum(blocks_I) - blocks_I
    first_I = np.fromiter(accumulate(map(len, micro_batches[:-1]), initial=0), dtype=np.int64)
    segments_M = np.fromiter(map(len, starts), dtype=np.int64)
    start_U = np.fromiter(chain.from_iterable(starts), dtype=np.int64)
    start_U += np.repeat(start_I[first_I], segments_M)
    start_E = np.union1d(start_I, start_U)
    place_E = np.searchsorted(start_I, start_E, side="right") - 1
    bounds_2E = np.stack([start_E, np.append(start_E[1:], start_I[-1] + blocks_I[-1])])
    tokens_2E, ms = _prefix(
        *(costs, columns, budgets_LS, sample_I[place_E], bounds_2E - start_I[place_E])
    )
    piece_U = np.searchsorted(start_E, start_U)
    work = np.add.reduceat(ms[..., 1, :, :] - ms[..., 0, :, :], piece_U, axis=-2)
    slowness_M = np.where(segments_M > 1, costs.segments.slowness, 1.0) * costs.share_W[cp_size_M]
    work *= np.repeat(slowness_M, segments_M)[:, None]
    pieces_U1 = np.diff(piece_U, append=len(start_E))[:, None]
    work += pieces_U1 * columns.sparse_2XF[:, None, :, SEQUENCES]
    return work, np.add.reduceat(tokens_2E[1] - tokens_2E[0], piece_U)


def _prefix(
    costs: StepCosts,
    columns: Columns,
    budgets_LS: np.ndarray,
    sample_E: np.ndarray,
    blocks_YE: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [Y, E] of the first blocks of samples and, at budgets [..., L, S], their ms
    [..., 2, Y, E, X], in one piece.

    What a micro-batch and a sequence cost whatever their length is not in it.
    """
    tokens_YE = np.minimum(blocks_YE * costs.block_size, costs.lengths_tokens_S[sample_E])
    length_YE = tokens_YE / costs.block_size
    in_column_XL = columns.column_of_L == np.arange(columns.pair_2X.shape[1])[:, None]
    levels, columns_X = budgets_LS.shape[:-2], len(in_column_XL)
    budgets_QLS = budgets_LS.reshape(-1, *budgets_LS.shape[-2:])
    pairs_QXYE = np.empty((len(budgets_QLS), columns_X, *length_YE.shape))
    at_once = max(1, _PAIRS_AT_ONCE * columns_X // (len(columns.column_of_L) * length_YE.size))
    for first in range(0, len(budgets_QLS), at_once):
        some = slice(first, first + at_once)
        for column, layers_L in enumerate(in_column_XL):
            budgets_QL1E = budgets_QLS[some][:, layers_L][..., None, sample_E]
            pairs_QLYE = costs.work.attended_pairs(length_YE, budgets_QL1E)
            dense_L1E = costs.dense_LS[layers_L][:, None, sample_E]
            pairs_QXYE[some, column] = np.where(dense_L1E, 0.0, pairs_QLYE).sum(axis=1)
    pairs_XYE = pairs_QXYE.reshape(*levels, columns_X, *length_YE.shape)
    visible_YE = costs.work.visible_pairs(length_YE)
    dense_EX = dense_layers(costs.dense_LS, columns.column_of_L, len(in_column_XL))[sample_E]

    def ms_2EX(feature: int, sparse: float = 1.0) -> np.ndarray:
        sparse_21X, denser_21X = (
            x[:, None, :, feature] for x in (columns.sparse_2XF, columns.denser_2XF)
        )
        return np.asarray(sparse * sparse_21X + dense_EX * denser_21X)

    return tokens_YE, (
        tokens_YE[..., None] * ms_2EX(TOKENS)[:, None]
        + visible_YE[..., None] * ms_2EX(VISIBLE)[:, None]
        # What a piece costs whatever its length is added for each.
        + (tokens_YE > 0)[..., None] * ms_2EX(SEQUENCES, sparse=0.0)[:, None]
        + np.moveaxis(pairs_XYE, -3, -1)[..., None, :, :, :] * columns.pair_2X[:, None, None]
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
        samples_S, columns = np.arange(len(costs.blocks_S)), costs.by_chunk
        _, ms_2XSP = _prefix(costs, columns, budgets_LS, samples_S, blocks_XS)
        self._costs = costs
        # What a dense sample saves whatever its length, it saves wherever it is cut.
        saved_P = columns.denser_2XF[..., SEQUENCES].clip(None, 0.0).sum(axis=0)
        saved_S = dense_layers(costs.dense_LS, columns.column_of_L, len(saved_P)) @ saved_P
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
