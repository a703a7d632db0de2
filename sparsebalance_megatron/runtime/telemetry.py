# SPDX-License-Identifier: Apache-2.0
"""One reduction per step: what every rank measured, known to all ranks alike.

Shape legend: D data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, W world
ranks, L layers, U length buckets, K grid of budgets, S samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from sparsebalance_megatron.plan.coverage import length_bucket
from sparsebalance_megatron.plan.step_plan import JobShape
from sparsebalance_megatron.runtime.packed_params import MicroBatchContext

_DIGEST_BYTES = 6
"""Leading digest bytes compared: the largest count that float64 holds exactly."""


class PlanMismatchError(RuntimeError):
    """Ranks computed different plans for the same step."""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where this rank stands in the job."""

    data_parallel_rank: int
    pipeline_rank: int
    tensor_parallel_rank: int
    world_rank: int
    world_size: int

    @property
    def reports(self) -> bool:
        """Tensor-parallel ranks see the same; the first of them speaks for all."""
        return self.tensor_parallel_rank == 0


@dataclass(frozen=True, kw_only=True)
class CoverageTotals:
    """Sums over samples and layers; divide by the counts to get means.

    ``sums_LUK`` and ``counts_LU`` feed the coverage curves. ``executed_sum``, ``base_sum`` and
    ``count`` cover every (sample, layer) pair, ``minimum`` is the least executed coverage and
    ``grown`` counts pairs whose budget the guard raised.
    """

    sums_LUK: np.ndarray
    counts_LU: np.ndarray
    executed_sum: float
    base_sum: float
    count: float
    minimum: float
    grown: float


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """What happened in one step, identical on every rank. Times in ms, NaN where unmeasured."""

    forward_ms: np.ndarray
    """[D, P, V, M]"""
    backward_ms: np.ndarray
    """[D, P, V, M]"""
    schedule_ms: np.ndarray
    """[D, P] from the start of the step to the stage's last backward."""
    coverage: CoverageTotals
    lm_loss: float
    tokens: int
    digest_mismatches: int


def local_coverage(
    contexts: Iterable[tuple[MicroBatchContext, int]], layers: int, buckets: int, grid_size: int
) -> torch.Tensor:
    """Coverage totals of this rank as one flat float64 tensor on the device.

    Args:
        contexts: (context, number of planned samples) of this rank's micro-batches; padding
            sequences come after the planned samples and are left out.

    Returns:
        sums [L * U * K], counts [L * U], executed sum, base sum, count, grown; then the minimum.
    """
    pieces = [
        (layer, context, samples, observation)
        for context, samples in contexts
        for layer, observation in context.observations.items()
    ]
    device = pieces[0][3].grid_SK.device if pieces else torch.device("cpu")
    sums_LUK = torch.zeros(layers, buckets, grid_size, dtype=torch.float64, device=device)
    counts_LU = torch.zeros(layers, buckets, dtype=torch.float64, device=device)
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    minimum = torch.full((1,), math.inf, dtype=torch.float64, device=device)
    for layer, context, samples, observation in pieces:
        bucket_S = torch.tensor(
            [length_bucket(blocks) for blocks in context.layout.blocks_per_document[:samples]],
            device=device,
        )
        executed_S = observation.executed_S[:samples].double()
        sums_LUK[layer].index_add_(0, bucket_S, observation.grid_SK[:samples].double())
        counts_LU[layer].index_add_(0, bucket_S, torch.ones_like(executed_S))
        totals[0] += executed_S.sum()
        totals[1] += observation.base_S[:samples].double().sum()
        totals[2] += samples
        totals[3] += observation.grown_S[:samples].double().sum()
        minimum = torch.minimum(minimum, executed_S.min())
    return torch.cat([sums_LUK.flatten(), counts_LU.flatten(), totals, minimum])


