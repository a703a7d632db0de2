# SPDX-License-Identifier: Apache-2.0
"""Costs of every sample on every chunk of the pipeline, in ms, as a function of its budgets.

Costs are affine in the features, so a micro-batch costs a constant plus the sum over its samples,
and only the block pairs depend on budgets. Everything the planner optimises is built from these
terms. Sums run in a fixed order and not through BLAS, whose rounding differs between processors:
ranks must agree to the last bit.

Shape legend: X columns, I levels of cp_size; W also numbers of ranks that share.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sparsebalance_megatron.cost.exchange import Exchange
from sparsebalance_megatron.cost.model import CostModel, Direction, Part, StageScales
from sparsebalance_megatron.cost.parts import SegmentCost
from sparsebalance_megatron.cost.work_model import FEATURES, WorkModel
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes

_SPARSE_PARTS = (Part.ATTENTION, Part.ROUTER)
_MICRO_BATCHES, SEQUENCES, TOKENS, PAIRS, VISIBLE = range(len(FEATURES))


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Predicted cost terms of the samples of one step.

    A layer attends to a sample densely, without a router, or sparsely, under its budget.

    Times are told apart in columns [X], which are the chunks of the pipeline. Where ranks begin
    every layer together, they are each layer without its experts, each chunk's embedding and output
    head, and each chunk's experts with its constant. The last columns, one for each chunk, hold
    what a lockstep group does together; a rank that waits for no other is a group of one.

    Attributes:
        work: how block pairs follow from budgets.
        layer_2CF: ms by feature of a sample in one layer that attends to it sparsely, without its
            experts.
        denser_2CF: how much more it is in a layer that attends to it densely.
        outside_2CF: likewise of the embedding and the output head.
        experts_2CF: likewise of all experts of the chunk.
        exchange_2: ms of receiving the keys and values of a token in one layer.
        exchange: how ranks share.
        segments: what passing the pipeline in segments costs.
        dense_LS: which layers attend to which samples densely.
        slowness_RP: factors on all times of a rank in a stage.
    """

    job: Job
    work: WorkModel
    block_size: int
    lengths_tokens_S: np.ndarray
    layer_2CF: np.ndarray
    denser_2CF: np.ndarray
    outside_2CF: np.ndarray
    experts_2CF: np.ndarray
    exchange_2: np.ndarray
    exchange: Exchange
    segments: SegmentCost
    dense_LS: np.ndarray
    slowness_RP: np.ndarray

    @property
    def chunk_of_layer_L(self) -> np.ndarray:
        return self.job.chunk_of_layer_L

    @property
    def chunks(self) -> int:
        return self.job.pipeline_stages * self.job.virtual_stages

    @property
    def own(self) -> int:
        """Columns whose work every rank does for its own samples; a group divides the others'."""
        return self.job.layers + self.chunks if self.job.lockstep_ranks > 1 else 0

    @cached_property
    def column_of_L(self) -> np.ndarray:
        """The column of each layer."""
        return np.arange(self.job.layers) if self.own else self.chunk_of_layer_L

    @cached_property
    def chunk_of_X(self) -> np.ndarray:
        """The chunk of the pipeline that each column belongs to."""
        every_C = np.arange(self.chunks)
        return np.concatenate([self.chunk_of_layer_L, every_C, every_C]) if self.own else every_C

    @cached_property
    def constant_2C(self) -> np.ndarray:
        """Ms of a micro-batch whatever it holds. Of attention it is that of sparse attention in
        layers that attend to some sample sparsely."""
        layers_C, never_sparse_C = (
            np.bincount(self.chunk_of_layer_L, some_L, self.chunks)
            for some_L in (np.ones(self.job.layers), self.dense_LS.all(axis=1))
        )
        layer_2C, denser_2C, outside_2C, experts_2C = (
            each_2CF[..., _MICRO_BATCHES]
            for each_2CF in (self.layer_2CF, self.denser_2CF, self.outside_2CF, self.experts_2CF)
        )
        constant_2C = layers_C * layer_2C + never_sparse_C * denser_2C + outside_2C + experts_2C
        return np.asarray(constant_2C)

    @cached_property
    def constant_2X(self) -> np.ndarray:
        """Ms of a micro-batch whatever it holds, in columns."""
        return self._in_columns(self.own, self.constant_2C)

    @cached_property
    def sparse_2XF(self) -> np.ndarray:
        """Ms by feature, of a sample that no layer attends to densely."""
        layer_2XF = self._layers_X[:, None] * self.layer_2CF[:, self.chunk_of_X]
        outside_2XF = self._in_columns(max(0, self.own - self.chunks), self.outside_2CF)
        return layer_2XF + outside_2XF + self._in_columns(self.own, self.experts_2CF)

    @cached_property
    def denser_2XF(self) -> np.ndarray:
        """How much more that is for each layer of the column that does."""
        return self.denser_2CF[:, self.chunk_of_X]

    @property
    def sequence_2X(self) -> np.ndarray:
        """Ms of every sample on every rank that shares it."""
        return self.sparse_2XF[..., SEQUENCES]

    @cached_property
    def exchange_2X(self) -> np.ndarray:
        """Ms of receiving the keys and values of a token."""
        return self.exchange_2[:, None] * self._layers_X

    @property
    def slower_dense_2C(self) -> np.ndarray:
        """How much longer dense attention to a visible block pair takes where its micro-batch is
        cut, or its keys and values are gathered."""
        dense_2C = (self.layer_2CF + self.denser_2CF)[..., VISIBLE]
        return (self.segments.dense_slowness - 1.0) * dense_2C

    @cached_property
    def slower_dense_2SX(self) -> np.ndarray:
        """How much longer that makes a sample, on a rank by itself."""
        visible_S = self.work.visible_pairs(self.length_blocks_S)
        slower_2X = self.slower_dense_2C[:, self.chunk_of_X]
        return self.dense_SX * visible_S[:, None] * slower_2X[:, None]

    @cached_property
    def dense_SX(self) -> np.ndarray:
        """Numbers of layers of each column that attend to each sample densely."""
        dense_XS = np.zeros((len(self.chunk_of_X), self.dense_LS.shape[1]), dtype=np.int64)
        np.add.at(dense_XS, self.column_of_L, self.dense_LS)
        return dense_XS.T

    @cached_property
    def dense_tokens_SX(self) -> np.ndarray:
        """Tokens of a sample, for every layer that attends to it densely."""
        return self.dense_SX * self.lengths_tokens_S[:, None]

    @cached_property
    def fixed_2SX(self) -> np.ndarray:
        """Ms of a sample at budgets of 0 blocks, dense attention included."""
        return self._ms_2SX(self.sparse_2XF) + self.dense_SX * self._ms_2SX(self.denser_2XF)

    @cached_property
    def blocks_S(self) -> np.ndarray:
        """Blocks of every sample, the last one short or not."""
        return -(-self.lengths_tokens_S // self.block_size)

    @property
    def length_blocks_S(self) -> np.ndarray:
        """Blocks of every sample, fractional where the last one is short."""
        return self.lengths_tokens_S / self.block_size

    @cached_property
    def of_groups(self) -> "StepCosts":
        """Costs of the job whose ranks are context-parallel groups.

        A group is as slow as its slowest rank in every stage.
        """
        cp_size = self.job.context_parallel_size
        if cp_size == 1:
            return self
        share_F = np.full(len(FEATURES), self.share_W[cp_size])
        share_F[[_MICRO_BATCHES, SEQUENCES]] = 1.0
        layer_2CF, outside_2CF, experts_2CF, denser_2CF = (
            share_F * each
            for each in (self.layer_2CF, self.outside_2CF, self.experts_2CF, self.denser_2CF)
        )
        layer_2CF[..., TOKENS] += (self.received_2W[:, cp_size] * self.exchange_2)[:, None]
        denser_2CF[..., SEQUENCES] *= self.share_W[cp_size]
        denser_2CF[..., TOKENS] += self.heads_more_2W[:, cp_size, None]
        denser_2CF[..., VISIBLE] += self.gathering_share_W[cp_size] * self.slower_dense_2C
        slowness_RWP = self.slowness_RP.reshape(-1, cp_size, self.job.pipeline_stages)
        return replace(
            self,
            job=self.job.groups,
            layer_2CF=layer_2CF,
            denser_2CF=denser_2CF,
            outside_2CF=outside_2CF,
            experts_2CF=experts_2CF,
            exchange_2=np.zeros(2),
            slowness_RP=slowness_RWP.max(axis=1),
        )

    @cached_property
    def share_W(self) -> np.ndarray:
        """Share of a micro-batch's work that each rank does at cp_size 0 (none) to R."""
        cp_sizes = range(1, self.job.data_parallel_size + 1)
        return np.array([0.0, *map(self.exchange.share, cp_sizes)])

    @cached_property
    def received_W(self) -> np.ndarray:
        """Share of the exchange that a micro-batch takes which is gathered, at cp_size 0 (none) to
        R."""
        cp_sizes = range(1, self.job.data_parallel_size + 1)
        return np.array([0.0, *map(self.exchange.received_share, cp_sizes)])

    @cached_property
    def received_2W(self) -> np.ndarray:
        """The share of a micro-batch in one piece; where all heads travel, by what these take."""
        received_2W = np.tile(self.received_W, (2, 1))
        for cp_size in filter(self.exchange.lists_by_heads, range(1, len(self.received_W))):
            received_2W[:, cp_size] = self._heads_2(cp_size) / self.exchange_2
        return received_2W

    @cached_property
    def heads_more_2W(self) -> np.ndarray:
        """Ms that a token of a dense document takes more in a layer than one of others, where heads
        travel for it alone, at cp_size 0 (none) to R."""
        more_2W = np.zeros((2, len(self.received_W)))
        for cp_size in range(2, len(self.received_W)):
            exchange = self.exchange
            if exchange.heads_obstacle(cp_size) is None and not exchange.lists_by_heads(cp_size):
                gathered_2 = self.exchange_2 * self.received_W[cp_size]
                more_2W[:, cp_size] = self._heads_2(cp_size) - gathered_2
        return more_2W

    @cached_property
    def gathering_share_W(self) -> np.ndarray:
        """The share of the work, at cp_size 0 (none) to R, where dense documents gather keys and
        values; 0 where heads travel, and where that makes them no slower."""
        gathers_W = np.zeros(len(self.share_W), dtype=bool)
        if self.segments.dense_slowness != 1.0:
            cp_sizes = range(2, len(gathers_W))
            gathers_W[2:] = [self.exchange.heads_obstacle(size) is not None for size in cp_sizes]
        return np.where(gathers_W, self.share_W, 0.0)

    def _heads_2(self, cp_size: int) -> np.ndarray:
        """Ms that heads of a token travel between so many ranks in a layer."""
        times_2 = np.array([self.exchange.times(each) for each in Direction])
        return self.exchange.heads_ms_per_token(cp_size) * times_2

    @property
    def pair_2C(self) -> np.ndarray:
        """Ms of a block pair in a layer that attends sparsely."""
        return self.layer_2CF[..., PAIRS]

    @property
    def pair_ms_C(self) -> np.ndarray:
        """Forward and backward ms of a block pair in a layer of each chunk."""
        return np.asarray(self.pair_2C.sum(axis=0))

    @property
    def pair_ms_L(self) -> np.ndarray:
        """Forward and backward ms of a block pair in each layer."""
        return self.pair_ms_C[self.chunk_of_layer_L]

    @cached_property
    def denser_2SL(self) -> np.ndarray:
        """Ms [2, S, L] by which dense attention to a sample exceeds what lists take beside their
        block pairs."""
        return self._ms_2SX(self.denser_2CF[:, self.chunk_of_layer_L])

    def block_pairs(self, budgets: np.ndarray) -> np.ndarray:
        """Block pairs of every sample at budgets of shape [..., S]."""
        return self.work.attended_pairs(self.length_blocks_S, budgets)

    def sample_ms(self, budgets_LS: np.ndarray) -> np.ndarray:
        """[2, S, X] ms of every sample, on a rank by itself."""
        pairs_XS = np.zeros(self.fixed_2SX.shape[:0:-1])
        pairs_LS = np.where(self.dense_LS, 0.0, self.block_pairs(budgets_LS))
        # Layer by layer: numpy.add.at does the same several times slower.
        for column, pairs_S in zip(self.column_of_L.tolist(), pairs_LS, strict=True):
            pairs_XS[column] += pairs_S
        return self.fixed_2SX + pairs_XS.T * self.pair_2C[:, None, self.chunk_of_X]

    def by_chunk(self, ms: np.ndarray) -> np.ndarray:
        """Ms [..., C] of chunks, from those [..., X] of columns."""
        return joined(ms[..., None, :], self.chunk_of_X)

    def at_cp_size(self, sample_2SX: np.ndarray, cp_size_S: np.ndarray) -> np.ndarray:
        """Ms of samples on each rank that shares them, from those on a rank by itself.

        A part of the work, all that every sequence takes, and what it receives of the others.
        """
        if (cp_size_S == 1).all():
            return sample_2SX
        share_S1 = self.share_W[cp_size_S][:, None]
        received_2S1 = self.received_2W[:, cp_size_S, None]
        whole_21X = self.sequence_2X[:, None]
        shared_2SX = whole_21X + (sample_2SX - whole_21X) * share_S1
        exchange_2SX = self.exchange_2X[:, None] * self.lengths_tokens_S[:, None]
        on_each_2SX = shared_2SX + exchange_2SX * received_2S1
        if self.heads_more_2W.any():
            more_2S1 = self.heads_more_2W[:, cp_size_S, None]
            on_each_2SX = on_each_2SX + self.dense_tokens_SX * more_2S1
        if self.gathering_share_W.any():
            gathering_S1 = self.gathering_share_W[cp_size_S][:, None]
            on_each_2SX = on_each_2SX + self.slower_dense_2SX * gathering_S1
        return np.where(cp_size_S[:, None] > 1, on_each_2SX, sample_2SX)

    def micro_batch_ms(self, sample_2SX: np.ndarray, where: Arrangement) -> OperationTimes:
        """Times of the micro-batches, a column for each lockstep group; all that share one take as
        long as the slowest.

        Args:
            sample_2SX: ms of every sample on a rank by itself.
        """
        ms_2EMWX, slowness_EMWX = self._on_ranks(sample_2SX, where)
        ms_2EMC = joined(ms_2EMWX, self.chunk_of_X, slowness_EMWX)
        ms_2CME = np.ascontiguousarray(ms_2EMC.transpose(0, 3, 2, 1))
        return OperationTimes(
            graph=self.job.graph,
            ms_OR=ms_2CME.reshape(-1, ms_2CME.shape[-1]),
            cp_sizes_RM=where.groups.of_lockstep(self.job.lockstep_ranks).cp_sizes_RM,
        )

    def own_ms_2RPVM(self, sample_2SX: np.ndarray, where: Arrangement) -> np.ndarray:
        """[2, R, P, V, M] ms of every micro-batch on every rank without waiting in layers: a rank's
        experts compute an equal share of its group's samples."""
        ms_2EMWX, slowness_EMWX = self._on_ranks(sample_2SX, where)
        ms_2EMWC = apart(ms_2EMWX, self.chunk_of_X, slowness_EMWX)
        ms_2EWCM = np.moveaxis(ms_2EMWC, 2, -1)
        shape_PV = self.job.pipeline_stages, self.job.virtual_stages
        return ms_2EWCM.reshape(2, -1, *shape_PV, self.job.micro_batches)

    def slowness(self, cp_size: np.ndarray, rank: np.ndarray, chunk_of_X: np.ndarray) -> np.ndarray:
        """Slowness [..., X] of the slowest of 1, 2, 4, ... ranks from a rank on; once for all where
        no device is slow."""
        if not self.has_slow_devices:
            return np.ones((1, len(chunk_of_X)))
        return self._slowness_IRC[np.frexp(np.maximum(cp_size, 1))[1] - 1, rank][..., chunk_of_X]

    @property
    def has_slow_devices(self) -> bool:
        return bool((self.slowness_RP != 1.0).any())

    @property
    def slowness_R(self) -> np.ndarray:
        """[R] slowness of the slowest stage of each rank, which the other stages wait for."""
        return self.slowness_RP.max(axis=1)

    @cached_property
    def _slowness_IRC(self) -> np.ndarray:
        slowness_RC = np.repeat(self.slowness_RP, self.job.virtual_stages, axis=1)
        levels, cp_size = [slowness_RC], 1
        while len(slowness_RC) % (2 * cp_size) == 0:
            cp_size *= 2
            of_micro_batches = slowness_RC.reshape(-1, cp_size, slowness_RC.shape[1]).max(axis=1)
            levels.append(np.repeat(of_micro_batches, cp_size, axis=0))
        return np.stack(levels)

    def _on_ranks(
        self, sample_2SX: np.ndarray, where: Arrangement
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ms [2, E, M, W, X] of micro-batches on every member of lockstep groups, on an average
        device, and how slow the devices are."""
        job, first_J = self.job, where.groups.first_J
        sample_2SX = self.at_cp_size(sample_2SX, where.cp_size_S)
        ms_2JX = np.tile(self.constant_2X[:, None], (1, job.places, 1))
        for ms_JX, sample_SX in zip(ms_2JX, sample_2SX, strict=True):
            np.add.at(ms_JX, where.micro_batch_of_S, sample_SX)
        first_EMW = first_J[job.place_EMW]
        cp_size_EMW = where.cp_sizes_RM.reshape(-1)[job.place_EMW]
        slowness = self.slowness(cp_size_EMW, first_EMW // job.micro_batches, self.chunk_of_X)
        return ms_2JX[:, first_EMW], slowness

    @property
    def _layers_X(self) -> np.ndarray:
        return np.bincount(self.column_of_L, minlength=len(self.chunk_of_X))

    def _in_columns(self, first: int, values_2C: np.ndarray) -> np.ndarray:
        """[2, X, ...] values of chunks in the columns from one on, 0 in others."""
        values_2X = np.zeros((2, len(self.chunk_of_X), *values_2C.shape[2:]))
        values_2X[:, first : first + self.chunks] = values_2C
        return values_2X

    def _ms_2SX(self, coefficients_2XF: np.ndarray) -> np.ndarray:
        """Ms of samples whatever their budgets."""
        visible_S = self.work.visible_pairs(self.length_blocks_S)
        return np.asarray(
            coefficients_2XF[:, None, :, SEQUENCES]
            + self.lengths_tokens_S[:, None] * coefficients_2XF[:, None, :, TOKENS]
            + visible_S[:, None] * coefficients_2XF[:, None, :, VISIBLE]
        )


def joined(
    ms_WX: np.ndarray, chunk_of_X: np.ndarray, slowness_WX: np.ndarray | None = None
) -> np.ndarray:
    """Ms [..., C] of a lockstep group, from those [..., W, X] of its members in the columns of
    :class:`StepCosts`.

    Every column takes what the slowest member takes on its device. The last ones, of what a group
    does together, take an equal share of all on the slowest device.

    Args:
        slowness_WX: of the members' devices; None where the times are on these.
    """
    own = len(chunk_of_X) - 1 - int(chunk_of_X[-1])
    own_WX, ms_C = ms_WX[..., :own], ms_WX[..., own:].mean(axis=-2)
    if slowness_WX is not None:
        own_WX = own_WX * slowness_WX[..., :own]
        ms_C = ms_C * slowness_WX[..., own:].max(axis=-2)
    slowest_X = own_WX.max(axis=-2)
    for column, chunk in enumerate(chunk_of_X[:own].tolist()):
        ms_C[..., chunk] += slowest_X[..., column]
    return np.asarray(ms_C)


def apart(ms_WX: np.ndarray, chunk_of_X: np.ndarray, slowness_WX: np.ndarray) -> np.ndarray:
    """Ms [..., W, C] of members that wait for no other in their own layers; see :func:`joined`."""
    own = len(chunk_of_X) - 1 - int(chunk_of_X[-1])
    alone_WX = ms_WX.copy()
    alone_WX[..., own:] = ms_WX[..., own:].mean(axis=-2, keepdims=True)
    return joined(alone_WX[..., None, :], chunk_of_X, slowness_WX[..., None, :])


def step_costs(
    lengths_tokens: Sequence[int] | np.ndarray,
    job: Job,
    cost: CostModel,
    scales: StageScales,
    dense_LS: np.ndarray | None = None,
) -> StepCosts:
    """Cost terms of the samples of one step in this job.

    Args:
        dense_LS: which layers attend to which samples densely; None for none.

    Raises:
        PlanError: a length is not positive.
    """
    lengths_S = np.asarray(lengths_tokens, dtype=np.int64)
    if lengths_S.size == 0 or lengths_S.min() < 1:
        raise PlanError(f"a sample has {lengths_S.min(initial=0)} tokens, at least 1 needed")
    if dense_LS is None:
        dense_LS = np.zeros((job.layers, len(lengths_S)), dtype=bool)
    chunks = job.pipeline_stages * job.virtual_stages
    devices = (job.data_parallel_size, job.pipeline_stages)
    attention_2F = _coefficients_2F(cost, *_SPARSE_PARTS)
    denser_2F = _coefficients_2F(cost, Part.DENSE_ATTENTION) - attention_2F
    layer_2F = attention_2F + _coefficients_2F(cost, Part.LINEAR)
    experts_2F = _coefficients_2F(cost, Part.EXPERTS)
    layers_C = np.bincount(job.chunk_of_layer_L, minlength=chunks)
    outside_2CF = np.zeros((2, chunks, len(FEATURES)))
    outside_2CF[:, 0] += _coefficients_2F(cost, Part.EMBEDDING)
    outside_2CF[:, -1] += _coefficients_2F(cost, Part.HEAD)
    scale_2C = scales.scales_2PV.reshape(2, -1)
    return StepCosts(
        job=job,
        work=cost.work,
        block_size=cost.block_size,
        lengths_tokens_S=lengths_S,
        layer_2CF=scale_2C[..., None] * layer_2F[:, None],
        denser_2CF=scale_2C[..., None] * denser_2F[:, None],
        outside_2CF=scale_2C[..., None] * outside_2CF,
        experts_2CF=scale_2C[..., None] * layers_C[:, None] * experts_2F[:, None],
        exchange_2=np.array([cost.exchange.ms_per_token(direction) for direction in Direction]),
        exchange=cost.exchange,
        segments=cost.segments.times(scales.cut_ratio),
        dense_LS=dense_LS,
        slowness_RP=np.broadcast_to(scales.slowness_RP, devices),
    )


def _coefficients_2F(cost: CostModel, *parts: Part) -> np.ndarray:
    """Ms of parts together, by direction and feature."""
    return np.stack(
        [
            np.sum([cost.coefficients_ms(part, direction) for part in parts], axis=0)
            for direction in Direction
        ]
    )
