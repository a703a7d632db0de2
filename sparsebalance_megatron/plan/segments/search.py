# SPDX-License-Identifier: Apache-2.0
"""Searches placements and cuts, so that pipelines of segments end early.

Samples are balanced over ranks by predicted ms first. How many segments a rank has in all decides
all cuts: micro-batches are cut into pieces of nearly equal ms. A few such numbers are tried with a
few orders of every rank; then micro-batches of the slowest rank change places, and samples are
traded with other ranks. Every search is limited by a count, so that all ranks find the same.

Shape legend: S samples of a global batch, L layers, R data-parallel ranks, P pipeline stages, X
candidates, O orders.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.metrics import rounded_ms
from sparsebalance_megatron.plan.pipeline.orders import most_tokens_in_flight
from sparsebalance_megatron.plan.segments.cuts import Cut, MicroBatch, Places, makespans_ms
from sparsebalance_megatron.plan.step_problem import StepProblem

_SEGMENTS_PER_RANK = (12, 20, 32, 48)
"""Numbers of segments of a rank that are tried."""
_MAX_ROUNDS = 8
"""Rounds of swaps and trades after the best of these is known."""
_MAX_SWAPS = 64
"""Orders of the slowest rank that are tried in a round."""
_PARTNERS = 3
"""Other ranks, the fastest first, with which the slowest one trades samples."""
_TRADES = 6
"""Trades with each of them, those first that come nearest to equal work."""
_GAIN = 1.0 - 1e-9
"""A round counts where the step becomes shorter than this share of it."""

_ORDERS = 4
"""Orders of a rank's micro-batches that are tried together."""

_Rank = tuple[float, list[MicroBatch]]
"""Ms of a rank, and its micro-batches in order."""


