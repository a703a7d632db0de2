# SPDX-License-Identifier: Apache-2.0
"""Searches the places and cp_sizes of all micro-batches of a step.

Pipelines of two rank groups (:mod:`.moves`) never wait for one another. A lockstep group is
simulated as one pipeline, whose operations take what the slowest member takes, and besides an equal
share of the group's experts. In every round the rank groups are put into pairs at random, so that
all of them improve, not only the slowest: what others save is room for it. Moves are drawn within
every pair, the pipelines of all pairs are simulated at once after each move, and each pair takes
its best one.

Shape legend: F forward, then backward of every chunk, B rank groups, E pairs of them, I moves or
orders, Y micro-batches that a move makes.
"""

import itertools

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.search.moves import Drawing, Kind, Moves, Rules
from sparsebalance_megatron.plan.search.state import Contents, Numbers, State
from sparsebalance_megatron.plan.search_effort import WAITING_COST, SearchEffort
from sparsebalance_megatron.plan.step_costs import StepCosts

_DRAWN = 96
"""Moves per round and pair of ranks that no others wait for."""
_ROUND_OPERATIONS = 100_000
"""Cost of a round beside its simulation: many calls of numpy on short arrays."""
_FIRST_TOLERANCE, _LAST_TOLERANCE = 2e-3, 6e-5
"""Share by which a move may lengthen its pair, at the beginning and at the end of a search."""
_WEIGHT_OF_MEAN = 0.3
"""Weight of a pair's mean makespan beside the largest."""
_ALL_ORDERS_UNTIL = 4
"""Positions of which all orders are tried first."""
_GAIN = 1e-9
_EXCHANGES = 8
"""Moves drawn at most for every exchange of two samples between two ranks, where none share or
wait."""
_LEAST_ROUNDS = 32
"""Rounds that a search of few samples may take all the same."""
_OPERATIONS_AT_ONCE = 1 << 17
"""Operations whose times fit a core's cache; the simulator is several times as fast there."""
_MEMBER_TIMES_PER_OPERATION = 8
"""Times of lockstep groups' members that are joined as fast as one operation is simulated."""
_IDLE_ROUNDS = 400
"""Rounds without a gain after which the search ends; of fewer samples, a round for each."""


