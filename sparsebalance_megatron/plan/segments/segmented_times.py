# SPDX-License-Identifier: Apache-2.0
"""What steps with segments take: on ranks alone, and on ranks that wait in every layer.

The ranks of a lockstep group run a position in equally many segments and begin every layer of a
segment together. So a segment takes the sum over layers of its slowest member, and the group is one
rank of the pipeline.

Ranks that share micro-batches and do not wait in layers are pipelines that begin shared operations
together.

Shape legend: R data-parallel ranks or candidates, C = P chunks, W ranks of a group, U segments, of
a member or of all, X columns: L layers, then C embeddings and heads, then C experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.context_groups import first_places
from sparsebalance_megatron.plan.lockstep_times import slowness_of_members_EWX
from sparsebalance_megatron.plan.pipeline import simulator as pipeline
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.segments.cuts import (
    Cut,
    MicroBatch,
    cut_at,
    pieces,
    whatever_it_holds_2C,
)
from sparsebalance_megatron.plan.step_costs import StepCosts, of_lockstep_groups

Row = tuple[MicroBatch, ...]
"""The micro-batches of a group at one position, by member; one that members share is with each."""


def rows_of(placement: Placement, members: int) -> list[list[Row]]:
    """The rows of every group in order."""
    return [list(zip(*ranks, strict=True)) for ranks in itertools.batched(placement, members)]


def segmented_times(
    costs: StepCosts, where: Arrangement, budgets_LS: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[2, R, P, 1, M] ms of every micro-batch, all its segments together, [R] makespans, and
    [2, U, P] ms of the segments of all ranks, one after another, on all ranks that share them.

    In lockstep groups, makespans and ms of segments are the group's, those of micro-batches each
    rank's by itself.
    """
    micro_batches, segment_starts_blocks = (
        list(itertools.chain.from_iterable(of))
        for of in (where.samples, where.segment_starts_blocks)
    )
    segments_RM = [list(map(len, of_rank)) for of_rank in where.segment_starts_blocks]
    cp_sizes_RM, holder_J = where.cp_sizes_RM, first_places(where.cp_sizes_RM).tolist()
    held = sorted(set(holder_J))
    cuts = cut_at(
        costs,
        budgets_LS,
        [micro_batches[place] for place in held],
        [segment_starts_blocks[place] for place in held],
        cp_sizes_RM.reshape(-1)[held].tolist(),
    )
    cut_of = dict(zip(held, cuts, strict=True))
    ms_2UP = _joined_2UP([cut_of[place] for place in holder_J])
    ones_2RMP = np.ones((2, *cp_sizes_RM.shape, costs.chunks))
    slowness_RMP = costs.on_devices(ones_2RMP, cp_sizes_RM)[0]
    ms_2UP *= np.repeat(
        slowness_RMP.reshape(-1, costs.chunks), list(map(len, segment_starts_blocks)), 0
    )
    first_J = [0, *itertools.accumulate(map(len, segment_starts_blocks[:-1]))]
    ms_2JP = np.add.reduceat(ms_2UP, first_J, axis=1)
    times_2RPM = ms_2JP.reshape(2, *cp_sizes_RM.shape, -1).swapaxes(2, 3)
    if costs.job.lockstep_ranks > 1:
        ms_2UP = _lockstep_2UP(costs, where, budgets_LS)
    return (
        times_2RPM[:, :, :, None],
        pipeline.makespans_ms(OperationTimes.of_segments(segments_RM, ms_2UP, cp_sizes_RM)),
        ms_2UP,
    )


def makespans_ms(
    candidates: Sequence[Sequence[Cut]], cp_sizes_RM: np.ndarray | None = None
) -> np.ndarray:
    """[R] ms until the last operation of each candidate ends.

    Args:
        candidates: micro-batches or rows of a pipeline, in the order in which they run.
        cp_sizes_RM: where candidates are ranks that share micro-batches.
    """
    segments_RM = [[len(cut.tokens_U) for cut in cuts] for cuts in candidates]
    ms_2UP = _joined_2UP(list(itertools.chain.from_iterable(candidates)))
    return pipeline.makespans_ms(OperationTimes.of_segments(segments_RM, ms_2UP, cp_sizes_RM))


