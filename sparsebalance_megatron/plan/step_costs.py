# SPDX-License-Identifier: Apache-2.0
"""What every sample costs on every chunk of the pipeline, in ms, as a function of its budgets.

Costs are affine in the features, so a slot costs a constant plus the sum over its samples, and only
the block pairs depend on budgets. Everything the planner optimises is built from these terms. Sums
run in a fixed order and not through BLAS, whose rounding differs between processors: ranks must
agree to the last bit.

Shape legend: S samples of a global batch, L layers, C = P x V chunks (chunk v of stage p is
``p * V + v``), D ranks, M micro-batches, P stages, V chunks per stage, J = D x M slots, F features,
I ranks looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sparsebalance_megatron.cost.features import (
    FEATURES,
    attended_block_pairs,
    visible_block_pairs,
)
from sparsebalance_megatron.cost.model import CostModel, Direction, Part
from sparsebalance_megatron.cost.stage_calibration import StageScales
from sparsebalance_megatron.plan.step_plan import JobShape, PlanError

_LAYER_PARTS = (Part.ATTENTION, Part.ROUTER, Part.LINEAR)
_MICRO_BATCHES, _SEQUENCES, _TOKENS, _PAIRS, _VISIBLE = range(len(FEATURES))


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Predicted cost terms of the samples of one step.

    ``constant_*``: ms of a micro-batch whatever it holds. ``fixed_*``: ms of a sample whatever its
    budgets. ``pair_*``: ms of a block pair in one layer of the chunk. ``slowness_DP``: factors on
    all times of a rank in a stage.
    """

    block_size: int
    lengths_tokens_S: np.ndarray
    blocks_S: np.ndarray
    constant_forward_C: np.ndarray
    constant_backward_C: np.ndarray
    fixed_forward_SC: np.ndarray
    fixed_backward_SC: np.ndarray
    pair_forward_C: np.ndarray
    pair_backward_C: np.ndarray
    chunk_of_layer_L: np.ndarray
    slowness_DP: np.ndarray
    data_parallel_size: int
    micro_batches: int
    pipeline_stages: int
    virtual_stages: int

    def of(self, samples: slice) -> StepCosts:
        """Those of some of the samples."""
        return replace(
            self,
            lengths_tokens_S=self.lengths_tokens_S[samples],
            blocks_S=self.blocks_S[samples],
            fixed_forward_SC=self.fixed_forward_SC[samples],
            fixed_backward_SC=self.fixed_backward_SC[samples],
        )

    @property
    def chunks(self) -> int:
        return self.pipeline_stages * self.virtual_stages

    @property
    def pair_ms_L(self) -> np.ndarray:
        """Forward and backward ms of a block pair in each layer."""
        return (self.pair_forward_C + self.pair_backward_C)[self.chunk_of_layer_L]

    def block_pairs(self, budgets: np.ndarray) -> np.ndarray:
        """Block pairs of every sample at budgets of shape [..., S]."""
        return attended_block_pairs(self.lengths_tokens_S, budgets, self.block_size)

    def sample_ms(self, budgets_LS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward ms of every sample on every chunk, [S, C] each."""
        pairs_CS = np.zeros((self.chunks, len(self.lengths_tokens_S)))
        np.add.at(pairs_CS, self.chunk_of_layer_L, self.block_pairs(budgets_LS))
        pairs_SC = pairs_CS.T
        return (
            self.fixed_forward_SC + pairs_SC * self.pair_forward_C,
            self.fixed_backward_SC + pairs_SC * self.pair_backward_C,
        )

    def slot_ms(
        self, sample_forward_SC: np.ndarray, sample_backward_SC: np.ndarray, slot_of_S: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward ms [D, P, V, M]; slot ``d * M + m`` is micro-batch m of rank d."""
        slots = self.data_parallel_size * self.micro_batches
        forward_JC = np.tile(self.constant_forward_C, (slots, 1))
        backward_JC = np.tile(self.constant_backward_C, (slots, 1))
        np.add.at(forward_JC, slot_of_S, sample_forward_SC)
        np.add.at(backward_JC, slot_of_S, sample_backward_SC)
        ranks_D = np.arange(self.data_parallel_size)
        return self.grid_IPVM(forward_JC, ranks_D), self.grid_IPVM(backward_JC, ranks_D)

    def grid_IPVM(self, ms_JC: np.ndarray, ranks_I: np.ndarray) -> np.ndarray:
        """[I, P, V, M] ms of the slots of whole ranks, from what an average device would take."""
        shape = (-1, self.micro_batches, self.pipeline_stages, self.virtual_stages)
        ms_IPVM = ms_JC.reshape(shape).transpose(0, 2, 3, 1)
        return ms_IPVM if self._alike else ms_IPVM * self.slowness_DP[ranks_I][..., None, None]

    @cached_property
    def _alike(self) -> bool:
        """All devices are: the usual case, and searching asks for times very often."""
        return bool((self.slowness_DP == 1.0).all())

    @property
    def slowness_D(self) -> np.ndarray:
        """Of whole ranks: that of their slowest stage, which the others wait for."""
        return self.slowness_DP.max(axis=1)


def step_costs(
    lengths_tokens: Sequence[int], job: JobShape, cost: CostModel, scales: StageScales
) -> StepCosts:
    """Cost terms of the samples of one step in this job.

    Raises:
        PlanError: a length is not positive, ``stage_layers`` is not a partition of the layers, or
            the calibration belongs to another pipeline.
    """
    lengths_S = np.asarray(lengths_tokens, dtype=np.int64)
    if lengths_S.size == 0 or lengths_S.min() < 1:
        raise PlanError(f"a sample has {lengths_S.min(initial=0)} tokens, at least 1 needed")
    chunk_of_layer_L = _chunk_of_layer(job)
    chunks = job.pipeline_stages * job.virtual_stages
    if np.shape(scales.forward_PV) != (job.pipeline_stages, job.virtual_stages):
        raise PlanError(
            f"calibration scales have shape {np.shape(scales.forward_PV)}, the job "
            f"{(job.pipeline_stages, job.virtual_stages)} (stages, chunks)"
        )
    layers_C = np.bincount(chunk_of_layer_L, minlength=chunks)
    parts = {}
    for direction, scale_PV in (
        (Direction.FORWARD, scales.forward_PV),
        (Direction.BACKWARD, scales.backward_PV),
    ):
        layer = np.zeros(len(FEATURES))
        for part in _LAYER_PARTS:
            layer += cost.coefficients_ms(part, direction)
        coefficients_CF = layers_C[:, None] * layer
        coefficients_CF[0] += cost.coefficients_ms(Part.EMBEDDING, direction)
        coefficients_CF[-1] += cost.coefficients_ms(Part.HEAD, direction)
        scale_C = np.asarray(scale_PV, dtype=np.float64).ravel()
        visible_S = visible_block_pairs(lengths_S, cost.block_size)
        fixed_SC = (
            coefficients_CF[:, _SEQUENCES]
            + lengths_S[:, None] * coefficients_CF[:, _TOKENS]
            + visible_S[:, None] * coefficients_CF[:, _VISIBLE]
        )
        parts[direction] = (
            scale_C * coefficients_CF[:, _MICRO_BATCHES],
            scale_C * fixed_SC,
            scale_C * layer[_PAIRS],
        )
    forward, backward = parts[Direction.FORWARD], parts[Direction.BACKWARD]
    devices = (job.data_parallel_size, job.pipeline_stages)
    if scales.slowness_DP is not None and scales.slowness_DP.shape != devices:
        raise PlanError(
            f"slowness of devices has shape {scales.slowness_DP.shape}, the job {devices} (ranks, "
            "stages)"
        )
    slowness_DP = np.broadcast_to(scales.device_slowness_DP, devices)
    return StepCosts(
        block_size=cost.block_size,
        lengths_tokens_S=lengths_S,
        blocks_S=-(-lengths_S // cost.block_size),
        constant_forward_C=forward[0],
        constant_backward_C=backward[0],
        fixed_forward_SC=forward[1],
        fixed_backward_SC=backward[1],
        pair_forward_C=forward[2],
        pair_backward_C=backward[2],
        chunk_of_layer_L=chunk_of_layer_L,
        slowness_DP=slowness_DP,
        data_parallel_size=job.data_parallel_size,
        micro_batches=job.micro_batches,
        pipeline_stages=job.pipeline_stages,
        virtual_stages=job.virtual_stages,
    )


def _chunk_of_layer(job: JobShape) -> np.ndarray:
    if len({len(stage) for stage in job.stage_layers}) != 1:
        raise PlanError("stage_layers: every stage needs the same number of chunks")
    owner = [
        (layer, stage * job.virtual_stages + chunk)
        for stage, chunks in enumerate(job.stage_layers)
        for chunk, layers in enumerate(chunks)
        for layer in layers
    ]
    if sorted(layer for layer, _ in owner) != list(range(job.layers)):
        raise PlanError(
            f"stage_layers must hold every layer 0..{job.layers - 1} once, has "
            f"{sorted(layer for layer, _ in owner)}"
        )
    return np.array([chunk for _, chunk in sorted(owner)], dtype=np.int64)
