# SPDX-License-Identifier: Apache-2.0
"""Searches orders, cuts and places, so that pipelines of segments end early.

A group are the ranks that begin every layer together, or that meet in micro-batches which they
share, or one rank where none waits for another. Its rows are the micro-batches of its members at
one position. The number of segments of a row decides its cuts: pieces of nearly equal ms
(:mod:`..segments`). Ranks that begin every layer together are one pipeline, and all members of a
row have the number. Ranks that meet are a pipeline each: the member with most work has the number,
the others in proportion to their work.

Shape legend: X candidates.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes, rounded_ms
from sparsebalance_megatron.plan.pipeline.orders import tokens_in_flight
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.search.annealing import shaped_orders
from sparsebalance_megatron.plan.search_effort import SEGMENT_COST, SearchEffort
from sparsebalance_megatron.plan.segments import (
    Cut,
    MicroBatch,
    Places,
    Row,
    Starts,
    joined_2UP,
    row_cuts,
)
from sparsebalance_megatron.plan.step_problem import StepProblem

_SHARE_OF_STEP = 0.03
"""Share of a step's time that a search may take, during the step before."""
_SEGMENTS_PER_GROUP = (8, 12, 20, 32, 48)
"""Numbers of segments of a group that are tried first."""
_MAX_SWAPS = 64
"""Pairs of rows of the slowest group that change places in a round."""

_PARTNERS, _TRADES = 3, 4
"""Other ranks, the fastest first, with which the slowest one trades samples, and trades with each,
those first that bring their work nearest."""

_Order = tuple[tuple[Row, int], ...]
"""Rows of a group in order, and the segments of each."""
_Part = tuple[Row, tuple[Starts, ...], int, int]
"""Members of a row in one pipeline, where their segments begin, their first rank and cp_size."""


class _Candidate(NamedTuple):
    """An order of a group, and the ms until its pipelines end: infinite where they hold too many
    tokens."""

    ms: float
    group: int
    order: _Order