class Annealing:
    """Changes places, order and cp_sizes.

    Args:
        work_2SX: ms of every sample in the columns of the costs, on a rank by itself.
    """

    def __init__(
        self,
        start: Arrangement,
        costs: StepCosts,
        work_2SX: np.ndarray,
        rules: Rules,
        effort: SearchEffort,
    ) -> None:
        self.job, self.rules, self.effort = costs.job, rules, effort
        self.contents = Contents(costs, work_2SX, shared=rules.max_cp_size > 1)
        self.state = State(start, self.contents)
        self.numbers = Numbers()
        self.samples = work_2SX.shape[1]
        self.drawn = _DRAWN * rules.lockstep_ranks
        self.operation_cost = WAITING_COST if rules.max_cp_size > 1 else 1
        self.groups = self.job.data_parallel_size // rules.group_ranks
        self.ms_R = self._simulate(self.state.ms_RMF[None], self.state.cp_sizes_RM[None])[0]
        if self.job.pipeline_stages > 1 and rules.max_cp_size == 1:
            self._order()
        self.drawing = Drawing(self.state, work_2SX.sum(axis=(0, 2)), rules, self.numbers)

    def best(self, enough_ms: float = 0.0, spends_all: bool = False) -> Arrangement:
        """The arrangement with the shortest step of all rounds; never longer than at the start.

        Args:
            enough_ms: a step that takes so long or less ends the search.
            spends_all: enough moves do not end the search.
        """
        best, idle = (self.ms_R.max(), self.ms_R.sum()), 0
        place_S, cp_size_J = self.state.place_S.copy(), self.state.cp_size_J.copy()
        most = min(_IDLE_ROUNDS, self.samples)
        if self.rules.max_cp_size == 1:
            # Rows of equal height leave little to find, and a round draws many moves.
            most = most * _DRAWN // self.drawn
        pipelines = max(2, self.groups) * self.rules.group_ranks // self.rules.lockstep_ranks
        each = (
            self.drawn * pipelines * self.state.ms_RMF[0].size * self.operation_cost
            + _ROUND_OPERATIONS
        )
        if self.rules.group_ranks == 1 and not spends_all:
            tried = _EXCHANGES * self.samples**2 // (self.groups * self.drawn)
            self.effort.limit(max(_LEAST_ROUNDS, tried) * each)
        while idle < most and best[0] > enough_ms and self.effort.affordable(each):
            self._round()
            found, idle = (self.ms_R.max(), self.ms_R.sum()), idle + 1
            if found < best:
                best, idle = found, 0
                place_S, cp_size_J = self.state.place_S.copy(), self.state.cp_size_J.copy()
        return Arrangement.of_places(place_S, cp_size_J.reshape(self.state.cp_sizes_RM.shape))

    def _simulate(self, ms_IWMF: np.ndarray, cp_sizes_IWM: np.ndarray) -> np.ndarray:
        """[I, W] makespans of the ranks of pairs."""
        moves, ranks, positions, _ = ms_IWMF.shape
        members = self.rules.lockstep_ranks
        if members > 1:
            self.effort.spend(ms_IWMF.size // _MEMBER_TIMES_PER_OPERATION)
            ms_IWMF = self.contents.joined(ms_IWMF.reshape(moves, -1, members, *ms_IWMF.shape[2:]))
            cp_sizes_IWM = np.maximum(cp_sizes_IWM, members)[:, ::members] // members
        self.effort.spend(self.operation_cost * ms_IWMF.size)
        at_once = max(1, _OPERATIONS_AT_ONCE // ms_IWMF[0].size)
        ends_R = []
        for first in range(0, moves, at_once):
            some = slice(first, first + at_once)
            ms_FMR = ms_IWMF[some].reshape(-1, *ms_IWMF.shape[2:]).T
            times = OperationTimes(
                graph=self.job.graph,
                ms_OR=np.ascontiguousarray(ms_FMR).reshape(-1, ms_FMR.shape[2]),
                cp_sizes_RM=cp_sizes_IWM[some].reshape(-1, positions),
            )
            ends_R.append(makespans_ms(times))
        return np.repeat(np.concatenate(ends_R), members).reshape(moves, ranks)

    def _order(self) -> None:
        """Give every rank group the best of its first orders, where none share."""
        state, groups = self.state, self.groups
        ms_BWMF = state.ms_RMF.reshape(groups, -1, *state.ms_RMF.shape[1:])
        order_BIM = first_orders(ms_BWMF.max(axis=1).sum(axis=2))
        ms_BIWMF = np.take_along_axis(ms_BWMF[:, None], order_BIM[:, :, None, :, None], axis=3)
        ms_IWMF = ms_BIWMF.reshape(-1, *ms_BIWMF.shape[2:])
        alone_IWM = np.ones(ms_IWMF.shape[:3], dtype=np.int64)
        ms_BIW = self._simulate(ms_IWMF, alone_IWM).reshape(ms_BIWMF.shape[:3])
        best_B = ms_BIW.max(axis=2).argmin(axis=1)
        every_B = np.arange(groups)
        ms_BW = self.ms_R.reshape(groups, -1)
        better_B = ms_BIW[every_B, best_B].max(axis=1) < ms_BW.max(axis=1) * (1 - _GAIN)
        order_BM = np.where(
            better_B[:, None], order_BIM[every_B, best_B], np.arange(state.positions)
        )
        rank_S, position_S = np.divmod(state.place_S, state.positions)
        position_S = np.argsort(order_BM, axis=1)[rank_S // self.rules.group_ranks, position_S]
        place_S = rank_S * state.positions + position_S
        self.state = State(Arrangement.of_places(place_S, state.cp_sizes_RM), self.contents)
        self.ms_R = np.where(better_B[:, None], ms_BIW[every_B, best_B], ms_BW).reshape(-1)

    def _round(self) -> None:
        """Take the best of the moves drawn in every pair, where it is good enough."""
        self.effort.spend(_ROUND_OPERATIONS)
        pairs = max(1, self.groups // 2)
        order_E = np.argsort(self.numbers.draw(self.groups))
        # A single group is a pair with itself; of an odd number one waits for the next round.
        groups_E2 = order_E[np.arange(2 * pairs) % self.groups].reshape(pairs, 2)
        moves = self.drawing.draw(groups_E2, self.drawn)
        if not len(moves.pair_I):
            return
        members = self.rules.group_ranks
        ranks_EW = (groups_E2[..., None] * members + np.arange(members)).reshape(pairs, -1)
        if self.groups == 1:
            ranks_EW = ranks_EW[:, :members]
        made_IYF = self.contents.ms(
            moves.has_IYX, moves.cp_size_IY, moves.place_IY // self.state.positions
        )
        ms_IWMF, cp_sizes_IWM = self._after(moves, ranks_EW, made_IYF)
        ms_IW = self._simulate(ms_IWMF, cp_sizes_IWM)
        score_I = _score(ms_IW)
        limit_E = _score(self.ms_R[ranks_EW]) * (1.0 + self._tolerance())
        order_I = np.lexsort((score_I, moves.pair_I))
        best_E = order_I[np.unique(moves.pair_I[order_I], return_index=True)[1]]
        for move in best_E[score_I[best_E] < limit_E[moves.pair_I[best_E]]].tolist():
            self.ms_R[ranks_EW[moves.pair_I[move]]] = ms_IW[move]
            self.drawing.apply(moves, move, made_IYF)

    def _after(
        self, moves: Moves, ranks_EW: np.ndarray, made_IYF: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Times and cp_sizes of the ranks of every move's pair after it."""
        state, members = self.state, self.rules.group_ranks
        local_R = np.zeros(state.ranks, dtype=np.int64)
        local_R[ranks_EW] = np.arange(ranks_EW.shape[1])
        ranks_IW = ranks_EW[moves.pair_I]
        ms_IWMF = state.ms_RMF[ranks_IW]
        cp_sizes_IWM = np.ones(ms_IWMF.shape[:3], dtype=np.int64)
        changed = [(ms_IWMF, made_IYF)]
        if self.rules.max_cp_size > 1:
            cp_sizes_IWM = state.cp_sizes_RM[ranks_IW]
            changed.append((cp_sizes_IWM, moves.cp_size_IY))
        rank_I2, position_I2 = np.divmod(moves.from_I2, state.positions)
        group_I2 = rank_I2 // members
        together_I = (moves.kind_I == Kind.POSITIONS) & (group_I2[:, 0] == group_I2[:, 1])
        cp_size_IY = np.where(together_I[:, None], 0, moves.cp_size_IY)
        for offset in range(int(cp_size_IY.max(initial=0))):
            i, y = np.nonzero(cp_size_IY > offset)
            rank, position = np.divmod(moves.place_IY[i, y], state.positions)
            w = local_R[rank] + offset
            for values_IWM, made_IY in changed:
                values_IWM[i, w, position] = made_IY[i, y]
        exchange = np.flatnonzero(together_I)
        i = exchange[:, None, None]
        w = local_R[group_I2[exchange, :1] * members + np.arange(members)][..., None]
        here, there = position_I2[exchange, None], position_I2[exchange, None, ::-1]
        for values_IWM, _ in changed:
            values_IWM[i, w, here] = values_IWM[i, w, there]
        return ms_IWMF, cp_sizes_IWM

    def _tolerance(self) -> float:
        return float(_LAST_TOLERANCE * (_FIRST_TOLERANCE / _LAST_TOLERANCE) ** self.effort.left)


def _score(ms_IW: np.ndarray) -> np.ndarray:
    return np.asarray(ms_IW.max(axis=1) + _WEIGHT_OF_MEAN * ms_IW.mean(axis=1))


def first_orders(ms_BM: np.ndarray) -> np.ndarray:
    """[B, I, M] orders of micro-batches: all where they are few, else :func:`shaped_orders`."""
    groups, positions = ms_BM.shape
    if positions > _ALL_ORDERS_UNTIL:
        return shaped_orders(ms_BM)
    every_IM = np.array(list(itertools.permutations(range(positions))))
    return np.broadcast_to(every_IM, (groups, *every_IM.shape))


def shaped_orders(ms_BM: np.ndarray) -> np.ndarray:
    """[B, 4, M] orders: rising, falling, small at both ends and large at both ends."""
    rising_BM = np.argsort(ms_BM, axis=1, kind="stable")
    falling_BM = rising_BM[:, ::-1]
    ends = [
        np.concatenate([order_BM[:, ::2], order_BM[:, 1::2][:, ::-1]], axis=1)
        for order_BM in (rising_BM, falling_BM)
    ]
    return np.stack([rising_BM, falling_BM, *ends], axis=1)
