# SPDX-License-Identifier: Apache-2.0
"""Costs of every sample on every chunk of the pipeline, in ms, as a function of its budgets.

Costs are affine in the features, so a micro-batch costs a constant plus the sum over its samples,
and only the block pairs depend on budgets. Everything the planner optimises is built from these
terms. Sums run in a fixed order and not through BLAS, whose rounding differs between processors:
ranks must agree to the last bit.

Shape legend: F features, W ranks of a group, X columns.
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
from sparsebalance_megatron.plan.context_groups import Members, first_places
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes

_SPARSE_PARTS = (Part.ATTENTION, Part.ROUTER)
_MICRO_BATCHES, SEQUENCES, TOKENS, PAIRS, VISIBLE = range(len(FEATURES))


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Costs of samples in columns: parts of the model whose times are told apart.

    Attributes:
        column_of_L: the column of each layer.
        chunk_of_X: the chunk of the pipeline that each column belongs to.
        own: columns whose work every rank does for its own samples. A lockstep group divides that
            of the others.
        constant_2X: ms of a micro-batch whatever it holds.
        sparse_2XF: ms by feature, for a sample that no layer attends to densely.
        denser_2XF: how much more that is for each layer of the column that does.
        pair_2X: ms of a block pair in one layer.
        sequence_2X: ms of every sample on every rank that shares it.
        exchange_2X: ms of receiving the keys and values of a token.
    """

    costs: "StepCosts"
    column_of_L: np.ndarray
    chunk_of_X: np.ndarray
    own: int
    constant_2X: np.ndarray
    sparse_2XF: np.ndarray
    denser_2XF: np.ndarray
    pair_2X: np.ndarray
    sequence_2X: np.ndarray
    exchange_2X: np.ndarray

    @cached_property
    def fixed_2SX(self) -> np.ndarray:
        """Ms of a sample at budgets of 0 blocks, dense attention included."""
        return self._ms_2SX(self.sparse_2XF) + self._dense_SX * self._ms_2SX(self.denser_2XF)

    @cached_property
    def exchange_2SX(self) -> np.ndarray:
        """Ms of receiving all of a sample's keys and values."""
        return self.exchange_2X[:, None] * self.costs.lengths_tokens_S[:, None]

    @cached_property
    def dense_tokens_SX(self) -> np.ndarray:
        """Tokens of a sample, for every layer that attends to it densely."""
        return self._dense_SX * self.costs.lengths_tokens_S[:, None]

    def ms_2SX(self, budgets_LS: np.ndarray) -> np.ndarray:
        """Ms of every sample, on a rank by itself."""
        pairs_XS = np.zeros(self.fixed_2SX.shape[:0:-1])
        # Layer by layer: numpy.add.at does the same several times slower.
        for column, pairs_S in zip(
            self.column_of_L.tolist(), self.costs.sparse_pairs_LS(budgets_LS), strict=True
        ):
            pairs_XS[column] += pairs_S
        return self.fixed_2SX + pairs_XS.T * self.pair_2X[:, None]

    def at_cp_size(self, sample_2SX: np.ndarray, cp_size_S: np.ndarray) -> np.ndarray:
        """Ms of samples on each rank that shares them, from those on a rank by itself.

        A part of the work, all that every sequence takes, and what it receives of the others.
        """
        if (cp_size_S == 1).all():
            return sample_2SX
        share_S1 = self.costs.share_W[cp_size_S][:, None]
        received_2S1 = self.costs.received_2W[:, cp_size_S, None]
        whole_21X = self.sequence_2X[:, None]
        shared_2SX = whole_21X + (sample_2SX - whole_21X) * share_S1
        on_each_2SX = shared_2SX + self.exchange_2SX * received_2S1
        if self.costs.heads_more_2W.any():
            more_2S1 = self.costs.heads_more_2W[:, cp_size_S, None]
            on_each_2SX = on_each_2SX + self.dense_tokens_SX * more_2S1
        return np.where(cp_size_S[:, None] > 1, on_each_2SX, sample_2SX)

    @cached_property
    def _dense_SX(self) -> np.ndarray:
        return dense_layers(self.costs.dense_LS, self.column_of_L, self.pair_2X.shape[1])

    def _ms_2SX(self, coefficients_2XF: np.ndarray) -> np.ndarray:
        """Ms of samples whatever their budgets."""
        costs = self.costs
        visible_S = costs.work.visible_pairs(costs.length_blocks_S)
        return np.asarray(
            coefficients_2XF[:, None, :, SEQUENCES]
            + costs.lengths_tokens_S[:, None] * coefficients_2XF[:, None, :, TOKENS]
            + visible_S[:, None] * coefficients_2XF[:, None, :, VISIBLE]
        )


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Predicted cost terms of the samples of one step.

    A layer attends to a sample densely, without a router, or sparsely, under its budget.

    Attributes:
        work: how block pairs follow from budgets.
        constant_2C: ms of a micro-batch whatever it holds. Of attention it is that of sparse
            attention in layers that attend to some sample sparsely.
        layer_2CF: ms by feature of a sample in one layer that attends to it sparsely; without
            experts where ranks wait in every layer.
        denser_2CF: how much more it is in a layer that attends to it densely.
        outside_2CF: likewise of the embedding and the output head.
        experts_2CF: likewise of all experts of the chunk, where ranks wait in every layer.
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
    constant_2C: np.ndarray
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

    @cached_property
    def blocks_S(self) -> np.ndarray:
        """Blocks of every sample, the last one short or not."""
        return -(-self.lengths_tokens_S // self.block_size)

    @cached_property
    def by_chunk(self) -> Columns:
        """Costs whose columns are the chunks of the pipeline."""
        layers_C = np.bincount(self.chunk_of_layer_L, minlength=self.chunks)
        own_2CF = layers_C[:, None] * self.layer_2CF + self.outside_2CF
        return Columns(
            costs=self,
            column_of_L=self.chunk_of_layer_L,
            chunk_of_X=np.arange(self.chunks),
            own=self.chunks,
            constant_2X=self.constant_2C,
            sparse_2XF=own_2CF + self.experts_2CF,
            denser_2XF=self.denser_2CF,
            pair_2X=self.pair_2C,
            sequence_2X=own_2CF[..., SEQUENCES],
            exchange_2X=self.exchange_2[:, None] * layers_C,
        )

    @cached_property
    def by_layer(self) -> Columns:
        """Costs whose columns are those that ranks wait for one another in: where they begin every
        layer together, each layer without its experts, then each chunk's embedding and output head,
        then each chunk's experts with its constant; else :attr:`by_chunk`."""
        if self.job.lockstep_ranks == 1:
            return self.by_chunk
        layers, chunks = len(self.chunk_of_layer_L), self.chunks
        layer_2LF = self.layer_2CF[:, self.chunk_of_layer_L]
        own_2XF = np.concatenate([layer_2LF, self.outside_2CF], axis=1)
        beside = ((0, 0), (0, 2 * chunks))
        return Columns(
            costs=self,
            column_of_L=np.arange(layers),
            chunk_of_X=np.concatenate([self.chunk_of_layer_L, *[np.arange(chunks)] * 2]),
            own=layers + chunks,
            constant_2X=np.pad(self.constant_2C, ((0, 0), (layers + chunks, 0))),
            sparse_2XF=np.concatenate([own_2XF, self.experts_2CF], axis=1),
            denser_2XF=np.pad(self.denser_2CF[:, self.chunk_of_layer_L], (*beside, (0, 0))),
            pair_2X=np.pad(self.pair_2C[:, self.chunk_of_layer_L], beside),
            sequence_2X=np.pad(own_2XF[..., SEQUENCES], ((0, 0), (0, chunks))),
            exchange_2X=np.pad(self.exchange_2[:, None] * np.ones(layers), beside),
        )

    @cached_property
    def together_2SC(self) -> np.ndarray:
        """Ms of a sample in the experts of every chunk, whose work a lockstep group divides."""
        return self.by_chunk._ms_2SX(self.experts_2CF)

    @cached_property
    def of_groups(self) -> "StepCosts":
        """Costs of the job whose ranks are context-parallel groups.

        A group is as slow as its slowest rank in every stage.
        """
        cp_size = self.job.context_parallel_size
        if cp_size == 1:
            return self
        share, received_2 = self.share_W[cp_size], self.received_2W[:, cp_size]
        layer_2CF, outside_2CF = share * self.layer_2CF, share * self.outside_2CF
        layer_2CF[..., SEQUENCES] = self.layer_2CF[..., SEQUENCES]
        layer_2CF[..., TOKENS] += (received_2 * self.exchange_2)[:, None]
        outside_2CF[..., SEQUENCES] = self.outside_2CF[..., SEQUENCES]
        denser_2CF = self.denser_2CF.copy()
        denser_2CF[..., TOKENS] += self.heads_more_2W[:, cp_size, None] / share
        slowness_RWP = self.slowness_RP.reshape(-1, cp_size, self.job.pipeline_stages)
        return replace(
            self,
            job=self.job.groups,
            layer_2CF=layer_2CF,
            denser_2CF=share * denser_2CF,
            outside_2CF=outside_2CF,
            experts_2CF=share * self.experts_2CF,
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
        """Likewise of one in one piece; where all its heads travel, by what these take."""
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

    def _heads_2(self, cp_size: int) -> np.ndarray:
        """Ms that heads of a token travel between so many ranks in a layer."""
        times_2 = np.array([self.exchange.times(each) for each in Direction])
        return self.exchange.heads_ms_per_token(cp_size) * times_2

    @property
    def pair_2C(self) -> np.ndarray:
        """Ms of a block pair in a layer that attends sparsely."""
        return self.layer_2CF[..., PAIRS]

    @property
    def chunks(self) -> int:
        return self.job.pipeline_stages * self.job.virtual_stages

    @property
    def length_blocks_S(self) -> np.ndarray:
        """Blocks of every sample, fractional where the last one is short."""
        return self.lengths_tokens_S / self.block_size

    @property
    def pair_ms_C(self) -> np.ndarray:
        """Forward and backward ms of a block pair in a layer of each chunk."""
        return np.asarray(self.pair_2C.sum(axis=0))

    @property
    def pair_ms_L(self) -> np.ndarray:
        """Forward and backward ms of a block pair in each layer."""
        return self.pair_ms_C[self.chunk_of_layer_L]

    def block_pairs(self, budgets: np.ndarray) -> np.ndarray:
        """Block pairs of every sample at budgets of shape [..., S]."""
        return self.work.attended_pairs(self.length_blocks_S, budgets)

    def sparse_pairs_LS(self, budgets_LS: np.ndarray) -> np.ndarray:
        """Block pairs of sparse attention; 0 where a layer attends densely."""
        return np.where(self.dense_LS, 0.0, self.block_pairs(budgets_LS))

    @cached_property
    def denser_2SL(self) -> np.ndarray:
        """Ms [2, S, L] by which dense attention to a sample exceeds what lists take beside their
        block pairs."""
        return self.by_chunk._ms_2SX(self.denser_2CF[:, self.chunk_of_layer_L])

    def sample_ms(self, budgets_LS: np.ndarray) -> np.ndarray:
        """[2, S, C] ms of every sample on every chunk."""
        return self.by_chunk.ms_2SX(budgets_LS)

    def micro_batch_ms(self, sample_2SC: np.ndarray, where: Arrangement) -> OperationTimes:
        """Times of the micro-batches; every rank of one takes as long as the slowest.

        Args:
            sample_2SC: ms of every sample on a rank by itself.
        """
        micro_batch_of_S, cp_sizes_RM = where.micro_batch_of_S, where.cp_sizes_RM
        sample_2SC = self.by_chunk.at_cp_size(sample_2SC, cp_sizes_RM.reshape(-1)[micro_batch_of_S])
        micro_batch_2JC = np.tile(self.constant_2C[:, None], (1, self.job.places, 1))
        for micro_batch_JC, sample_SC in zip(micro_batch_2JC, sample_2SC, strict=True):
            np.add.at(micro_batch_JC, micro_batch_of_S, sample_SC)
        micro_batch_2JC = micro_batch_2JC[:, first_places(cp_sizes_RM)]
        ms_2RMC = micro_batch_2JC.reshape(2, *cp_sizes_RM.shape, -1)
        return self.flat(self.on_devices(ms_2RMC, cp_sizes_RM), cp_sizes_RM)

    def on_devices(self, ms_2RMC: np.ndarray, cp_sizes_RM: np.ndarray) -> np.ndarray:
        """Ms of micro-batches on the ranks' devices, from those of an average device: on all that
        share a micro-batch those of the slowest."""
        if (self.slowness_RP == 1.0).all():
            return ms_2RMC
        slowness_RC = np.repeat(self.slowness_RP, self.job.virtual_stages, axis=1)
        members = Members(cp_sizes_RM.T)
        ms_2CMX = members.in_order((ms_2RMC * slowness_RC[:, None]).transpose(0, 3, 2, 1))
        ms_2CMX = np.ascontiguousarray(ms_2CMX)
        for ms_MX in ms_2CMX.reshape(-1, *ms_2CMX.shape[2:]):
            members.maximum(ms_MX)
        return members.back_in_order(ms_2CMX).transpose(0, 3, 2, 1)

    def flat(self, ms_2RMC: np.ndarray, cp_sizes_RM: np.ndarray) -> OperationTimes:
        """Times of micro-batches in one piece, from those of every chunk."""
        ms_2CMR = np.ascontiguousarray(ms_2RMC.transpose(0, 3, 2, 1))
        ms_OR = ms_2CMR.reshape(-1, len(cp_sizes_RM))
        return OperationTimes(graph=self.job.graph, ms_OR=ms_OR, cp_sizes_RM=cp_sizes_RM)

    @property
    def slowness_R(self) -> np.ndarray:
        """[R] slowness of the slowest stage of each rank, which the other stages wait for."""
        return self.slowness_RP.max(axis=1)


def of_lockstep_groups(
    ms_WYX: np.ndarray, slowness_WX: np.ndarray, chunk_of_X: np.ndarray
) -> np.ndarray:
    """Ms [..., Y, C] of a lockstep group, from those [..., W, Y, X] of its members in the columns
    of :attr:`.StepCosts.by_layer`.

    Every column takes what the slowest member takes on its device; experts take an equal share on
    the slowest device.

    Args:
        slowness_WX: of the members' devices, [..., W, X].
    """
    chunks = 1 + int(chunk_of_X[-1])
    own = len(chunk_of_X) - chunks
    slowness_WYX = slowness_WX[..., None, :]
    slowest_YX = (ms_WYX[..., :own] * slowness_WYX[..., :own]).max(axis=-3)
    ms_YC = ms_WYX[..., own:].mean(axis=-3) * slowness_WYX[..., own:].max(axis=-3)
    for column, chunk in enumerate(chunk_of_X[:own].tolist()):
        ms_YC[..., chunk] += slowest_YX[..., column]
    return np.asarray(ms_YC)


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
    layers_C, never_sparse_C = (
        np.bincount(some, minlength=chunks)
        for some in (job.chunk_of_layer_L, job.chunk_of_layer_L[dense_LS.all(axis=1)])
    )
    outside_2CF = np.zeros((2, chunks, len(FEATURES)))
    outside_2CF[:, 0] += _coefficients_2F(cost, Part.EMBEDDING)
    outside_2CF[:, -1] += _coefficients_2F(cost, Part.HEAD)
    constant_2C = (
        layers_C * (layer_2F + experts_2F)[:, None, _MICRO_BATCHES]
        + outside_2CF[..., _MICRO_BATCHES]
        + never_sparse_C * denser_2F[:, None, _MICRO_BATCHES]
    )
    if job.lockstep_ranks == 1:
        layer_2F, experts_2F = layer_2F + experts_2F, np.zeros_like(experts_2F)
    scale_2C = scales.scales_2PV.reshape(2, -1)
    return StepCosts(
        job=job,
        work=cost.work,
        block_size=cost.block_size,
        lengths_tokens_S=lengths_S,
        constant_2C=scale_2C * constant_2C,
        layer_2CF=scale_2C[..., None] * layer_2F[:, None],
        denser_2CF=scale_2C[..., None] * denser_2F[:, None],
        outside_2CF=scale_2C[..., None] * outside_2CF,
        experts_2CF=scale_2C[..., None] * layers_C[:, None] * experts_2F[:, None],
        exchange_2=np.array([cost.exchange.ms_per_token(direction) for direction in Direction]),
        exchange=cost.exchange,
        segments=cost.segments.times(scales.cut_ratio),
        dense_LS=dense_LS,
        slowness_RP=np.broadcast_to(scales.device_slowness_RP, devices),
    )


def dense_layers(dense_LS: np.ndarray, column_of_L: np.ndarray, columns: int) -> np.ndarray:
    """[S, X] numbers of layers of each column that attend to each sample densely."""
    dense_XS = np.zeros((columns, dense_LS.shape[1]), dtype=np.int64)
    np.add.at(dense_XS, column_of_L, dense_LS)
    return dense_XS.T


def _coefficients_2F(cost: CostModel, *parts: Part) -> np.ndarray:
    """Ms of parts together, by direction and feature."""
    return np.stack(
        [
            np.sum([cost.coefficients_ms(part, direction) for part in parts], axis=0)
            for direction in Direction
        ]
    )