class SegmentSearch:
    """Searches placements, orders and cuts at given budgets.

    Args:
        problem: of a pipeline of several stages with one chunk each, whose ranks share nothing.
        budgets_LS: to place and cut by.
        most_tokens: that may be in flight on the first stage of any rank.
    """

    def __init__(self, problem: StepProblem, budgets_LS: np.ndarray, most_tokens: int) -> None:
        self._problem, self._most_tokens = problem, most_tokens
        self._places = Places.at(problem.costs, budgets_LS, problem.plan_settings.max_segments)
        self._work_of: list[float] = self._places.work_S.tolist()
        self._total_ms = sum(self._work_of)
        self._cut_by_segment_ms(self._total_ms)

    def _cut_by_segment_ms(self, segment_ms: float) -> None:
        """Have all micro-batches cut into segments of about so much work."""
        self._segment_ms = segment_ms
        self._cut_of: dict[MicroBatch, Cut] = {}

    def best(self, start: Placement) -> tuple[Arrangement, float]:
        """The shortest step that is found from a placement that balances work, and its ms: infinite
        where all hold too many tokens."""
        numbers = range(len(start))
        found = []
        for segments in _SEGMENTS_PER_RANK:
            self._cut_by_segment_ms(self._total_ms / (len(start) * segments))
            ranks = self._best_orders(numbers, start)
            found.append((rounded_ms(max(ms for ms, _ in ranks)), self._segment_ms, ranks))
        _, segment_ms, ranks = min(found, key=lambda each: each[0])
        self._cut_by_segment_ms(segment_ms)
        for _ in range(_MAX_ROUNDS):
            before_ms = max(ms for ms, _ in ranks)
            slowest = max(numbers, key=lambda number: (ranks[number][0], -number))
            ranks[slowest] = self._swapped(slowest, ranks[slowest][1])
            self._trade(ranks)
            if not max(ms for ms, _ in ranks) < before_ms * _GAIN:
                break
        return self._arranged([order for _, order in ranks]), max(ms for ms, _ in ranks)

    def _work_ms(self, samples: MicroBatch) -> float:
        return sum(self._work_of[sample] for sample in samples)

    def _tokens(self, samples: MicroBatch) -> int:
        return sum(self._problem.lengths_tokens[sample] for sample in samples)

    def _cuts(self, orders: Sequence[Sequence[MicroBatch]]) -> list[list[Cut]]:
        """Micro-batches in the number of segments that their share of the work asks for."""
        plan_settings = self._problem.plan_settings
        every = dict.fromkeys(itertools.chain.from_iterable(orders))
        new = [samples for samples in every if samples not in self._cut_of]
        if new:
            segments = [
                max(
                    1,
                    min(
                        round(self._work_ms(samples) / self._segment_ms),
                        plan_settings.max_segments,
                        self._tokens(samples) // plan_settings.segment_tokens,
                    ),
                )
                for samples in new
            ]
            cuts = self._places.cuts(new, segments, plan_settings.segment_tokens)
            self._cut_of.update(zip(new, cuts, strict=True))
        return [[self._cut_of[samples] for samples in order] for order in orders]

    def _best_orders(
        self, numbers: Sequence[int], ranks: Sequence[Sequence[MicroBatch]]
    ) -> list[_Rank]:
        """The best of four orders of each rank: by work rising, falling, least at both ends, most
        at both."""
        orders = []
        for micro_batches in ranks:
            up = sorted(micro_batches, key=lambda samples: (self._work_ms(samples), samples))
            down = up[::-1]
            orders += [up, down, up[::2] + up[1::2][::-1], down[::2] + down[1::2][::-1]]
        found = self._ms(np.repeat(numbers, _ORDERS), orders)
        return [
            self._shortest(found[first : first + _ORDERS])
            for first in range(0, len(found), _ORDERS)
        ]

    def _ms(
        self, numbers: np.ndarray, orders: list[list[MicroBatch]]
    ) -> list[tuple[float, list[MicroBatch], list[Cut]]]:
        """Makespans of ranks with these micro-batches."""
        cuts = self._cuts(orders)
        ms_X = makespans_ms(cuts, self._problem.costs.slowness_RP[numbers])
        return list(zip(ms_X.tolist(), orders, cuts, strict=True))

    def _shortest(self, found: Sequence[tuple[float, list[MicroBatch], list[Cut]]]) -> _Rank:
        """The shortest order within the limit of tokens; where there is none, the first one, in
        infinite time."""
        stages = self._problem.job.pipeline_stages
        for ms, order, cuts in sorted(found, key=lambda each: each[0]):
            held = most_tokens_in_flight([cut.tokens_U for cut in cuts], stages)
            if held <= self._most_tokens:
                return ms, order
        return np.inf, found[0][1]

    def _swapped(self, number: int, order: list[MicroBatch]) -> _Rank:
        """The best order with two micro-batches in each other's place, or the order itself."""
        pairs = itertools.islice(itertools.combinations(range(len(order)), 2), _MAX_SWAPS)
        orders = [order]
        for one, other in pairs:
            swapped = list(order)
            swapped[one], swapped[other] = swapped[other], swapped[one]
            orders.append(swapped)
        return self._shortest(self._ms(np.full(len(orders), number), orders))

    def _trade(self, ranks: list[_Rank]) -> None:
        """Exchange one sample of the slowest rank for one of another, in place, if it helps."""
        by_ms = sorted(range(len(ranks)), key=lambda number: (ranks[number][0], number))
        slowest = by_ms[-1]
        for partner in by_ms[:-1][:_PARTNERS]:
            trades = self._trades(ranks[slowest][1], ranks[partner][1])
            if not trades:
                continue
            after = self._best_orders(
                [slowest, partner] * len(trades), [rank for trade in trades for rank in trade]
            )
            one, other = min(
                itertools.batched(after, 2), key=lambda pair: max(ms for ms, _ in pair)
            )
            if max(one[0], other[0]) < ranks[slowest][0] * _GAIN:
                ranks[slowest], ranks[partner] = one, other
                return

    def _trades(
        self, own: list[MicroBatch], others: list[MicroBatch]
    ) -> list[tuple[list[MicroBatch], list[MicroBatch]]]:
        """Both ranks after the trades that bring their work nearest, under the cap of tokens."""
        work_of = self._work_of
        wanted_ms = (sum(map(self._work_ms, own)) - sum(map(self._work_ms, others))) / 2
        pairs = [
            (abs(work_of[give] - work_of[take] - wanted_ms), i, give, j, take)
            for i, mine in enumerate(own)
            for give in mine
            for j, theirs in enumerate(others)
            for take in theirs
            if work_of[give] > work_of[take]
        ]
        found = []
        for _, i, give, j, take in sorted(pairs)[:_TRADES]:
            mine, theirs = _replaced(own[i], give, take), _replaced(others[j], take, give)
            if max(self._tokens(mine), self._tokens(theirs)) <= self._problem.cap_tokens:
                found.append(
                    ([*own[:i], mine, *own[i + 1 :]], [*others[:j], theirs, *others[j + 1 :]])
                )
        return found

    def _arranged(self, orders: Sequence[Sequence[MicroBatch]]) -> Arrangement:
        placement = tuple(tuple(order) for order in orders)
        return Arrangement(
            samples=placement,
            cp_sizes_RM=Arrangement.of_groups(placement).cp_sizes_RM,
            first_blocks=tuple(
                tuple(cut.first_blocks for cut in cuts) for cuts in self._cuts(orders)
            ),
        )


def _replaced(samples: MicroBatch, old: int, new: int) -> MicroBatch:
    return tuple(sorted(new if sample == old else sample for sample in samples))
