# SPDX-License-Identifier: Apache-2.0
"""Segments of ranks that wait for one another in every layer.

The ranks of a lockstep group run a position in equally many segments, each cut into pieces of about
equal work, and begin every layer of a segment together. So a segment takes the sum over layers of
its slowest member, and the group is one rank of the pipeline.

*State*: for each group an order of its positions, and a number of segments for each. *Start*: four
orders, with numbers in proportion to the work of positions. *Moves*: one segment more or less at a
position, or two positions in each other's place; the best of all is taken. *Objective*: when the
group's pipeline ends, while it holds no more tokens than in one piece. *Stop*: no move is shorter,
or 16 were made.

Shape legend: S samples of a global batch, L layers, R data-parallel ranks, P pipeline stages,
C = P chunks, W ranks of a group, U segments, X columns: L layers, then C embeddings and heads,
then C experts; a leading 2: forward and backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.budgets.policy import TunedBudgets
from sparsebalance_megatron.plan.metrics import rounded_ms
from sparsebalance_megatron.plan.pipeline.orders import most_tokens_in_flight
from sparsebalance_megatron.plan.segments.cuts import (
    LEAST_GAIN,
    Columns,
    Cut,
    MicroBatch,
    Places,
    makespans_ms,
    pieces,
    whatever_it_holds_2C,
)
from sparsebalance_megatron.plan.step_costs import StepCosts
from sparsebalance_megatron.plan.step_problem import StepProblem

_SEGMENTS_PER_GROUP = (8, 12, 20, 32, 48)
"""Numbers of segments of a group that are tried first."""
_MAX_MOVES = 16

Row = tuple[MicroBatch, ...]
"""The micro-batches of a group at one position, by member."""


@dataclass(frozen=True, kw_only=True)
class _RowCut:
    """A row in segments: when they end for the whole group, and where each member cuts."""

    times: Cut
    first_blocks: tuple[tuple[int, ...], ...]


_Order = list[tuple[int, int]]
"""Rows of a group in order, by number, and the segments of each."""


def shorter_in_segments(
    problem: StepProblem, where: Arrangement, tuned: TunedBudgets
) -> tuple[Arrangement, TunedBudgets]:
    """The placement with cuts and budgets for them, or as it is where that takes no longer.

    Budgets that are tuned for a pipeline let rise whatever does not lie on its longest chain. Cut
    finely, a pipeline has hardly any room, and takes about what its rows take one after another:
    budgets tuned for that compete.
    """
    whole_ms = float(problem.budgets.makespans_ms(tuned.budgets_LS, where).max())
    limit_ms = rounded_ms(LEAST_GAIN * whole_ms)
    wanted = problem.budgets.covered(tuned.budgets_LS)
    if problem.pricing is not None:
        wanted = min(wanted, problem.pricing.wanted_coverage)
    candidates = [tuned]
    if problem.pricing is not None:
        of_sums = _on_one_stage(problem).tuned_where(where)
        if problem.budgets.covers(of_sums.budgets_LS, wanted):
            candidates.append(of_sums)
    best = where, tuned
    for budgets in candidates:
        found = best_lockstep_segments(problem, where, budgets)
        if found is not None and found[1] < limit_ms:
            best, limit_ms = (found[0], budgets), found[1]
    return best


def _on_one_stage(problem: StepProblem) -> StepProblem:
    """The problem with all layers on one stage, whose time is the sum over positions."""
    costs, job = problem.costs, problem.job
    assert costs.layers is not None, "ranks that wait in layers have costs by layer"
    layers = replace(
        costs.layers,
        chunk_of_layer_L=np.zeros_like(costs.chunk_of_layer_L),
        outside_2SC=costs.layers.outside_2SC.sum(axis=2, keepdims=True),
        outside_sequence_2C=costs.layers.outside_sequence_2C.sum(axis=1, keepdims=True),
        together_2SC=costs.layers.together_2SC.sum(axis=2, keepdims=True),
    )
    return replace(
        problem,
        budgets=replace(
            problem.budgets,
            costs=replace(
                costs,
                job=replace(job, stage_layers=((tuple(range(job.layers)),),)),
                constant_2C=costs.constant_2C.sum(axis=1, keepdims=True),
                sequence_2C=costs.sequence_2C.sum(axis=1, keepdims=True),
                fixed_2SC=costs.fixed_2SC.sum(axis=2, keepdims=True),
                token_2C=costs.token_2C.sum(axis=1, keepdims=True),
                visible_2C=costs.visible_2C.sum(axis=1, keepdims=True),
                pair_2C=costs.pair_2C.mean(axis=1, keepdims=True),
                exchange_2SC=costs.exchange_2SC.sum(axis=2, keepdims=True),
                chunk_of_layer_L=np.zeros_like(costs.chunk_of_layer_L),
                slowness_RP=costs.slowness_RP.max(axis=1, keepdims=True),
                layers=layers,
            ),
        ),
    )


def best_lockstep_segments(
    problem: StepProblem, where: Arrangement, tuned: TunedBudgets
) -> tuple[Arrangement, float] | None:
    """The placement with the cuts and the order in which its groups end soonest, and the ms of the
    step.

    Args:
        where: the placement, in one piece.

    Returns:
        None where nothing is cut.
    """
    places = Places.at(problem.costs, tuned.budgets_LS, problem.plan_settings.max_segments)
    samples: list[Sequence[MicroBatch]] = []
    first_blocks: list[Sequence[tuple[int, ...]]] = []
    makespan_ms = 0.0
    for group, members in enumerate(itertools.batched(where.samples, problem.job.lockstep_ranks)):
        search = _GroupSearch(problem, places, group, list(zip(*members, strict=True)))
        ms, order = search.best()
        makespan_ms = max(makespan_ms, ms)
        samples += zip(*(search.rows[row] for row, _ in order), strict=True)
        first_blocks += zip(*(search.cuts[each].first_blocks for each in order), strict=True)
    if all(len(blocks) == 1 for rank in first_blocks for blocks in rank):
        return None
    cut = replace(
        where,
        samples=tuple(map(tuple, samples)),
        first_blocks=tuple(map(tuple, first_blocks)),
    )
    return cut, rounded_ms(makespan_ms)


class _GroupSearch:
    """Searches the order and the numbers of segments of one group's rows.

    ``cuts``: by the number of a row and of its segments, where that many are possible.
    """

    def __init__(
        self, problem: StepProblem, places: Places, group: int, rows: Sequence[Row]
    ) -> None:
        self.rows = rows
        self._stages = problem.job.pipeline_stages
        self._work_of_row = [
            max(float(places.work_S[list(samples)].sum()) for samples in row) for row in rows
        ]
        self.cuts = self._all_cuts(problem, places, group)
        self._most_tokens = self._tokens_in_flight([(row, 1) for row in range(len(rows))])

    def best(self) -> tuple[float, _Order]:
        """The order and numbers that end soonest, and when."""
        starts = []
        up = sorted(range(len(self.rows)), key=lambda row: (self._work_of_row[row], row))
        down = up[::-1]
        in_order = list(range(len(self.rows)))
        for order in (in_order, up, down, up[::2] + up[1::2][::-1], down[::2] + down[1::2][::-1]):
            starts.append([(row, 1) for row in order])
            starts += [
                [(row, self._nearest(row, segments)) for row in order]
                for segments in _SEGMENTS_PER_GROUP
            ]
        ms, best = self._shortest(starts)
        for _ in range(_MAX_MOVES):
            moved_ms, moved = self._shortest(self._moves(best))
            if rounded_ms(moved_ms) >= rounded_ms(ms):
                break
            ms, best = moved_ms, moved
        return ms, best

    def _moves(self, order: _Order) -> list[_Order]:
        changed = [
            [*order[:place], (row, segments + step), *order[place + 1 :]]
            for place, (row, segments) in enumerate(order)
            for step in (-1, 1)
            if (row, segments + step) in self.cuts
        ]
        for one, other in itertools.combinations(range(len(order)), 2):
            swapped = list(order)
            swapped[one], swapped[other] = swapped[other], swapped[one]
            changed.append(swapped)
        return changed

    def _nearest(self, row: int, segments_of_group: int) -> int:
        """The possible number of segments nearest to a row's share of those of the group."""
        wanted = segments_of_group * self._work_of_row[row] / sum(self._work_of_row)
        possible = [segments for each, segments in self.cuts if each == row]
        return min(possible, key=lambda segments: (abs(segments - wanted), segments))

    def _shortest(self, orders: list[_Order]) -> tuple[float, _Order]:
        """The shortest order within the limit of tokens, and its ms; infinite where none is."""
        if not orders:
            return np.inf, []
        cuts = [[self.cuts[each].times for each in order] for order in orders]
        ms_X = makespans_ms(cuts, np.ones((len(orders), self._stages)))
        for number in np.argsort(ms_X, kind="stable").tolist():
            if self._tokens_in_flight(orders[number]) <= self._most_tokens:
                return float(ms_X[number]), orders[number]
        return np.inf, orders[0]

    def _tokens_in_flight(self, order: _Order) -> int:
        """Most tokens on the first stage of a member that had the longest segment of each row."""
        tokens = [self.cuts[each].times.tokens_U for each in order]
        return most_tokens_in_flight(tokens, self._stages)

    def _all_cuts(
        self, problem: StepProblem, places: Places, group: int
    ) -> dict[tuple[int, int], _RowCut]:
        settings, members = problem.plan_settings, problem.job.lockstep_ranks
        blocks_S = problem.costs.blocks_S
        wanted = [
            (row, segments)
            for row, samples in enumerate(self.rows)
            for segments in range(1, settings.max_segments + 1)
            if segments <= min(int(blocks_S[list(each)].sum()) for each in samples)
        ]
        flat = [samples for row, _ in wanted for samples in self.rows[row]]
        first_blocks = places.first_blocks(
            flat, [number for _, number in wanted for _ in range(members)]
        )
        blocks = [
            (
                found
                if len(found) == number
                else tuple(
                    int(blocks_S[list(samples)].sum()) * segment // number
                    for segment in range(number)
                )
            )
            for found, samples, number in zip(
                first_blocks,
                flat,
                (number for _, number in wanted for _ in range(members)),
                strict=True,
            )
        ]
        cuts = group_cuts(
            problem.costs,
            places.budgets_LS,
            [self.rows[row] for row, _ in wanted],
            list(itertools.batched(blocks, members)),
            [group] * len(wanted),
        )
        return {
            key: _RowCut(times=cut, first_blocks=of_members)
            for key, cut, of_members in zip(
                wanted, cuts, itertools.batched(blocks, members), strict=True
            )
            if key[1] == 1 or cut.tokens_U.min() >= settings.segment_tokens
        }


