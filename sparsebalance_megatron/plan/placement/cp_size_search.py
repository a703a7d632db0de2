# SPDX-License-Identifier: Apache-2.0
"""Local search over placements whose micro-batches differ in cp_size.

An island is as many neighbouring ranks as the widest micro-batch may have: its pipelines wait for
one another, those of two islands never do. Every round draws moves in the slowest island, or in it
and another one, simulates them at once and takes the best, if it is better or hardly worse; what
counts as hardly falls to nothing. What is simulated is limited by a :class:`.SearchEffort`.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches,
C = P x V chunks, E islands, W ranks looked at, X candidates, Y micro-batches that a move makes.
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.placement.cp_size_moves import (
    Kind,
    Moves,
    Numbers,
    Rules,
    draw_moves,
)
from sparsebalance_megatron.plan.placement.shared_micro_batches import (
    Contents,
    MicroBatchTable,
    SharedMicroBatches,
)
from sparsebalance_megatron.plan.search_effort import SearchEffort
from sparsebalance_megatron.plan.step_costs import StepCosts

_DRAWN = 64
"""Moves per round. Fewer find better placements per simulated move; more cost less each."""
_OPERATIONS_EACH = 2
"""Cost of a simulated operation where ranks wait for one another, over one where none wait."""
_ROUND_OPERATIONS = 200_000
"""Cost of a round beside its simulation: drawing moves, many calls of numpy on short arrays."""
_FIRST_TOLERANCE = 1e-3
_LAST_TOLERANCE = 6e-5
"""Share by which a round may lengthen the island, at the beginning and at the end of a search."""
_WEIGHT_OF_MEAN = 0.05
"""Weight of the ranks' mean makespan beside the largest: it prefers moves that relieve ranks."""
_IDLE_ROUNDS = 200
_IDLE_ROUNDS_PER_SAMPLE = 4
"""Rounds without a gain after which the search ends, whichever is fewer."""
_GAIN = 1e-9


def improve_cp_sizes(
    start: Arrangement,
    costs: StepCosts,
    sample_2SC: np.ndarray,
    *,
    rules: Rules,
    plan_ms: float,
    enough_ms: float = 0.0,
) -> Arrangement:
    """Change cp_sizes, places and order while ``plan_ms`` buys effort; never a longer step.

    A placement whose step takes ``enough_ms`` or less ends the search.
    """
    search = _CpSizeSearch(start, costs, sample_2SC, rules, SearchEffort(plan_ms))
    return search.best(enough_ms)