class SegmentSearch:
    """Searches placements, orders and cuts at the expected budgets.

    Args:
        problem: of a pipeline of several stages with one chunk each.
        whole: where samples are placed first, in one piece.
        most_tokens: that may be in flight on the first stage of a group.
    """

    def __init__(self, problem: StepProblem, whole: Arrangement, most_tokens: int) -> None:
        self._problem, self._most_tokens = problem, most_tokens
        self._config = problem.plan_settings.config
        self._places = Places(problem.costs, problem.expected_LS, self._config.max_segments)
        self._work_of: list[float] = self._places.work_S.tolist()
        self._share_W = problem.costs.share_W.tolist()
        self._cuts: dict[_Part, Cut] = {}
        self._work_and_tokens = cache(self._most_work_and_tokens)
        self._starts_of = cache(self._cut_by_work)
        self._parts = cache(self._parts_of_pipelines)
        step_ms = rounded_ms(problem.makespans_ms(problem.expected_LS, whole).max())
        self._effort = SearchEffort(problem.search_ms(step_ms, _SHARE_OF_STEP))
        self._waiting = problem.job.lockstep_ranks
        meeting = whole.groups.of_lockstep(self._waiting).meeting
        # Each begins at a multiple of its ranks among those simulated.
        self._groups = [
            range(group.start * self._waiting, group.stop * self._waiting)
            for group in sorted(meeting, key=len, reverse=True)
        ]
        held = whole.by_rank
        self._rows: list[list[Row]] = [
            list(zip(*held[group.start : group.stop], strict=True)) for group in self._groups
        ]

    def best(self) -> tuple[Arrangement, float]:
        """The shortest step that is found, and its ms: infinite where all hold too many tokens."""
        found = self._shortest(list(map(self._starts, range(len(self._groups)))))
        while self._effort.left:
            slowest = _slowest(found)
            found[slowest.group] = self._shortest([self._moved(slowest)])[0]
            if max(map(len, self._groups)) == 1:
                self._trade(found)
            if not rounded_ms(_slowest(found).ms) < rounded_ms(slowest.ms):
                break
        return self._arranged(found), _slowest(found).ms

    def _most_work_and_tokens(self, row: Row) -> tuple[float, int]:
        """Ms of the member that has most work, and tokens of the one that has most."""
        tokens_of = self._problem.lengths_tokens
        most_tokens = max(sum(tokens_of[sample] for sample in samples) for samples in row)
        return max(self._work_ms(row, samples) for samples in row), most_tokens

    def _limit(self, row: Row) -> int:
        """Segments that any member of a row has enough tokens for."""
        enough = self._work_and_tokens(row)[1] // self._config.segment_tokens
        return max(1, min(self._config.max_segments, enough))

    def _work_ms(self, row: Row, samples: MicroBatch) -> float:
        """Ms of a member's share."""
        work_ms = sum(self._work_of[sample] for sample in samples)
        return self._share_W[row.count(samples)] * work_ms

    def _starts(self, group: int) -> list[_Candidate]:
        """The rows of a group as they are in one piece, and with least work at both ends in each
        number of segments. Half the effort may go to further orders: most work at both ends, as
        they are, work falling, work rising."""
        rows = self._rows[group]
        by_row = sorted(rows)
        ms_1M = np.array([[self._work_and_tokens(row)[0] for row in by_row]])
        up, down, *ends = ([by_row[m] for m in order_M] for order_M in shaped_orders(ms_1M)[0])
        pipelines = sum(map(len, self._groups)) // self._waiting
        segments = pipelines * sum(_SEGMENTS_PER_GROUP) // len(_SEGMENTS_PER_GROUP)
        affordable = self._effort.affordable(2 * self._operations(segments))
        most = max(len(_SEGMENTS_PER_GROUP) + 1, affordable)
        starts = {tuple((row, 1) for row in rows): None}
        for order, number in itertools.product((*ends, rows, down, up), _SEGMENTS_PER_GROUP):
            if len(starts) == most:
                break
            starts[self._in_segments(order, number)] = None
        return [_Candidate(np.inf, group, order) for order in starts]

    def _in_segments(self, order: Sequence[Row], segments: int) -> _Order:
        """Rows with their shares of the segments of a group, by work."""
        work_ms = np.array([self._work_and_tokens(row)[0] for row in order])
        limits = list(map(self._limit, order))
        numbers = np.rint(segments / work_ms.sum() * work_ms).clip(1, limits)
        return tuple(zip(order, numbers.astype(np.int64).tolist(), strict=True))

    def _moved(self, candidate: _Candidate) -> list[_Candidate]:
        """The candidate itself, and what one move makes of it."""
        order = candidate.order
        moved = [order]
        for place, (row, segments) in enumerate(order):
            moved += [
                (*order[:place], (row, number), *order[place + 1 :])
                for number in (segments - 1, segments + 1)
                if 1 <= number <= self._limit(row)
            ]
        pairs = itertools.combinations(range(len(order)), 2)
        for one, other in itertools.islice(pairs, _MAX_SWAPS):
            swapped = list(order)
            swapped[one], swapped[other] = swapped[other], swapped[one]
            moved.append(tuple(swapped))
        return [candidate._replace(order=each) for each in moved]

    def _shortest(self, candidates: Sequence[Sequence[_Candidate]]) -> list[_Candidate]:
        """The candidate of every group that ends first within the limit of tokens; where there is
        none, the first one, in infinite time."""
        ended = self._simulated(list(itertools.chain.from_iterable(candidates)))
        found = []
        for of_group in candidates:
            best = of_group[0]._replace(ms=np.inf)
            for candidate, (ms, tokens) in zip(of_group, ended, strict=False):
                if tokens <= self._most_tokens and ms < best.ms:
                    best = candidate._replace(ms=ms)
            found.append(best)
        return found

    def _simulated(self, candidates: Sequence[_Candidate]) -> Iterator[tuple[float, int]]:
        """Ms until the last pipeline of each candidate ends, and the most tokens in flight on the
        first stage of one."""
        cuts = self._cut(candidates)
        pipelines = [pipeline for rows in cuts for pipeline in zip(*rows, strict=True)]
        segments_RM = [[len(cut.tokens_U) for cut in pipeline] for pipeline in pipelines]
        self._effort.spend(self._operations(sum(map(sum, segments_RM))))
        cp_sizes_RM = None
        if len(pipelines) > len(cuts):
            orders = [[list(map(row.count, row)) for row, _ in each.order] for each in candidates]
            cp_sizes_RM = np.concatenate([np.array(rows).T for rows in orders])
        every_cut = list(itertools.chain.from_iterable(pipelines))
        times = OperationTimes.of_segments(segments_RM, joined_2UP(every_cut), cp_sizes_RM)
        order, ms_R = times.graph.order, makespans_ms(times)
        held_O = tokens_in_flight(order, np.concatenate([cut.tokens_U for cut in every_cut]))[0]
        tokens_R = np.maximum.reduceat(held_O, 2 * order.first_R)
        firsts = [0, *itertools.accumulate(len(rows[0]) for rows in cuts[:-1])]
        ms, tokens = (np.maximum.reduceat(each_R, firsts).tolist() for each_R in (ms_R, tokens_R))
        return zip(ms, tokens, strict=True)

    def _operations(self, segments: int) -> int:
        """Operations of so many segments, in those that effort is counted in."""
        return SEGMENT_COST * 2 * self._problem.job.pipeline_stages * segments

    def _cut(self, candidates: Sequence[_Candidate]) -> list[list[tuple[Cut, ...]]]:
        """What the rows of candidates take in each pipeline of their group."""
        wanted = [[self._parts(group, *each) for each in order] for _, group, order in candidates]
        every_part = itertools.chain.from_iterable(itertools.chain.from_iterable(wanted))
        new = [part for part in dict.fromkeys(every_part) if part not in self._cuts]
        if new:
            costs, budgets_LS = self._problem.costs, self._problem.expected_LS
            cuts = row_cuts(costs, budgets_LS, *zip(*new, strict=True))
            self._cuts.update(zip(new, cuts, strict=True))
        return [
            [tuple(map(self._cuts.__getitem__, parts)) for parts in of_order] for of_order in wanted
        ]

    def _parts_of_pipelines(self, group: int, row: Row, segments: int) -> list[_Part]:
        """The part of a row in each pipeline; of a micro-batch that pipelines share, the first."""
        starts, parts = self._starts_of(row, segments), []
        for members in itertools.batched(row, self._waiting):
            first = row.index(members[0])
            starts_here = starts[first : first + len(members)]
            rank = self._groups[group].start + first
            parts.append((members, starts_here, rank, row.count(members[0])))
        return parts

    def _cut_by_work(self, row: Row, segments: int) -> tuple[Starts, ...]:
        """Where segments begin, by member; in lockstep all have as many."""
        least, (most_ms, _) = self._config.segment_tokens, self._work_and_tokens(row)
        found: list[Starts] = []
        for members in itertools.batched(row, self._waiting):
            work_ms = max(self._work_ms(row, samples) for samples in members)
            number = max(1, round(segments * work_ms / most_ms))
            found += self._places.starts(members, number, least, row.count(members[0]))
        return tuple(found)

    def _trade(self, found: list[_Candidate]) -> None:
        """Exchange one sample of the slowest rank for one of another, in place, if it helps."""
        *others, slowest = sorted(found, key=lambda each: (each.ms, each.group))
        trades = [pair for other in others[:_PARTNERS] for pair in self._trades(slowest, other)]
        if not trades:
            return
        after = self._shortest([[each] for pair in trades for each in pair])
        best = min(itertools.batched(after, 2), key=lambda pair: max(each.ms for each in pair))
        if rounded_ms(max(each.ms for each in best)) < rounded_ms(slowest.ms):
            for each in best:
                found[each.group] = each

    def _trades(self, slowest: _Candidate, other: _Candidate) -> list[list[_Candidate]]:
        """Both ranks after the trades that bring their work nearest, under the cap of tokens."""
        work_of = self._work_of
        own, theirs = (
            [sample for (samples,), _ in each.order for sample in samples]
            for each in (slowest, other)
        )
        own_ms, their_ms = (sum(work_of[sample] for sample in held) for held in (own, theirs))
        pairs = sorted(
            (abs(work_of[give] - work_of[take] - (own_ms - their_ms) / 2), give, take)
            for give, take in itertools.product(own, theirs)
            if work_of[give] > work_of[take]
        )
        found = []
        for _, give, take in pairs[:_TRADES]:
            instead = {give: take, take: give}
            trade = []
            for each in (slowest, other):
                rows: list[Row] = [
                    (tuple(sorted(instead.get(sample, sample) for sample in samples)),)
                    for (samples,), _ in each.order
                ]
                segments = sum(number for _, number in each.order)
                trade.append(each._replace(order=self._in_segments(rows, segments)))
            tokens = [self._work_and_tokens(row)[1] for each in trade for row, _ in each.order]
            if max(tokens) <= self._problem.cap_tokens:
                found.append(trade)
        return found

    def _arranged(self, found: Sequence[_Candidate]) -> Arrangement:
        """Groups in the order of their ranks."""
        samples: list[tuple[MicroBatch, ...]] = []
        starts: list[tuple[Starts, ...]] = []
        cp_sizes: list[list[int]] = []
        for candidate in sorted(found, key=lambda each: self._groups[each.group].start):
            starts += zip(*itertools.starmap(self._starts_of, candidate.order), strict=True)
            rows = [row for row, _ in candidate.order]
            for member in range(len(rows[0])):
                cp_sizes.append([row.count(row[member]) for row in rows])
                is_first = [row.index(row[member]) == member for row in rows]
                samples.append(
                    tuple(
                        row[member] if first else ()
                        for row, first in zip(rows, is_first, strict=True)
                    )
                )
        return Arrangement(
            samples=tuple(samples),
            cp_sizes_RM=np.array(cp_sizes),
            segment_starts_blocks=tuple(starts),
        )


def _slowest(found: Sequence[_Candidate]) -> _Candidate:
    """The group that ends last, the first of several."""
    return max(found, key=lambda each: (each.ms, -each.group))