def group_cuts(
    costs: StepCosts,
    budgets_LS: np.ndarray,
    rows: Sequence[Row],
    first_blocks: Sequence[Sequence[tuple[int, ...]]],
    group_of_row: Sequence[int],
) -> list[Cut]:
    """Rows whose members have equally many segments: what the group takes for each, and the most
    tokens of a member.

    Args:
        first_blocks: of the segments of every member of every row.
        group_of_row: the group whose devices run it.
    """
    assert costs.layers is not None, "ranks that wait in layers have costs by layer"
    layers, members = len(costs.chunk_of_layer_L), costs.job.lockstep_ranks
    _, sequence_2X, token_2X, pair_2X, visible_2X = np.moveaxis(costs.layers.columns_2XF, 2, 0)
    columns = Columns(sequence_2X, token_2X, visible_2X, pair_2X, np.arange(layers))
    ms_2VX, tokens_V = pieces(
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
        ms_2WUX = ms_2VX[:, part].reshape(2, members, segments, -1)
        slowest_2UX = (ms_2WUX * slowness_EWX[group][:, None]).max(axis=1)
        slowest_device_C = slowness_EWX[group, :, together:].max(axis=0)
        slowest_2UX[..., together:] = ms_2WUX[..., together:].mean(axis=1) * slowest_device_C
        constant_2C = whatever_it_holds_2C(costs) * slowest_device_C
        ms_2UC = np.repeat(constant_2C[:, None], segments, axis=1)
        for column, chunk in enumerate(chunk_of_X.tolist()):
            ms_2UC[..., chunk] += slowest_2UX[..., column]
        tokens_WU = tokens_V[part].reshape(members, segments)
        cuts.append(Cut(tuple(blocks[0]), ms_2UC[0], ms_2UC[1], tokens_WU.max(axis=0)))
    return cuts


def lockstep_segments_2UP(
    costs: StepCosts, where: Arrangement, budgets_LS: np.ndarray
) -> np.ndarray:
    """[2, U, P] ms of the segments of all ranks, one after another: on each those of its group."""
    members = costs.job.lockstep_ranks
    rows, first_blocks = (
        [row for group in itertools.batched(of, members) for row in zip(*group, strict=True)]
        for of in (where.samples, where.first_blocks)
    )
    positions = len(where.samples[0])
    group_of_row = [number // positions for number in range(len(rows))]
    cuts = group_cuts(costs, budgets_LS, rows, first_blocks, group_of_row)
    of_ranks = [
        np.stack(
            [
                np.concatenate(of)
                for of in ([c.forward_UP for c in group], [c.backward_UP for c in group])
            ]
        )
        for group in itertools.batched(cuts, positions)
    ]
    return np.concatenate([ms_2UP for ms_2UP in of_ranks for _ in range(members)], axis=1)