class _CpSizeSearch:
    def __init__(
        self,
        start: Arrangement,
        costs: StepCosts,
        sample_2SC: np.ndarray,
        rules: Rules,
        effort: SearchEffort,
    ) -> None:
        self.state, self.rules, self.effort = SharedMicroBatches(start), rules, effort
        self.job, self.contents = costs.job, Contents(costs, sample_2SC)
        self.weights_S = sample_2SC.sum(axis=(0, 2))
        self.numbers = Numbers()
        cp_size, ranks = rules.max_cp_size, costs.job.data_parallel_size
        self.islands = [range(first, first + cp_size) for first in range(0, ranks, cp_size)]
        table = MicroBatchTable(self.state, self.islands, self.contents)
        self.times_RMF = self._times(table)
        shape = (len(self.islands), cp_size)
        self.ms_EW = self._simulate(self.times_RMF[None], self.state.cp_sizes_RM[None]).reshape(
            shape
        )
        self.best_score, self.best_ms = self._score(self.ms_EW.reshape(1, -1))[0], self.ms_EW.max()
        self.left_behind: SharedMicroBatches | None = None
        """The best state, once a worse one was gone to: copies of large jobs take long."""

    def _times(self, table: MicroBatchTable) -> np.ndarray:
        """Ms of every rank and position of the whole job, [R, M, 2 C]."""
        ms_JF = self.contents.ms(table.contents_JF, table.cp_size_J, table.rank_J)
        times_RMF = np.empty((*self.state.cp_sizes_RM.shape, ms_JF.shape[1]))
        for offset in range(int(table.cp_size_J.max())):
            reached = np.flatnonzero(table.cp_size_J > offset)
            times_RMF[table.rank_J[reached] + offset, table.position_J[reached]] = ms_JF[reached]
        return times_RMF

    def _simulate(self, times_XWMF: np.ndarray, cp_sizes_XWM: np.ndarray) -> np.ndarray:
        """[X, W] makespans."""
        self.effort.spend(_OPERATIONS_EACH * times_XWMF.size + _ROUND_OPERATIONS)
        candidates, ranks, positions, _ = times_XWMF.shape
        times_FMX = times_XWMF.reshape(candidates * ranks, positions, -1).T
        times = OperationTimes(
            graph=self.job.graph,
            ms_OR=np.ascontiguousarray(times_FMX).reshape(-1, candidates * ranks),
            cp_sizes_RM=cp_sizes_XWM.reshape(-1, positions),
        )
        return makespans_ms(times).reshape(candidates, ranks)

    def best(self, enough_ms: float) -> Arrangement:
        """The best placement found."""
        idle, most = 0, min(_IDLE_ROUNDS, _IDLE_ROUNDS_PER_SAMPLE * len(self.weights_S))
        while idle < most and self.best_ms > enough_ms:
            before = self.best_score
            if not self._round(turn=idle):
                break
            idle = 0 if self.best_score < before else idle + 1
        return (self.left_behind or self.state).arranged()

    @staticmethod
    def _score(ms_XW: np.ndarray) -> np.ndarray:
        return np.asarray(ms_XW.max(axis=1) + _WEIGHT_OF_MEAN * ms_XW.mean(axis=1))

    def _round(self, *, turn: int) -> bool:
        """Draw moves and take the best if it is good enough; False once effort is spent."""
        order = np.argsort(self.ms_EW.max(axis=1), kind="stable").tolist()
        field = [order[-1]]
        if len(order) > 1 and turn % 2:
            field.append(order[turn // 2 % (len(order) - 1)])
        ranks = np.concatenate([np.array(self.islands[island]) for island in field])
        each = _OPERATIONS_EACH * len(ranks) * self.times_RMF[0].size
        count = min(_DRAWN, self.effort.affordable(each))
        if count < 1:
            return False
        table = MicroBatchTable(
            self.state, [self.islands[island] for island in field], self.contents
        )
        moves = draw_moves(table, self.contents, self.weights_S, self.rules, self.numbers, count)
        if not len(moves.kind_X):
            return True
        times_XWMF, cp_sizes_XWM = self._after(moves, table, ranks)
        ms_XW = self._simulate(times_XWMF, cp_sizes_XWM)
        score_X = self._score(ms_XW)
        chosen = int(score_X.argmin())
        now = self._score(self.ms_EW[field].reshape(1, -1))[0]
        if score_X[chosen] < now * (1.0 + self._tolerance()):
            self.ms_EW[field] = ms_XW[chosen].reshape(len(field), -1)
            score = self._score(self.ms_EW.reshape(1, -1))[0]
            if score < self.best_score * (1 - _GAIN):
                self.best_score, self.best_ms = score, self.ms_EW.max()
                self.left_behind = None
            elif self.left_behind is None:
                self.left_behind = self.state.copy()
            self._apply(moves, chosen, table)
            self.times_RMF[ranks] = times_XWMF[chosen]
        return True

    def _tolerance(self) -> float:
        return float(_LAST_TOLERANCE * (_FIRST_TOLERANCE / _LAST_TOLERANCE) ** self.effort.left)

    def _after(
        self, moves: Moves, table: MicroBatchTable, ranks: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Times [X, W, M, 2 C] and cp_sizes [X, W, M] of the ranks after every move."""
        candidates = len(moves.kind_X)
        times_XWMF = np.repeat(self.times_RMF[None, ranks], candidates, axis=0)
        cp_sizes_XWM = np.repeat(self.state.cp_sizes_RM[None, ranks], candidates, axis=0)
        local_R = np.zeros(len(self.times_RMF), dtype=np.int64)
        local_R[ranks] = np.arange(len(ranks))
        made_XYF = self.contents.ms(moves.contents_XYF, moves.cp_size_XY, moves.rank_XY)
        for offset in range(int(moves.cp_size_XY.max(initial=0))):
            x, y = np.nonzero(moves.cp_size_XY > offset)
            w, m = local_R[moves.rank_XY[x, y]] + offset, moves.position_XY[x, y]
            times_XWMF[x, w, m] = made_XYF[x, y]
            cp_sizes_XWM[x, w, m] = moves.cp_size_XY[x, y]
        cp_size = self.rules.max_cp_size
        for move in np.flatnonzero(moves.kind_X == Kind.POSITIONS).tolist():
            a, b = moves.micro_batch_2X[:, move]
            first = local_R[table.rank_J[a]] // cp_size * cp_size
            part, pair = slice(first, first + cp_size), table.position_J[[a, b]]
            times_XWMF[move, part, pair] = times_XWMF[move, part, pair[::-1]]
            cp_sizes_XWM[move, part, pair] = cp_sizes_XWM[move, part, pair[::-1]]
        return times_XWMF, cp_sizes_XWM

    def _apply(self, moves: Moves, move: int, table: MicroBatchTable) -> None:
        micro_batches = moves.micro_batch_2X[:, move]
        if moves.kind_X[move] == Kind.POSITIONS:
            one, other = table.position_J[micro_batches].tolist()
            island = int(table.rank_J[micro_batches[0]]) // self.rules.max_cp_size
            self.state.swap_positions(self.islands[island], one, other)
            return
        made = moves.made(move, table, self.weights_S)
        places = np.stack([moves.rank_XY[move], moves.position_XY[move], moves.cp_size_XY[move]])
        for rank, position, cp_size in places.T.tolist():
            for begun in range(rank, rank + cp_size):
                self.state.members.pop((begun, position), None)
        for (rank, position, cp_size), samples in zip(places.T.tolist(), made, strict=False):
            self.state.put(rank, position, cp_size, samples)
