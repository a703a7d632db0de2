# SPDX-License-Identifier: Apache-2.0
"""Costs of every sample on every chunk of the pipeline, in ms, as a function of its budgets.

Costs are affine in the features, so a micro-batch costs a constant plus the sum over its samples,
and only the block pairs depend on budgets. Everything the planner optimises is built from these
terms. Sums run in a fixed order and not through BLAS, whose rounding differs between processors:
ranks must agree to the last bit.

Shape legend: F features, I ranks looked at, W ranks of a group, X = L + 2 C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from sparsebalance_megatron.cost.exchange import Exchange
from sparsebalance_megatron.cost.model import CostModel, Direction, Part
from sparsebalance_megatron.cost.parts import SegmentCost
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.cost.work_model import FEATURES, WorkModel
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.context_groups import Members, first_places
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.step_plan import PlanError


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Ms of every sample in columns: each layer without its experts, then each chunk's embedding
    and output head, then each chunk's experts, whose work the ranks of a lockstep group divide.

    Attributes:
        chunk_of_X: the chunk that each column belongs to.
        columns_2XF: ms by feature, for a sample that no layer attends to densely.
        denser_2XF: how much more that is in a layer that does.
        fixed_2SX: ms of a sample at budgets of 0 blocks.
        pair_share_S: share of a sample's block pairs that each of its ranks computes.
        exchange_2SX: ms of receiving all of a sample's keys and values.
        lists_2SX: ms that a shared sample takes more where a layer would attend to it densely.
    """

    chunk_of_X: np.ndarray
    columns_2XF: np.ndarray
    denser_2XF: np.ndarray
    fixed_2SX: np.ndarray
    pair_share_S: np.ndarray
    exchange_2SX: np.ndarray
    lists_2SX: np.ndarray

    @property
    def own_columns(self) -> int:
        """Columns before those of experts."""
        return len(self.chunk_of_X) - 1 - int(self.chunk_of_X[-1])

    @property
    def together_2SC(self) -> np.ndarray:
        """Ms of a sample in the experts of every chunk."""
        return self.fixed_2SX[..., self.own_columns :]

    @property
    def sequence_2X(self) -> np.ndarray:
        """Ms of every sample on every rank that shares it: the group divides all of its experts'
        work."""
        sequence_2X = self.columns_2XF[..., SEQUENCES].copy()
        sequence_2X[:, self.own_columns :] = 0.0
        return sequence_2X

    def shared(self, share_S: np.ndarray, received_S: np.ndarray) -> LayerCosts:
        """Costs on each of the ranks that share a sample.

        Args:
            share_S: of the sample's work that each rank does.
            received_S: of the sample's keys and values that each receives.
        """
        share_S1, received_S1 = share_S[:, None], received_S[:, None]
        sequence_21X = self.sequence_2X[:, None]
        # Who receives no keys is not shared.
        fixed_2SX = self.fixed_2SX + (received_S1 > 0.0) * self.lists_2SX
        return replace(
            self,
            fixed_2SX=sequence_21X
            + share_S1 * (fixed_2SX - sequence_21X)
            + received_S1 * self.exchange_2SX,
            pair_share_S=share_S * self.pair_share_S,
            exchange_2SX=np.zeros_like(self.exchange_2SX),
            lists_2SX=np.zeros_like(self.lists_2SX),
        )

    def ms_2SX(self, pairs_LS: np.ndarray) -> np.ndarray:
        """Ms of samples that attend so many block pairs in each layer."""
        layers = len(pairs_LS)
        pair_2L = self.columns_2XF[:, :layers, PAIRS]
        ms_2SX = self.fixed_2SX.copy()
        ms_2SX[..., :layers] += pair_2L[:, None] * (pairs_LS * self.pair_share_S).T
        return ms_2SX


