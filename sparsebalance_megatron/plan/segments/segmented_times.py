# SPDX-License-Identifier: Apache-2.0
"""What steps with segments take: on ranks alone, and on ranks that wait in every layer.

The ranks of a lockstep group run a position in equally many segments and begin every layer of a
segment together. So a segment takes the sum over layers of its slowest member, and the group is one
rank of the pipeline.

Shape legend: S samples of a global batch, L layers, R data-parallel ranks or candidates, P pipeline
stages, C = P chunks, M micro-batches, J = R x M micro-batches, W ranks of a group, U segments, of a
member or of all, X columns: L layers, then C embeddings and heads, then C experts; a leading 2:
forward and backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.pipeline import simulator as pipeline
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.segments.cuts import (
    Columns,
    Cut,
    MicroBatch,
    cut_at,
    pieces,
    whatever_it_holds_2C,
)
from sparsebalance_megatron.plan.step_costs import StepCosts

Row = tuple[MicroBatch, ...]
"""The micro-batches of a group at one position, by member."""


def rows_of(placement: Placement, members: int) -> list[list[Row]]:
    """The rows of every group in order."""
    return [list(zip(*ranks, strict=True)) for ranks in itertools.batched(placement, members)]


def segmented_times(
    costs: StepCosts, where: Arrangement, budgets_LS: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[2, R, P, 1, M] ms of every micro-batch, all its segments together, [R] makespans, and
    [2, U, P] ms of the segments of all ranks, one after another.

    In lockstep groups, makespans and ms of segments are the group's, those of micro-batches each
    rank's by itself.
    """
    micro_batches, first_blocks = (
        list(itertools.chain.from_iterable(of)) for of in (where.samples, where.first_blocks)
    )
    segments_RM = [list(map(len, of_rank)) for of_rank in where.first_blocks]
    ms_2UP = _joined_2UP(cut_at(costs, budgets_LS, micro_batches, first_blocks))
    ms_2UP *= np.repeat(costs.slowness_RP, list(map(sum, segments_RM)), axis=0)
    first_J = [0, *itertools.accumulate(map(len, first_blocks[:-1]))]
    ms_2JP = np.add.reduceat(ms_2UP, first_J, axis=1)
    times_2RPM = ms_2JP.reshape(2, *where.cp_sizes_RM.shape, -1).swapaxes(2, 3)
    if costs.job.lockstep_ranks > 1:
        ms_2UP = _lockstep_2UP(costs, where, budgets_LS)
    return (
        times_2RPM[:, :, :, None],
        pipeline.makespans_ms(OperationTimes.of_segments(segments_RM, ms_2UP)),
        ms_2UP,
    )


def makespans_ms(candidates: Sequence[Sequence[Cut]]) -> np.ndarray:
    """[R] ms until the last operation of each candidate ends.

    Args:
        candidates: micro-batches or rows of a pipeline, in the order in which they run.
    """
    segments_RM = [[len(cut.tokens_U) for cut in cuts] for cuts in candidates]
    ms_2UP = _joined_2UP(list(itertools.chain.from_iterable(candidates)))
    return pipeline.makespans_ms(OperationTimes.of_segments(segments_RM, ms_2UP))


def row_cuts(
    costs: StepCosts,
    budgets_LS: np.ndarray,
    rows: Sequence[Row],
    first_blocks: Sequence[Sequence[tuple[int, ...]]],
    group_of_row: Sequence[int],
) -> list[Cut]:
    """Rows in segments: what their group takes for each on its devices, and the most tokens of a
    member.

    Args:
        first_blocks: of the segments of every member of every row.
        group_of_row: the group whose devices run it.
    """
    if costs.layers is None:
        alone = [samples for (samples,) in rows]
        cuts = cut_at(costs, budgets_LS, alone, [blocks for (blocks,) in first_blocks])
        return [
            cut._replace(
                forward_UP=cut.forward_UP * costs.slowness_RP[rank],
                backward_UP=cut.backward_UP * costs.slowness_RP[rank],
            )
            for cut, rank in zip(cuts, group_of_row, strict=True)
        ]
    layers, members = len(costs.chunk_of_layer_L), costs.job.lockstep_ranks
    _, sequence_2X, token_2X, pair_2X, visible_2X = np.moveaxis(costs.layers.columns_2XF, 2, 0)
    columns = Columns(sequence_2X, token_2X, visible_2X, pair_2X, np.arange(layers))
    ms_2UX, tokens_U = pieces(
        costs,
        columns,
        budgets_LS,
        list(itertools.chain.from_iterable(rows)),
        list(itertools.chain.from_iterable(first_blocks)),
    )
    chunk_of_X = np.concatenate([costs.chunk_of_layer_L, *[np.arange(costs.chunks)] * 2])
    slowness_EWX = costs.slowness_RP[:, chunk_of_X].reshape(-1, members, len(chunk_of_X))
    together = layers + costs.chunks
    cuts, first = [], 0
    for blocks, group in zip(first_blocks, group_of_row, strict=True):
        segments = len(blocks[0])
        part = slice(first, first + members * segments)
        first = part.stop
        ms_2WUX = ms_2UX[:, part].reshape(2, members, segments, -1)
        slowest_2UX = (ms_2WUX * slowness_EWX[group][:, None]).max(axis=1)
        slowest_device_C = slowness_EWX[group, :, together:].max(axis=0)
        slowest_2UX[..., together:] = ms_2WUX[..., together:].mean(axis=1) * slowest_device_C
        constant_2C = whatever_it_holds_2C(costs) * slowest_device_C
        ms_2UC = np.repeat(constant_2C[:, None], segments, axis=1)
        for column, chunk in enumerate(chunk_of_X.tolist()):
            ms_2UC[..., chunk] += slowest_2UX[..., column]
        tokens_WU = tokens_U[part].reshape(members, segments)
        cuts.append(Cut(tuple(blocks[0]), ms_2UC[0], ms_2UC[1], tokens_WU.max(axis=0)))
    return cuts


def _lockstep_2UP(costs: StepCosts, where: Arrangement, budgets_LS: np.ndarray) -> np.ndarray:
    """[2, U, P] ms of the segments of all ranks, one after another: on each those of its group."""
    members, positions = costs.job.lockstep_ranks, len(where.samples[0])
    rows, first_blocks = (
        list(itertools.chain.from_iterable(rows_of(of, members)))
        for of in (where.samples, where.first_blocks)
    )
    groups = [number // positions for number in range(len(rows))]
    cuts = row_cuts(costs, budgets_LS, rows, first_blocks, groups)
    of_groups = map(_joined_2UP, itertools.batched(cuts, positions))
    return np.concatenate([ms_2UP for ms_2UP in of_groups for _ in range(members)], axis=1)


def _joined_2UP(cuts: Sequence[Cut]) -> np.ndarray:
    """[2, U, P] ms of the segments of all cuts, one after another."""
    return np.stack(
        [
            np.concatenate(of)
            for of in ([cut.forward_UP for cut in cuts], [cut.backward_UP for cut in cuts])
        ]
    )
