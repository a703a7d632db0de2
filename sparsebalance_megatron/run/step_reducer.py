# SPDX-License-Identifier: Apache-2.0
"""One reduction per step: what every rank measured, known to all ranks alike.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, L layers,
U length buckets, K budgets of the grid, C = K + 5 columns, O rows of observations,
2 forward and backward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch

from sparsebalance_megatron.learn.measurement import (
    CoverageTotals,
    RankPlace,
    RecomputeTotals,
    StepMeasurement,
    StepTimes,
)
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.run.agreement import differing_ranks, digest_number
from sparsebalance_megatron.run.observed_coverage import (
    BASE,
    EXECUTED,
    EXTRA_COLUMNS,
    GROWN,
    LOST_TOKENS,
    TOKENS,
    ObservedCoverage,
)


class StepReducer:
    """Sums every rank's contribution in one all-reduce of one float64 buffer.

    The buffer has micro-batches for the times and the least coverage of every rank and stage and
    for the plan digest of every world rank, so that a plain sum also gathers. Its size follows the
    number of micro-batches, which may differ between steps and not between ranks.

    Args:
        group: process group of all ranks; None is the default group.
        device: where the buffer lives; the group's backend must reach it.
        clock: seconds, for the time that the reduction waits.

    Attributes:
        waited_ms: of the last reduction, spent in the collective: until the slowest rank came.
    """

    def __init__(
        self,
        job: Job,
        place: RankPlace,
        *,
        buckets: int,
        grid_size: int,
        group: torch.distributed.ProcessGroup | None,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._place = place
        self._here = (place.data_parallel_rank, place.pipeline_rank)
        self._micro_batch = place.data_parallel_rank * job.pipeline_stages + place.pipeline_rank
        self._group = group
        self._device = device
        self._clock = clock
        self._buckets = buckets
        stages = (job.data_parallel_size, job.pipeline_stages)
        self._times_shape = (2, *stages, job.virtual_stages, -1)
        self._coverage_shape = (job.layers, buckets, grid_size + EXTRA_COLUMNS)
        sizes = {
            "digests": place.world_size,
            "schedule": math.prod(stages),
            "counts": job.layers * buckets,
            "unobserved": 1,
            "recompute": 3,
            "minima": math.prod(stages),
            "coverage": math.prod(self._coverage_shape),
            "loss": 2,
        }
        ends = np.cumsum(list(sizes.values())).tolist()
        self._parts = {
            name: slice(end - size, end)
            for (name, size), end in zip(sizes.items(), ends, strict=True)
        }
        # As many as the step has micro-batches.
        self._parts["times"] = slice(ends[-1], None)
        self._times_per_position = 2 * math.prod(stages) * job.virtual_stages
        self.waited_ms = 0.0

    def reduce(
        self,
        *,
        times: StepTimes,
        observed: ObservedCoverage,
        loss_and_tokens: torch.Tensor | None,
        digest: bytes,
        recompute: torch.Tensor | None = None,
    ) -> StepMeasurement:
        """Collective over the group: every rank must call it once per step.

        Args:
            times, observed: of this rank.
            loss_and_tokens: [2] sum of losses and tokens, on last stages; None elsewhere.
            recompute: [3] of :meth:`.kept_attention.RecomputeCounts.totals`, summed over
                micro-batches; None where there are none.
            digest: of the plan this rank executed.
        """
        times_size = self._times_per_position * times.forward_VM.shape[1]
        host = np.zeros(self._parts["times"].start + times_size)
        host[self._parts["digests"]][self._place.world_rank] = digest_number(digest)
        if self._place.reports:
            group_O = observed.group_O(self._buckets)
            self._put_on_host(host, times)
            flat = torch.from_numpy(host).to(self._device)
            self._put_on_device(flat, observed, group_O, loss_and_tokens)
            if recompute is not None:
                flat[self._parts["recompute"]] = recompute.to(self._device)
        else:
            flat = torch.from_numpy(host).to(self._device)
        return self._unpack(self._sum(flat))

    def _put_on_host(self, host: np.ndarray, times: StepTimes) -> None:
        times_2RPVM = host[self._parts["times"]].reshape(self._times_shape)
        times_2RPVM[(slice(None), *self._here)] = times.forward_VM, times.backward_VM
        host[self._parts["schedule"]][self._micro_batch] = times.schedule_ms

    def _put_on_device(
        self,
        flat: torch.Tensor,
        observed: ObservedCoverage,
        bucket_of_O: np.ndarray,
        loss_and_tokens: torch.Tensor | None,
    ) -> None:
        minima = flat[self._parts["minima"]]
        if observed.values_OC is None:
            minima[self._micro_batch] = math.inf
        else:
            values_OC = observed.values_OC.to(self._device)
            # One bad number of a document must not become the whole step's.
            broken_O = ~values_OC.isfinite().all(1)
            values_OC = values_OC.masked_fill(broken_O[:, None], 0.0)
            group_O = torch.from_numpy(bucket_of_O).to(self._device)
            sums = flat[self._parts["coverage"]].view(-1, self._coverage_shape[-1])
            sums.index_add_(0, group_O, values_OC)
            flat[self._parts["counts"]].index_add_(0, group_O, (~broken_O).to(flat.dtype))
            flat[self._parts["unobserved"]] = broken_O.sum()
            minima[self._micro_batch] = values_OC[:, EXECUTED].masked_fill(broken_O, math.inf).min()
        if loss_and_tokens is not None:
            flat[self._parts["loss"]] = loss_and_tokens.to(self._device)

    def _sum(self, flat: torch.Tensor) -> np.ndarray:
        """The buffer summed over ranks, on the host."""
        began = self._clock()
        torch.distributed.all_reduce(flat, group=self._group)
        summed = flat.cpu().numpy()
        self.waited_ms = (self._clock() - began) * 1e3
        return summed

    def _unpack(self, flat: np.ndarray) -> StepMeasurement:
        part = {name: flat[place] for name, place in self._parts.items()}
        loss = part["loss"]
        sums_LUC = part["coverage"].reshape(self._coverage_shape)
        extra_LC = sums_LUC[..., -EXTRA_COLUMNS:].sum(axis=1)
        counts_LU = part["counts"].reshape(self._coverage_shape[:2])
        return StepMeasurement(
            times_2RPVM=part["times"].reshape(self._times_shape),
            schedule_ms=part["schedule"].reshape(self._times_shape[1:3]),
            coverage=CoverageTotals(
                sums_LUK=sums_LUC[..., :-EXTRA_COLUMNS],
                counts_LU=counts_LU,
                executed_L=extra_LC[:, EXECUTED],
                executed_sum=float(extra_LC[:, EXECUTED].sum()),
                base_sum=float(extra_LC[:, BASE].sum()),
                count=float(counts_LU.sum()),
                minimum=float(part["minima"].min()),
                grown=float(extra_LC[:, GROWN].sum()),
                tokens=float(extra_LC[:, TOKENS].sum()),
                lost_tokens=float(extra_LC[:, LOST_TOKENS].sum()),
                unobserved=int(part["unobserved"][0]),
            ),
            lm_loss=float(loss[0] / loss[1]) if loss[1] else math.nan,
            tokens=int(loss[1]),
            differing_ranks=differing_ranks(part["digests"]),
            recompute=RecomputeTotals(*(int(count) for count in part["recompute"])),
        )