def rank_cuts(
    costs: StepCosts,
    budgets_LS: np.ndarray,
    rows: Sequence[Row],
    segment_starts_blocks: Sequence[Sequence[tuple[int, ...]]],
    first_rank_of_row: Sequence[int],
) -> list[tuple[Cut, ...]]:
    """Rows in segments, by member: what each takes on its devices, and its share of the tokens.

    Args:
        segment_starts_blocks: of the segments of every member of every row.
    """
    held = [
        (number, member, row.count(samples))
        for number, row in enumerate(rows)
        for member, samples in enumerate(row)
        if row.index(samples) == member
    ]
    cuts = cut_at(
        costs,
        budgets_LS,
        [rows[number][member] for number, member, _ in held],
        [segment_starts_blocks[number][member] for number, member, _ in held],
        [cp_size for *_, cp_size in held],
    )
    found: list[tuple[Cut, ...]] = [()] * len(rows)
    for (number, member, cp_size), cut in zip(held, cuts, strict=True):
        first = first_rank_of_row[number] + member
        slowness_P = costs.slowness_RP[first : first + cp_size].max(axis=0)
        on_devices = cut._replace(
            forward_UP=cut.forward_UP * slowness_P,
            backward_UP=cut.backward_UP * slowness_P,
            tokens_U=-(-cut.tokens_U // cp_size),
        )
        found[number] += (on_devices,) * cp_size
    return found


def row_cuts(
    costs: StepCosts,
    budgets_LS: np.ndarray,
    rows: Sequence[Row],
    segment_starts_blocks: Sequence[Sequence[tuple[int, ...]]],
    group_of_row: Sequence[int],
) -> list[Cut]:
    """Rows of lockstep groups in segments: what the group takes for each on its devices, and the
    most tokens of a member.

    Args:
        segment_starts_blocks: of the segments of every member of every row.
        group_of_row: the group whose devices run it.
    """
    assert costs.layers is not None, "ranks that wait in layers have costs by layer"
    members = costs.job.lockstep_ranks
    ms_2UX, tokens_U = pieces(
        costs,
        costs.layers,
        budgets_LS,
        list(itertools.chain.from_iterable(rows)),
        list(itertools.chain.from_iterable(segment_starts_blocks)),
    )
    slowness_EWX = slowness_of_members_EWX(costs)
    slowest_EC = slowness_EWX[..., costs.own_columns :].max(axis=1)
    cuts, first = [], 0
    for blocks, group in zip(segment_starts_blocks, group_of_row, strict=True):
        segments = len(blocks[0])
        part = slice(first, first + members * segments)
        first = part.stop
        ms_2WUX = ms_2UX[:, part].reshape(2, members, segments, -1)
        ms_2UC = of_lockstep_groups(ms_2WUX, slowness_EWX[group], costs.chunk_of_X)
        ms_2UC += (whatever_it_holds_2C(costs) * slowest_EC[group])[:, None]
        tokens_WU = tokens_U[part].reshape(members, segments)
        cuts.append(Cut(tuple(blocks[0]), ms_2UC[0], ms_2UC[1], tokens_WU.max(axis=0)))
    return cuts


def _lockstep_2UP(costs: StepCosts, where: Arrangement, budgets_LS: np.ndarray) -> np.ndarray:
    """[2, U, P] ms of the segments of all ranks, one after another: on each those of its group."""
    members, positions = costs.job.lockstep_ranks, len(where.samples[0])
    rows, segment_starts_blocks = (
        list(itertools.chain.from_iterable(rows_of(of, members)))
        for of in (where.samples, where.segment_starts_blocks)
    )
    groups = [number // positions for number in range(len(rows))]
    cuts = row_cuts(costs, budgets_LS, rows, segment_starts_blocks, groups)
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
