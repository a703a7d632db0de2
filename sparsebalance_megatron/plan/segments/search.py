# SPDX-License-Identifier: Apache-2.0
"""Searches orders, cuts and places, so that pipelines of segments end early.

A group are the ranks that begin every layer together, or that meet in micro-batches which they
share, or one rank where none waits for another. Its rows are the micro-batches of its members at
one position. The step ends with the last group.

1. *State.* For every group an order of its rows, and a number of segments for each row. The number
   decides the cuts: pieces of nearly equal ms (:mod:`.cuts`). Ranks that begin every layer together
   are one pipeline, and all members of a row have the number. Ranks that meet are a pipeline each:
   the member with most work has the number, the others in proportion to their work.
2. *Start.* Rows as they are placed, each in one piece; and for several numbers of segments of a
   group up to five orders, in which rows have numbers in proportion to their work. Every group
   takes the start that ends first.
3. *Moves*, all of the slowest group. A row has one segment more or less. Two rows change places.
   Where no ranks wait or meet, a sample is exchanged for a shorter one of a faster rank.
4. *Objective.* When the slowest group ends. No group may hold more tokens on its first stage than
   the limit.
5. *Stop.* A round of moves makes the step no shorter, or the search has simulated as many
   operations as it may (:mod:`..search_effort`), so that all ranks find the same.

Shape legend: U segments, X candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.context_groups import first_places, meeting_groups
from sparsebalance_megatron.plan.metrics import rounded_ms
from sparsebalance_megatron.plan.pipeline.orders import most_tokens_in_flight
from sparsebalance_megatron.plan.search_effort import (
    SEGMENT_COST,
    SHARE_OF_STEP_FOR_SEGMENTS,
    SearchEffort,
)
from sparsebalance_megatron.plan.segments.cuts import Cut, MicroBatch, Places
from sparsebalance_megatron.plan.segments.segmented_times import (
    Row,
    makespans_ms,
    rank_cuts,
    row_cuts,
    rows_of,
)
from sparsebalance_megatron.plan.step_problem import StepProblem

_SEGMENTS_PER_GROUP = (8, 12, 20, 32, 48)
"""Numbers of segments of a group that are tried first."""
_MAX_SWAPS = 64
"""Pairs of rows of the slowest group that change places in a round."""
_PARTNERS = 3
"""Other ranks, the fastest first, with which the slowest one trades samples."""
_TRADES = 6
"""Trades with each of them, those first that come nearest to equal work."""

_Order = tuple[tuple[Row, int], ...]
"""Rows of a group in order, and the segments of each."""


@dataclass(frozen=True, kw_only=True)
class _RowCut:
    """A row in segments: what they take in each pipeline of the group, and where each member's
    begin."""

    times: tuple[Cut, ...]
    segment_starts_blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A group's order, and the ms until its pipeline ends: infinite where it holds too much."""

    ms: float
    order: _Order


