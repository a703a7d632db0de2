# SPDX-License-Identifier: Apache-2.0
"""Searches with random starts, and what must hold of every placement."""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from plan.plan_cases import cost_model, job_shape, placed, random_cp_sizes, random_lengths

from sparsebalance_megatron.cost.exchange import Exchange
from sparsebalance_megatron.cost.model import StageScales
from sparsebalance_megatron.cost.parts import SegmentCost
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.groups import Groups, is_power_of_two
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.search.moves import Drawing, Moves, Rules
from sparsebalance_megatron.plan.search.state import Contents, Numbers, State
from sparsebalance_megatron.plan.step_costs import StepCosts, step_costs

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = st.sampled_from(
    [
        ((4, 4, 2, 1), 1),
        ((3, 2, 1, 1), 1),
        ((4, 4, 2, 1), 2),
        ((8, 2, 1, 1), 4),
        ((4, 4, 2, 2), 4),
        ((2, 3, 4, 1), 2),
        ((4, 1, 1, 1), 2),
        ((6, 2, 2, 1), 2),
    ]
)
"""Ranks, positions, stages and chunks; then how many ranks may share a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Case:
    costs: StepCosts
    sample_2SX: np.ndarray
    rules: Rules
    start: Arrangement

    @property
    def contents(self) -> Contents:
        return Contents(self.costs, self.sample_2SX)

    @property
    def weights_S(self) -> np.ndarray:
        return self.sample_2SX.sum(axis=(0, 2))

    def ms_R(self, where: Arrangement) -> np.ndarray:
        return makespans_ms(self.costs.micro_batch_ms(self.sample_2SX, where))

    def check(self, where: Arrangement) -> None:
        """Every sample once; every micro-batch obeys the rules."""
        flat = [micro_batch for rank in where.samples for micro_batch in rank]
        assert sorted(sample for micro_batch in flat for sample in micro_batch) == list(
            range(len(self.costs.blocks_S))
        )
        ranks, positions = where.cp_sizes_RM.shape
        cp_size_J = where.cp_sizes_RM.reshape(-1)
        assert all(is_power_of_two(size) and size <= self.rules.max_cp_size for size in cp_size_J)
        begins_J = np.arange(len(flat)) // positions % cp_size_J == 0
        assert list(map(bool, flat)) == begins_J.tolist()
        # Every place is in one micro-batch, whose ranks all have its cp_size.
        assert (cp_size_J[where.groups.first_J] == cp_size_J).all()
        assert ((begins_J * cp_size_J).reshape(ranks, positions).sum(axis=0) == ranks).all()
        tokens_J, blocks_J = (
            np.bincount(where.micro_batch_of_S, of_S, len(flat))
            for of_S in (self.costs.lengths_tokens_S, self.costs.blocks_S)
        )
        assert (tokens_J <= self.rules.cap_tokens * cp_size_J).all()
        assert ((blocks_J >= cp_size_J) | (cp_size_J == 1) | ~begins_J).all()


def random_case(shape, max_cp_size, seed, *, size=2, cap_over_start=1.2, slow=True):
    """Samples at random places, under a cap that many moves would exceed; on odd seeds devices of
    different speed."""
    ranks, positions, stages, chunks = shape
    generator = np.random.default_rng(seed)
    job = job_shape(*shape)
    cp_sizes_RM = random_cp_sizes(ranks, positions, max_cp_size, seed)
    places = np.unique(Groups(cp_sizes_RM).first_J)
    lengths = np.array(random_lengths(job.places * size, seed, longest=2**13))
    # Every micro-batch has a block for each of its ranks.
    lengths[: len(places)] += 64 * max_cp_size
    place_S = np.concatenate([places, generator.choice(places, len(lengths) - len(places))])
    slowness_RP = np.ones((ranks, stages))
    if slow and seed % 2:
        slowness_RP = generator.uniform(0.5, 2.0, (ranks, stages))
    cost = replace(
        cost_model(),
        exchange=Exchange(
            bytes_per_token=512.0,
            ms_per_byte=1e-6,
            cp_size_slowness=((2, 1.0), (4, 3.0)),
            query_heads=4,
            kv_heads=4,
            heads_within=4 if seed % 3 else 1,
        ),
        segments=SegmentCost(dense_slowness=1.5),
    )
    scales = StageScales.of(np.ones((2, stages, chunks)), slowness_RP)
    dense_LS = generator.random((job.layers, len(lengths))) < 0.3
    costs = step_costs(lengths, job, cost, scales, dense_LS)
    per_rank = np.bincount(place_S, lengths, minlength=job.places) / cp_sizes_RM.reshape(-1)
    return Case(
        costs=costs,
        sample_2SX=costs.sample_ms(np.full((job.layers, len(lengths)), 8)),
        rules=Rules(
            cap_tokens=int(np.ceil(cap_over_start * per_rank.max())), max_cp_size=max_cp_size
        ),
        start=placed(place_S, job, cp_sizes_RM),
    )


class Walk:
    """A state that random moves change."""

    def __init__(self, case: Case, each: int = 8) -> None:
        self.case, self.each = case, each
        self.state, self.numbers = State(case.start, case.contents), Numbers()
        self.drawing = Drawing(self.state, case.weights_S, case.rules, self.numbers)

    @property
    def arrangement(self) -> Arrangement:
        return Arrangement.of_places(self.state.place_S, self.state.cp_sizes_RM.copy())

    def draw(self) -> tuple[Moves, np.ndarray]:
        """Moves within all pairs of rank groups, and times of the micro-batches that they make."""
        groups = self.state.ranks // self.case.rules.max_cp_size
        pairs = max(1, groups // 2)
        order_E = np.argsort(self.numbers.draw(groups))
        groups_E2 = order_E[np.arange(2 * pairs) % groups].reshape(pairs, 2)
        moves = self.drawing.draw(groups_E2, self.each)
        rank_IY = moves.place_IY // self.state.positions
        return moves, self.state.contents.ms(moves.has_IYX, moves.cp_size_IY, rank_IY)

    def step(self) -> None:
        """Make the last move of every pair."""
        moves, ms_IYF = self.draw()
        for pair in np.unique(moves.pair_I):
            self.drawing.apply(moves, int(np.flatnonzero(moves.pair_I == pair)[-1]), ms_IYF)