class StepReducer:
    """Sums every rank's contribution in one all-reduce of one float64 buffer.

    The buffer has slots for the times and the least coverage of every (D, P) pair and for the plan
    digest of every world rank, so that a plain sum also gathers.

    Args:
        group: process group of all ranks; None is the default group.
        device: where the buffer lives; the group's backend must reach it.
    """

    def __init__(
        self,
        job: JobShape,
        place: RankPlace,
        *,
        buckets: int,
        grid_size: int,
        group: torch.distributed.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._job = job
        self._place = place
        self._group = group
        self._device = device
        self._buckets = buckets
        self._grid_size = grid_size
        stages = (job.data_parallel_size, job.pipeline_stages)
        self._times_shape = (2, *stages, job.virtual_stages, job.micro_batches)
        self._coverage_size = job.layers * buckets * (grid_size + 1) + 4
        self._sizes = (
            math.prod(self._times_shape),
            place.world_size,
            math.prod(stages),
            math.prod(stages),
            self._coverage_size,
            2,
        )

    def reduce(
        self,
        *,
        forward_VM: np.ndarray,
        backward_VM: np.ndarray,
        schedule_ms: float,
        contexts: Iterable[tuple[MicroBatchContext, int]],
        loss_and_tokens: torch.Tensor | None,
        digest: bytes,
    ) -> StepMeasurement:
        """Collective over the group: every rank must call it once per step.

        Args:
            forward_VM, backward_VM: this rank's ms, NaN where unmeasured.
            schedule_ms: from the start of the step to this rank's last backward.
            contexts: this rank's micro-batches and their sample counts.
            loss_and_tokens: [2] sum of losses and tokens, on last stages; None elsewhere.
            digest: of the plan this rank executed.
        """
        times, digests, minima, schedule, coverage, loss = self._empty_parts()
        place = self._place
        digests[place.world_rank] = int.from_bytes(digest[:_DIGEST_BYTES], "big")
        if place.reports:
            here = (place.data_parallel_rank, place.pipeline_rank)
            times[0][here] = torch.as_tensor(forward_VM)
            times[1][here] = torch.as_tensor(backward_VM)
            local = local_coverage(contexts, self._job.layers, self._buckets, self._grid_size)
            coverage = local[:-1].to(self._device)
            slot = here[0] * self._job.pipeline_stages + here[1]
            minima[slot] = local[-1].to(self._device)
            schedule[slot] = schedule_ms
            if loss_and_tokens is not None:
                loss = loss_and_tokens.to(device=self._device, dtype=torch.float64)
        flat = torch.cat(
            [times.flatten().to(self._device), digests, minima, schedule, coverage, loss]
        )
        torch.distributed.all_reduce(flat, group=self._group)
        return self._unpack(flat.cpu().numpy())

    def _empty_parts(self) -> tuple[torch.Tensor, ...]:
        times, *others = (torch.zeros(size, dtype=torch.float64) for size in self._sizes)
        return (times.view(self._times_shape), *(part.to(self._device) for part in others))

    def _unpack(self, flat: np.ndarray) -> StepMeasurement:
        times, digests, minima, schedule, coverage, loss = np.split(
            flat, np.cumsum(self._sizes)[:-1]
        )
        forward, backward = times.reshape(self._times_shape)
        return StepMeasurement(
            forward_ms=forward,
            backward_ms=backward,
            schedule_ms=schedule.reshape(self._times_shape[1:3]),
            coverage=self._coverage(coverage, float(minima.min())),
            lm_loss=float(loss[0] / loss[1]) if loss[1] else math.nan,
            tokens=int(loss[1]),
            digest_mismatches=int((digests != digests[0]).sum()),
        )

    def _coverage(self, flat: np.ndarray, minimum: float) -> CoverageTotals:
        layers, buckets, grid_size = self._job.layers, self._buckets, self._grid_size
        sums, counts, totals = np.split(
            flat, np.cumsum([layers * buckets * grid_size, layers * buckets])
        )
        executed_sum, base_sum, count, grown = (float(total) for total in totals)
        return CoverageTotals(
            sums_LUK=sums.reshape(layers, buckets, grid_size),
            counts_LU=counts.reshape(layers, buckets),
            executed_sum=executed_sum,
            base_sum=base_sum,
            count=count,
            minimum=minimum,
            grown=grown,
        )