class SegmentSearch:
    """Searches placements, orders and cuts at given budgets.

    Args:
        problem: of a pipeline of several stages with one chunk each.
        budgets_LS: to place and cut by.
    """

    def __init__(self, problem: StepProblem, budgets_LS: np.ndarray) -> None:
        self._problem, self._settings = problem, problem.plan_settings
        self._places = Places.at(problem.costs, budgets_LS, self._settings.max_segments)
        self._work_of: list[float] = self._places.work_S.tolist()
        self._tokens_of = problem.lengths_tokens
        self._blocks_of: list[int] = problem.costs.blocks_S.tolist()
        self._row_limits: dict[Row, tuple[float, int]] = {}
        self._share_W = problem.costs.share_W.tolist()
        self._alone = problem.job.lockstep_ranks == 1
        self._cuts: dict[tuple[int, Row, int], _RowCut] = {}

    def best(self, whole: Arrangement, most_tokens: int) -> tuple[Arrangement, float]:
        """The shortest step that is found from an arrangement in one piece, and its ms: infinite
        where all hold too many tokens.

        Args:
            most_tokens: that may be in flight on the first stage of a group.
        """
        self._most_tokens = most_tokens
        step_ms = rounded_ms(
            self._problem.budgets.makespans_ms(self._problem.expected_LS, whole).max()
        )
        plan_ms = self._problem.search_ms(step_ms, SHARE_OF_STEP_FOR_SEGMENTS)
        self._effort = SearchEffort(plan_ms)
        rows = self._rows(whole)
        found = self._shortest(list(enumerate(self._starts(rows))))
        while self._effort.left:
            slowest, before_ms = _slowest(found)
            (found[slowest],) = self._shortest([(slowest, self._moved(found[slowest].order))])
            if self._alone and max(map(len, self._groups)) == 1:
                self._trade(found)
            if not rounded_ms(_slowest(found)[1]) < rounded_ms(before_ms):
                break
        return self._arranged(found), _slowest(found)[1]

    def _rows(self, whole: Arrangement) -> list[list[Row]]:
        """The rows of every group; wide groups come first, so that each begins at a multiple of its
        ranks among those simulated."""
        if not self._alone:
            rows = rows_of(whole.samples, self._problem.job.lockstep_ranks)
            size = self._problem.job.lockstep_ranks
            self._groups = [
                range(size * number, size * (number + 1)) for number in range(len(rows))
            ]
            return rows
        flat = list(itertools.chain.from_iterable(whole.samples))
        held = [flat[place] for place in first_places(whole.cp_sizes_RM).tolist()]
        by_rank = list(itertools.batched(held, whole.cp_sizes_RM.shape[1]))
        self._groups = sorted(meeting_groups(whole.cp_sizes_RM), key=len, reverse=True)
        return [
            list(zip(*by_rank[group.start : group.stop], strict=True)) for group in self._groups
        ]

    def _tokens(self, samples: MicroBatch) -> int:
        return sum(self._tokens_of[sample] for sample in samples)

    def _work_and_limit(self, row: Row) -> tuple[float, int]:
        """Ms of the member that has most work, and in how many segments a row may be cut: in
        lockstep every member has a block in each, one member enough tokens."""
        if row not in self._row_limits:
            members = [self._member(row, samples) for samples in row]
            work_ms, most_of_one, blocks = max(members)
            if not self._alone:
                most_of_one = max(most for _, most, _ in members)
                blocks = min(blocks for *_, blocks in members)
            most = min(self._settings.max_segments, most_of_one, blocks)
            self._row_limits[row] = work_ms, max(1, most)
        return self._row_limits[row]

    def _member(self, row: Row, samples: MicroBatch) -> tuple[float, int, int]:
        """Ms of a rank's share of the work, segments with enough tokens on all ranks together, and
        blocks of the share."""
        cp_size = row.count(samples)
        work_ms = self._share_W[cp_size] * sum(self._work_of[sample] for sample in samples)
        blocks = sum(self._blocks_of[sample] for sample in samples)
        tokens = self._tokens(samples)
        return work_ms, tokens // self._settings.segment_tokens, blocks // cp_size

    def _segments(self, row: Row, segments: int) -> list[int]:
        """Segments of every member, where the row has so many."""
        if not self._alone or len(row) == 1:
            return [segments] * len(row)
        members = [self._member(row, samples) for samples in row]
        work_ms = self._work_ms(row)
        return [
            max(1, min(round(segments * own_ms / work_ms), most, blocks))
            for own_ms, most, blocks in members
        ]

    def _work_ms(self, row: Row) -> float:
        return self._work_and_limit(row)[0]

    def _starts(self, rows_of_groups: Sequence[Sequence[Row]]) -> list[list[_Order]]:
        """Starts of every group: its rows as they are in one piece, and with least work at both
        ends in each number of segments. Half the effort may go to further orders: most work at
        both ends, as they are, work falling, work rising."""
        pipelines = sum(map(len, self._groups)) if self._alone else len(rows_of_groups)
        each = _operations(
            self._problem, pipelines * sum(_SEGMENTS_PER_GROUP) // len(_SEGMENTS_PER_GROUP)
        )
        most = max(1 + len(_SEGMENTS_PER_GROUP), self._effort.affordable(2 * each))
        return [self._starts_of(rows)[:most] for rows in rows_of_groups]

    def _starts_of(self, rows: Sequence[Row]) -> list[_Order]:
        up = sorted(rows, key=lambda row: (self._work_ms(row), row))
        down = up[::-1]
        ends = up[::2] + up[1::2][::-1], down[::2] + down[1::2][::-1]
        starts = dict.fromkeys(
            self._in_segments(order, segments)
            for order in (*ends, rows, down, up)
            for segments in _SEGMENTS_PER_GROUP
        )
        return [tuple((row, 1) for row in rows), *starts]

    def _in_segments(self, order: Sequence[Row], segments: int) -> _Order:
        """Rows with their shares of the segments of a group, by work."""
        work_and_limit = list(map(self._work_and_limit, order))
        each = segments / sum(work_ms for work_ms, _ in work_and_limit)
        return tuple(
            (row, max(1, min(round(each * work_ms), limit)))
            for row, (work_ms, limit) in zip(order, work_and_limit, strict=True)
        )

    def _moved(self, order: _Order) -> list[_Order]:
        """The order itself, and what one move makes of it."""
        moved = [order]
        for place, (row, segments) in enumerate(order):
            moved += [
                (*order[:place], (row, number), *order[place + 1 :])
                for number in (segments - 1, segments + 1)
                if 1 <= number <= self._work_and_limit(row)[1]
            ]
        pairs = itertools.combinations(range(len(order)), 2)
        for one, other in itertools.islice(pairs, _MAX_SWAPS):
            swapped = list(order)
            swapped[one], swapped[other] = swapped[other], swapped[one]
            moved.append(tuple(swapped))
        return moved

    def _shortest(self, candidates: Sequence[tuple[int, Sequence[_Order]]]) -> list[_Group]:
        """For each group, the order that ends first within the limit of tokens; where there is
        none, the first one, in infinite time."""
        self._cut(
            (group, *each) for group, orders in candidates for each in itertools.chain(*orders)
        )
        times = [
            [self._cuts[group, row, segments].times for row, segments in order]
            for group, orders in candidates
            for order in orders
        ]
        ms_X = self._simulated_ms(candidates, times)
        segments = sum(len(cut.tokens_U) for cuts in times for row in cuts for cut in row)
        self._effort.spend(_operations(self._problem, segments))
        found, first = [], 0
        for _, orders in candidates:
            group = _Group(ms=np.inf, order=orders[0])
            for number in np.argsort(ms_X[first : first + len(orders)], kind="stable").tolist():
                if self._tokens_in_flight(times[first + number]) <= self._most_tokens:
                    group = _Group(ms=float(ms_X[first + number]), order=orders[number])
                    break
            found.append(group)
            first += len(orders)
        return found

    def _simulated_ms(
        self,
        candidates: Sequence[tuple[int, Sequence[_Order]]],
        times: Sequence[Sequence[tuple[Cut, ...]]],
    ) -> np.ndarray:
        """Ms until the last pipeline of each candidate ends."""
        pipelines = [pipeline for rows in times for pipeline in zip(*rows, strict=True)]
        if len(pipelines) == len(times):
            return makespans_ms(pipelines)
        cp_sizes = [
            [[row.count(samples) for samples in row] for row, _ in order]
            for _, orders in candidates
            for order in orders
        ]
        cp_sizes_RM = np.concatenate([np.array(rows).T for rows in cp_sizes])
        firsts = [0, *itertools.accumulate(len(rows[0]) for rows in times[:-1])]
        return np.maximum.reduceat(makespans_ms(pipelines, cp_sizes_RM), firsts)

    def _tokens_in_flight(self, times: Sequence[tuple[Cut, ...]]) -> int:
        """On the first stage of the fullest pipeline. Those that meet keep one order, in which
        a micro-batch of fewer segments leaves out the first."""
        most = [max(len(cut.tokens_U) for cut in row) for row in times]
        return max(
            most_tokens_in_flight(
                [
                    np.pad(cut.tokens_U, (segments - len(cut.tokens_U), 0))
                    for cut, segments in zip(pipeline, most, strict=True)
                ],
                self._problem.job.pipeline_stages,
            )
            for pipeline in zip(*times, strict=True)
        )

    def _cut(self, wanted: Iterable[tuple[int, Row, int]]) -> None:
        """Have rows of groups cut into so many segments, or fewer where those are too short."""
        new = [key for key in dict.fromkeys(wanted) if key not in self._cuts]
        if not new:
            return
        segment_starts_blocks = self._segment_starts_blocks(new)
        rows = [row for _, row, _ in new]
        costs, budgets_LS = self._problem.costs, self._places.budgets_LS
        if self._alone:
            firsts = [self._groups[group].start for group, *_ in new]
            cuts = rank_cuts(costs, budgets_LS, rows, segment_starts_blocks, firsts)
        else:
            groups = [group for group, *_ in new]
            cuts = [
                (cut,) for cut in row_cuts(costs, budgets_LS, rows, segment_starts_blocks, groups)
            ]
        short = []
        for key, times, blocks in zip(new, cuts, segment_starts_blocks, strict=True):
            self._cuts[key] = _RowCut(times=times, segment_starts_blocks=blocks)
            if self._is_short(key[1], times):
                most = max(len(cut.tokens_U) for cut in times)
                short.append((key, (*key[:2], most - 1)))
        self._cut(fewer for _, fewer in short)
        for key, fewer in short:
            self._cuts[key] = self._cuts[fewer]

    def _is_short(self, row: Row, times: Sequence[Cut]) -> bool:
        """Whether a segment has too few tokens, or fewer blocks than ranks."""
        for number, cut in enumerate(times):
            cp_size = row.count(row[number])
            if len(cut.tokens_U) == 1:
                continue
            if cut.tokens_U.min() * cp_size < self._settings.segment_tokens:
                return True
            end = sum(self._blocks_of[sample] for sample in row[number])
            if cp_size > 1 and np.diff(cut.segment_starts_blocks, append=end).min() < cp_size:
                return True
        return False

    def _segment_starts_blocks(
        self, keys: Sequence[tuple[int, Row, int]]
    ) -> list[tuple[tuple[int, ...], ...]]:
        """Where segments begin, by member. In lockstep, places may serve for fewer segments of one
        member than of another; then each member is cut into pieces of equally many blocks."""
        found = iter(
            self._places.segment_starts_blocks(
                [samples for _, row, _ in keys for samples in row],
                [each for _, row, segments in keys for each in self._segments(row, segments)],
            )
        )
        segment_starts_blocks = []
        for _, row, segments in keys:
            blocks = tuple(itertools.islice(found, len(row)))
            if not self._alone and len(set(map(len, blocks))) > 1:
                ends = [sum(self._blocks_of[sample] for sample in samples) for samples in row]
                blocks = tuple(
                    tuple(end * segment // segments for segment in range(segments)) for end in ends
                )
            segment_starts_blocks.append(blocks)
        return segment_starts_blocks

    def _trade(self, found: list[_Group]) -> None:
        """Exchange one sample of the slowest rank for one of another, in place, if it helps."""
        by_ms = sorted(range(len(found)), key=lambda number: (found[number].ms, number))
        slowest = by_ms[-1]
        for partner in by_ms[:-1][:_PARTNERS]:
            groups = slowest, partner
            trades = self._trades(*([row for row, _ in found[each].order] for each in groups))
            if not trades:
                continue
            segments = [sum(number for _, number in found[each].order) for each in groups]
            after = self._shortest(
                [
                    (group, [self._in_segments(rows, number)])
                    for trade in trades
                    for group, rows, number in zip(groups, trade, segments, strict=True)
                ]
            )
            one, other = min(
                itertools.batched(after, 2), key=lambda pair: max(each.ms for each in pair)
            )
            if rounded_ms(max(one.ms, other.ms)) < rounded_ms(found[slowest].ms):
                found[slowest], found[partner] = one, other
                return

    def _trades(
        self, own: Sequence[Row], others: Sequence[Row]
    ) -> list[tuple[list[Row], list[Row]]]:
        """Both ranks after the trades that bring their work nearest, under the cap of tokens."""
        work_of = self._work_of
        wanted_ms = (sum(map(self._work_ms, own)) - sum(map(self._work_ms, others))) / 2
        pairs = [
            (abs(work_of[give] - work_of[take] - wanted_ms), i, give, j, take)
            for i, (mine,) in enumerate(own)
            for give in mine
            for j, (theirs,) in enumerate(others)
            for take in theirs
            if work_of[give] > work_of[take]
        ]
        found = []
        for _, i, give, j, take in sorted(pairs)[:_TRADES]:
            mine, theirs = _replaced(own[i][0], give, take), _replaced(others[j][0], take, give)
            if max(self._tokens(mine), self._tokens(theirs)) <= self._problem.cap_tokens:
                found.append(
                    (
                        [*own[:i], (mine,), *own[i + 1 :]],
                        [*others[:j], (theirs,), *others[j + 1 :]],
                    )
                )
        return found

    def _arranged(self, found: Sequence[_Group]) -> Arrangement:
        samples: dict[int, tuple[MicroBatch, ...]] = {}
        segment_starts_blocks: dict[int, tuple[tuple[int, ...], ...]] = {}
        cp_sizes: dict[int, list[int]] = {}
        for number, group in enumerate(found):
            rows = [row for row, _ in group.order]
            blocks = [self._cuts[number, *each].segment_starts_blocks for each in group.order]
            for member, rank in enumerate(self._groups[number]):
                samples[rank] = tuple(
                    row[member] if row.index(row[member]) == member else () for row in rows
                )
                segment_starts_blocks[rank] = tuple(of_row[member] for of_row in blocks)
                cp_sizes[rank] = [row.count(row[member]) for row in rows]
        ranks = range(len(samples))
        return Arrangement(
            samples=tuple(samples[rank] for rank in ranks),
            cp_sizes_RM=np.array([cp_sizes[rank] for rank in ranks]),
            segment_starts_blocks=tuple(segment_starts_blocks[rank] for rank in ranks),
        )


def _operations(problem: StepProblem, segments: int) -> int:
    """Operations of so many segments, in those that effort is counted in."""
    return SEGMENT_COST * 2 * problem.job.pipeline_stages * segments


def _slowest(found: Sequence[_Group]) -> tuple[int, float]:
    """The group that ends last, the first of several, and its ms."""
    number = max(range(len(found)), key=lambda number: (found[number].ms, -number))
    return number, found[number].ms


def _replaced(samples: MicroBatch, old: int, new: int) -> MicroBatch:
    return tuple(sorted(new if sample == old else sample for sample in samples))