def of_lockstep_groups(
    ms_WYX: np.ndarray, slowness_WX: np.ndarray, chunk_of_X: np.ndarray
) -> np.ndarray:
    """Ms [..., Y, C] of a lockstep group, from those [..., W, Y, X] of its members in the columns
    of :class:`LayerCosts`.

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


_SPARSE_PARTS = (Part.ATTENTION, Part.ROUTER)
_OTHER_LAYER_PARTS = (Part.LINEAR, Part.EXPERTS)
_MICRO_BATCHES, SEQUENCES, TOKENS, PAIRS, VISIBLE = range(len(FEATURES))


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Predicted cost terms of the samples of one step.

    A layer attends to a sample densely, without a router, or sparsely, under its budget. Where
    ranks share a sample, or it is cut in segments, lists of all blocks stand for dense attention.

    Attributes:
        work: how block pairs follow from budgets.
        constant_2C: ms of a micro-batch whatever it holds. Of attention it is that of sparse
            attention in layers that attend to some sample sparsely.
        fixed_2SC: ms of a sample whatever its budgets, on a rank by itself, dense attention
            included.
        sparse_2CF: what ``fixed_2SC`` is per feature for a sample that no layer attends to densely.
        denser_2CF: how much more it is per layer of the chunk that does.
        pair_2C: ms of a block pair in a layer that attends sparsely.
        exchange_2SC: ms of receiving all of a sample's keys and values.
        exchange: how ranks share.
        segments: what passing the pipeline in segments costs.
        dense_LS: which layers attend to which samples densely.
        slowness_RP: factors on all times of a rank in a stage.
        layers: costs layer by layer, where ranks wait for one another in every layer.
    """

    job: Job
    work: WorkModel
    block_size: int
    lengths_tokens_S: np.ndarray
    blocks_S: np.ndarray
    constant_2C: np.ndarray
    fixed_2SC: np.ndarray
    sparse_2CF: np.ndarray
    denser_2CF: np.ndarray
    pair_2C: np.ndarray
    exchange_2SC: np.ndarray
    exchange: Exchange
    segments: SegmentCost
    chunk_of_layer_L: np.ndarray
    dense_LS: np.ndarray
    slowness_RP: np.ndarray
    layers: LayerCosts | None = None

    @property
    def of_groups(self) -> StepCosts:
        """Costs of the job whose ranks are context-parallel groups.

        A group is as slow as its slowest rank in every stage.
        """
        cp_size = self.job.context_parallel_size
        if cp_size == 1:
            return self
        slowness_RWP = self.slowness_RP.reshape(-1, cp_size, self.job.pipeline_stages)
        each_S = np.full(len(self.lengths_tokens_S), cp_size)
        return replace(
            self,
            job=self.job.groups,
            fixed_2SC=self.ms_at_cp_size(self.fixed_2SC, each_S),
            pair_2C=self.share_W[cp_size] * self.pair_2C,
            slowness_RP=slowness_RWP.max(axis=1),
            layers=self.layers
            and self.layers.shared(self.share_W[each_S], self.received_W[each_S]),
        )

    @cached_property
    def share_W(self) -> np.ndarray:
        """Share of a micro-batch's work that each rank does at cp_size 0 (none) to R."""
        cp_sizes = range(1, self.job.data_parallel_size + 1)
        return np.array([0.0, *map(self.exchange.share, cp_sizes)])

    @cached_property
    def received_W(self) -> np.ndarray:
        """Share of ``exchange_2SC`` that a micro-batch takes at cp_size 0 (none) to R."""
        cp_sizes = range(1, self.job.data_parallel_size + 1)
        return np.array([0.0, *map(self.exchange.received_share, cp_sizes)])

    def ms_at_cp_size(self, sample_2SC: np.ndarray, cp_size_S: np.ndarray) -> np.ndarray:
        """[2, S, C] ms of samples on each rank that shares them, from those on a rank by itself.

        A part of the work, all that every sequence takes, and what it receives of the others.
        """
        share_S1 = self.share_W[cp_size_S][:, None]
        received_S1 = self.received_W[cp_size_S][:, None]
        whole_21C = self.sequence_2C[:, None]
        shared_2SC = whole_21C + (sample_2SC + self.lists_2SC - whole_21C) * share_S1
        on_each_2SC = shared_2SC + self.exchange_2SC * received_S1
        return np.where(cp_size_S[:, None] > 1, on_each_2SC, sample_2SC)

    @cached_property
    def lists_2SC(self) -> np.ndarray:
        """Ms that every sample takes more where it is shared, for layers that would attend to it
        densely."""
        more_2CF = as_lists(self.denser_2CF, self.pair_2C) - self.denser_2CF
        dense_SC = dense_layers(self.dense_LS, self.chunk_of_layer_L, self.chunks)
        visible_S = self.work.visible_pairs(self.length_blocks_S)
        return dense_SC * _fixed_2SX(more_2CF, self.lengths_tokens_S, visible_S)

    @property
    def sequence_2C(self) -> np.ndarray:
        """Ms of every sample on every rank that shares it."""
        return self.sparse_2CF[..., SEQUENCES]

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
        return self.pair_2C[0] + self.pair_2C[1]

    @property
    def pair_ms_L(self) -> np.ndarray:
        """Forward and backward ms of a block pair in each layer."""
        return self.pair_ms_C[self.chunk_of_layer_L]

    def block_pairs(self, budgets: np.ndarray) -> np.ndarray:
        """Block pairs of every sample at budgets of shape [..., S]."""
        return self.work.attended_pairs(self.length_blocks_S, budgets)

    @cached_property
    def denser_2SL(self) -> np.ndarray:
        """Ms [2, S, L] by which dense attention to a sample exceeds what lists take beside their
        block pairs."""
        denser_2LF = self.denser_2CF[:, self.chunk_of_layer_L]
        visible_S = self.work.visible_pairs(self.length_blocks_S)
        return _fixed_2SX(denser_2LF, self.lengths_tokens_S, visible_S)

    def with_dense(self, dense_LS: np.ndarray) -> StepCosts:
        """Costs where layers attend to more samples densely; what a micro-batch takes whatever it
        holds stays."""
        more_LS = dense_LS & ~self.dense_LS
        if not more_LS.any():
            return self
        more_2SL = np.where(more_LS.T, self.denser_2SL, 0.0)
        fixed_2SC = self.fixed_2SC.copy()
        for layer, chunk in enumerate(self.chunk_of_layer_L.tolist()):
            fixed_2SC[..., chunk] += more_2SL[..., layer]
        layers = self.layers
        if layers is not None:
            beside = len(layers.chunk_of_X) - len(more_LS)
            more_2SX = np.pad(more_2SL, ((0, 0), (0, 0), (0, beside)))
            layers = replace(layers, fixed_2SX=layers.fixed_2SX + more_2SX)
        return replace(self, fixed_2SC=fixed_2SC, dense_LS=dense_LS, layers=layers)

    def sparse_pairs_LS(self, budgets_LS: np.ndarray) -> np.ndarray:
        """Block pairs of sparse attention; 0 where a layer attends densely."""
        return np.where(self.dense_LS, 0.0, self.block_pairs(budgets_LS))

    def sample_ms(self, budgets_LS: np.ndarray) -> np.ndarray:
        """[2, S, C] ms of every sample on every chunk."""
        pairs_CS = np.zeros((self.chunks, len(self.lengths_tokens_S)))
        # Layer by layer: numpy.add.at does the same several times slower.
        for chunk, pairs_S in zip(
            self.chunk_of_layer_L.tolist(), self.sparse_pairs_LS(budgets_LS), strict=True
        ):
            pairs_CS[chunk] += pairs_S
        return self.fixed_2SC + pairs_CS.T * self.pair_2C[:, None]

    def micro_batch_ms(self, sample_2SC: np.ndarray, where: Arrangement) -> OperationTimes:
        """Times of the micro-batches; every rank of one takes as long as the slowest.

        Args:
            sample_2SC: ms of every sample on a rank by itself.
        """
        micro_batch_of_S, cp_sizes_RM = where.micro_batch_of_S, where.cp_sizes_RM
        sample_2SC = self.ms_at_cp_size(sample_2SC, cp_sizes_RM.reshape(-1)[micro_batch_of_S])
        micro_batch_2JC = np.tile(self.constant_2C[:, None], (1, self.job.places, 1))
        for micro_batch_JC, sample_SC in zip(micro_batch_2JC, sample_2SC, strict=True):
            np.add.at(micro_batch_JC, micro_batch_of_S, sample_SC)
        micro_batch_2JC = micro_batch_2JC[:, first_places(cp_sizes_RM)]
        return self.times_of(micro_batch_2JC, np.arange(self.job.data_parallel_size), cp_sizes_RM)

    def times_of(
        self, ms_2JC: np.ndarray, ranks_I: np.ndarray, cp_sizes_IM: np.ndarray
    ) -> OperationTimes:
        """Times of the micro-batches of whole ranks, from what an average device would take."""
        ms_2IMC = ms_2JC.reshape(2, *cp_sizes_IM.shape, -1)
        return self.flat(self.on_devices(ms_2IMC, ranks_I, cp_sizes_IM), cp_sizes_IM)

    def on_devices(
        self, ms_2IMC: np.ndarray, ranks_I: np.ndarray, cp_sizes_IM: np.ndarray
    ) -> np.ndarray:
        """Ms of micro-batches on the devices of these ranks: on all that share a micro-batch those
        of the slowest.

        Args:
            ms_2IMC: what an average device would take.
        """
        if self._alike:
            return ms_2IMC
        slowness_IC = np.repeat(self.slowness_RP[ranks_I], self.job.virtual_stages, axis=1)
        members = Members(cp_sizes_IM.T)
        ms_2CMX = members.in_order((ms_2IMC * slowness_IC[:, None]).transpose(0, 3, 2, 1))
        ms_2CMX = np.ascontiguousarray(ms_2CMX)
        for ms_MX in ms_2CMX.reshape(-1, *ms_2CMX.shape[2:]):
            members.maximum(ms_MX)
        return members.back_in_order(ms_2CMX).transpose(0, 3, 2, 1)

    def flat(self, ms_2IMC: np.ndarray, cp_sizes_IM: np.ndarray) -> OperationTimes:
        """Times of micro-batches in one piece, from those of every chunk."""
        ms_2CMI = np.ascontiguousarray(ms_2IMC.transpose(0, 3, 2, 1))
        ms_OI = ms_2CMI.reshape(-1, len(cp_sizes_IM))
        return OperationTimes(graph=self.job.graph, ms_OR=ms_OI, cp_sizes_RM=cp_sizes_IM)

    @cached_property
    def _alike(self) -> bool:
        """Tell whether all devices are: the usual case, and searches need times very often."""
        return bool((self.slowness_RP == 1.0).all())

    @property
    def slowness_R(self) -> np.ndarray:
        """[R] slowness of the slowest stage of each rank, which the other stages wait for."""
        return self.slowness_RP.max(axis=1)


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
    chunk_of_layer_L = _chunk_of_layer(job)
    chunks = job.pipeline_stages * job.virtual_stages
    devices = (job.data_parallel_size, job.pipeline_stages)
    attention_2F = _coefficients_2F(cost, *_SPARSE_PARTS)
    denser_2F = _coefficients_2F(cost, Part.DENSE_ATTENTION) - attention_2F
    layer_2F = attention_2F + _coefficients_2F(cost, *_OTHER_LAYER_PARTS)
    layers_C, never_sparse_C = (
        np.bincount(some, minlength=chunks)
        for some in (chunk_of_layer_L, chunk_of_layer_L[dense_LS.all(axis=1)])
    )
    outside_2CF = np.zeros((2, chunks, len(FEATURES)))
    outside_2CF[:, 0] += _coefficients_2F(cost, Part.EMBEDDING)
    outside_2CF[:, -1] += _coefficients_2F(cost, Part.HEAD)
    sparse_2CF = layers_C[:, None] * layer_2F[:, None] + outside_2CF
    constant_2C = sparse_2CF[..., _MICRO_BATCHES]
    constant_2C = constant_2C + never_sparse_C * denser_2F[:, None, _MICRO_BATCHES]
    visible_S = cost.work.visible_pairs(lengths_S / cost.block_size)
    fixed_2SX = partial(_fixed_2SX, lengths_S=lengths_S, visible_S=visible_S)
    denser_2S1 = fixed_2SX(denser_2F[:, None])
    dense_SC = dense_layers(dense_LS, chunk_of_layer_L, chunks)
    fixed_2SC = fixed_2SX(sparse_2CF) + dense_SC * denser_2S1
    scale_2C = scales.scales_2PV.reshape(2, -1)
    per_token_2 = np.array([cost.exchange.ms_per_token(direction) for direction in Direction])
    exchange_2SC = per_token_2[:, None, None] * lengths_S[:, None] * layers_C
    layers = None
    if job.lockstep_ranks > 1:
        experts_2F = _coefficients_2F(cost, Part.EXPERTS)
        # The group divides all of its experts' work.
        sparse_2CF[..., SEQUENCES] -= layers_C * experts_2F[:, None, SEQUENCES]
        chunk_of_X = np.concatenate([chunk_of_layer_L, *[np.arange(chunks)] * 2])
        layer_2LF = np.repeat((layer_2F - experts_2F)[:, None], job.layers, axis=1)
        experts_2CF = layers_C[:, None] * experts_2F[:, None]
        columns_2XF = np.concatenate([layer_2LF, outside_2CF, experts_2CF], axis=1)
        denser_2XF = np.zeros_like(columns_2XF)
        denser_2XF[:, : job.layers] = denser_2F[:, None]
        dense_SX = np.pad(dense_LS.T, ((0, 0), (0, 2 * chunks)))
        exchange_2SX = np.zeros((2, len(lengths_S), len(chunk_of_X)))
        exchange_2SX[..., : job.layers] = (per_token_2[:, None] * lengths_S)[..., None]
        scale_2X = scale_2C[:, chunk_of_X]
        more_2XF = as_lists(denser_2XF, columns_2XF[..., PAIRS]) - denser_2XF
        layers = LayerCosts(
            chunk_of_X=chunk_of_X,
            columns_2XF=scale_2X[..., None] * columns_2XF,
            denser_2XF=scale_2X[..., None] * denser_2XF,
            lists_2SX=scale_2X[:, None] * dense_SX * fixed_2SX(more_2XF),
            fixed_2SX=scale_2X[:, None] * (fixed_2SX(columns_2XF) + dense_SX * denser_2S1),
            pair_share_S=np.ones(len(lengths_S)),
            exchange_2SX=exchange_2SX,
        )
    return StepCosts(
        job=job,
        work=cost.work,
        block_size=cost.block_size,
        lengths_tokens_S=lengths_S,
        blocks_S=-(-lengths_S // cost.block_size),
        constant_2C=scale_2C * constant_2C,
        fixed_2SC=scale_2C[:, None] * fixed_2SC,
        sparse_2CF=scale_2C[..., None] * sparse_2CF,
        denser_2CF=scale_2C[..., None] * denser_2F[:, None],
        pair_2C=scale_2C * layer_2F[:, PAIRS, None],
        exchange_2SC=exchange_2SC,
        exchange=cost.exchange,
        segments=cost.segments,
        chunk_of_layer_L=chunk_of_layer_L,
        dense_LS=dense_LS,
        slowness_RP=np.broadcast_to(scales.device_slowness_RP, devices),
        layers=layers,
    )


def as_lists(denser_2XF: np.ndarray, pair_2X: np.ndarray) -> np.ndarray:
    """``denser_2XF`` of a sample that is shared or in segments: a layer reads lists of all blocks,
    which are taken to be no faster than dense attention."""
    lists_2XF = np.zeros_like(denser_2XF)
    lists_2XF[..., VISIBLE] = pair_2X
    return np.maximum(lists_2XF, denser_2XF)


def _fixed_2SX(
    coefficients_2XF: np.ndarray, lengths_S: np.ndarray, visible_S: np.ndarray
) -> np.ndarray:
    """Ms of samples whatever their budgets."""
    return np.asarray(
        coefficients_2XF[:, None, :, SEQUENCES]
        + lengths_S[:, None] * coefficients_2XF[:, None, :, TOKENS]
        + visible_S[:, None] * coefficients_2XF[:, None, :, VISIBLE]
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


def _chunk_of_layer(job: Job) -> np.ndarray:
    owner = [
        (layer, stage * job.virtual_stages + chunk)
        for stage, chunks in enumerate(job.stage_layers)
        for chunk, layers in enumerate(chunks)
        for layer in layers
    ]
    return np.array([chunk for _, chunk in sorted(owner)], dtype=np.int64)
