# SPDX-License-Identifier: Apache-2.0
"""One reduction per step: what every rank measured, known to all ranks alike.

Shape legend: U length buckets, C = K + 6 columns, O rows of observations (one per micro-batch and
chunk, layer, sample); of times inside collectives X collectives of a chunk, Y segments, Z passes.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sparsebalance_megatron.attention.device import copied_to
from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.learn.measurement import (
    PASSES,
    CoverageTotals,
    Piece,
    RankPlace,
    StepMeasurement,
    StepTimes,
    lockstep_waiting,
)
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch
from sparsebalance_megatron.megatron.timing import COLLECTIVES_PER_LAYER
from sparsebalance_megatron.plan.coverage import length_bucket
from sparsebalance_megatron.plan.job import Job

BASE, EXECUTED, ONE, BASE_KNOWN = range(-4, 0)
"""Columns behind the K of the grid: coverage at base and at executed budgets, 1, and 1 where base
coverage is known."""
_EXTRA_COLUMNS = 4
DIGEST_BYTES = 6
"""Leading bytes of a digest that are compared: the largest count that float64 holds exactly."""


@dataclass(frozen=True, kw_only=True)
class ObservedCoverage:
    """This rank's coverage observations of one step, laid side by side.

    ``pieces`` says whose the rows are, ``group_O`` their ``layer * U + bucket``; ``values_OC``
    holds what was observed and two more columns, float64, on the device that observed, or is None
    where nothing was.
    """

    pieces: tuple[Piece, ...]
    group_O: np.ndarray
    values_OC: torch.Tensor | None

    @classmethod
    def gather(cls, seen: Iterable[LocalMicroBatch], buckets: int) -> "ObservedCoverage":
        """Gather what the layers of this rank's micro-batches observed, without padding documents.

        Ranks that share a micro-batch see the same, and only the first reports it; of segments, the
        last.
        """
        pieces, groups, rows = [], [], []
        for context in seen:
            context.join_observations()
            if not context.counts:
                continue
            layout = context.layout
            samples = layout.documents - context.padding_documents
            bucket_S = length_bucket(layout.grid.blocks_S[:samples]).astype(np.int64)
            for layer, seen_SK in context.observations.items():
                pieces.append(Piece(context.position, layer, samples))
                groups.append(layer * buckets + bucket_S)
                rows.append(seen_SK[:samples])
        values_OC = None
        if rows:
            # The same few operations on the device, however many observations.
            values_OC = torch.nn.functional.pad(torch.cat(rows).double(), (0, 2), value=1.0)
            values_OC[:, BASE_KNOWN] = values_OC[:, BASE].isfinite()
        return cls(
            pieces=tuple(pieces),
            group_O=np.concatenate(groups) if groups else np.empty(0, dtype=np.int64),
            values_OC=values_OC,
        )


@dataclass(eq=False)
class StepReducer:
    """Sums every rank's contribution in one all-reduce of one float64 buffer.

    The buffer has places for the times and the least coverage of every rank and stage and for the
    plan digest of every world rank, so that a plain sum also gathers. ``waited_ms`` is what the
    last reduction waited for the slowest rank.
    """

    job: Job
    place: RankPlace
    buckets: int
    grid_size: int
    device: torch.device
    waited_ms: float = field(default=0.0, init=False)

    def reduce(
        self,
        *,
        segments_M: Sequence[int] | np.ndarray,
        most_segments: int,
        times: StepTimes,
        observed: ObservedCoverage,
        loss_and_tokens: torch.Tensor | None,
        digest: bytes,
    ) -> tuple[StepMeasurement, np.ndarray]:
        """Measurements of all ranks, and [O] executed coverage of this rank; collective.

        Args:
            segments_M, most_segments: of this rank's micro-batches; of one of any rank.
            loss_and_tokens: [2] sum of losses and tokens, on last stages; None elsewhere.
            digest: of the plan this rank executed.
        """
        shapes = self._shapes(len(segments_M), most_segments)
        host = torch.zeros(sum(map(math.prod, shapes.values())), dtype=torch.float64)
        part = _views(host, shapes)
        part["digests"][self.place.world_rank] = digest_number(digest)
        # Tensor-parallel ranks all measure the same.
        if self.place.tensor_parallel_rank == 0:
            here = self.place.data_parallel_rank, self.place.pipeline_rank
            times_2VM = part["times"][(slice(None), *here)]
            times_2VM[:] = math.nan
            segments_ms = defaultdict(list)
            for span in times.spans:
                which = list(Direction).index(Direction(span.direction)), span.chunk, span.position
                segments_ms[which].append(span.ms)
            for which, each_ms in segments_ms.items():
                # Where a segment is unmeasured, the micro-batch is.
                if len(each_ms) == segments_M[which[2]]:
                    times_2VM[which] = sum(each_ms)
            inside_VMYXZ = part["inside"][here]
            if times.collectives is None:
                inside_VMYXZ[:] = math.nan
            for place, ms in times.collectives or ():
                inside_VMYXZ[place] += ms
            part["schedule"][here] = times.schedule_ms
            flat = copied_to(host, self.device)
            self._put(_views(flat, shapes), here, observed, loss_and_tokens)
        else:
            flat = copied_to(host, self.device)
        values_OC = observed.values_OC
        own_O = flat[:0] if values_OC is None else values_OC[:, EXECUTED]
        summed, own_O = self._sum(flat, own_O)
        return self._measurement(_views(summed, shapes)), own_O.numpy()

    def _shapes(self, micro_batches: int, segments: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the parts of the buffer."""
        job, stages = self.job, (self.job.data_parallel_size, self.job.pipeline_stages)
        layers = max(len(chunk) for stage in job.stage_layers for chunk in stage)
        collectives = COLLECTIVES_PER_LAYER * layers if job.lockstep_ranks > 1 else 0
        chunks = (*stages, job.virtual_stages, micro_batches)
        return {
            "digests": (self.place.world_size,),
            "times": (2, *chunks),
            "inside": (*chunks, segments, collectives, PASSES),
            "schedule": stages,
            "minima": stages,
            "counts": (job.layers, self.buckets),
            "coverage": (job.layers, self.buckets, self.grid_size + _EXTRA_COLUMNS),
            "unobserved": (1,),
            "loss": (2,),
        }

    def _put(
        self,
        part: dict[str, torch.Tensor],
        here: tuple[int, int],
        observed: ObservedCoverage,
        loss_and_tokens: torch.Tensor | None,
    ) -> None:
        """Add what is on the device."""
        if observed.values_OC is None:
            part["minima"][here].fill_(math.inf)
        else:
            values_OC = observed.values_OC
            # One bad number of a document must not become the whole step's.
            broken_O = ~values_OC[:, EXECUTED].isfinite()
            # A document that was not routed has no curve, and all else.
            routed_O = values_OC.isfinite().all(1)
            values_OC = values_OC.masked_fill(broken_O[:, None] | ~values_OC.isfinite(), 0.0)
            group_O = copied_to(torch.from_numpy(observed.group_O), self.device)
            part["coverage"].view(-1, values_OC.shape[1]).index_add_(0, group_O, values_OC)
            part["counts"].view(-1).index_add_(0, group_O, routed_O.double())
            part["unobserved"][:] = broken_O.sum()
            part["minima"][here] = values_OC[:, EXECUTED].masked_fill(broken_O, math.inf).min()
        if loss_and_tokens is not None:
            part["loss"][:] = loss_and_tokens

    def _sum(self, flat: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffer summed over ranks, and what is this rank's own, on the host."""
        began_s = time.perf_counter()
        torch.distributed.all_reduce(flat)
        # The only copy of a step that the host waits for.
        summed, own = torch.cat([flat, own]).cpu().split([len(flat), len(own)])
        self.waited_ms = (time.perf_counter() - began_s) * 1e3
        return summed, own

    def _measurement(self, summed: dict[str, torch.Tensor]) -> StepMeasurement:
        part = {name: values.numpy() for name, values in summed.items()}
        sums_LUC, counts_LU = part["coverage"], part["counts"]
        extra_LC = sums_LUC[..., -_EXTRA_COLUMNS:].sum(axis=1)
        loss, tokens = part["loss"]
        return StepMeasurement(
            times_2RPVM=part["times"],
            waiting_2RPVM=lockstep_waiting(part["inside"], self.job.lockstep_ranks)
            if self.job.lockstep_ranks > 1
            else None,
            schedule_ms=part["schedule"],
            coverage=CoverageTotals(
                sums_LUK=sums_LUC[..., :-_EXTRA_COLUMNS],
                counts_LU=counts_LU,
                executed_L=extra_LC[:, EXECUTED],
                base_sum=float(extra_LC[:, BASE].sum()),
                base_count=float(extra_LC[:, BASE_KNOWN].sum()),
                counts_L=extra_LC[:, ONE],
                minimum=float(part["minima"].min()),
                unobserved=int(part["unobserved"][0]),
            ),
            lm_loss=float(loss / tokens) if tokens else math.nan,
            tokens=int(tokens),
            differing_ranks=differing_ranks(part["digests"]),
        )


def _views(flat: torch.Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The parts of a buffer, by name."""
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {
        name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def digest_number(digest: bytes) -> int:
    """A plan's digest as a number that ranks can compare, in float64 too."""
    return int.from_bytes(digest[:DIGEST_BYTES], "big")


def differing_ranks(numbers: np.ndarray) -> tuple[int, ...]:
    """Places of the digest numbers that are not the first one's."""
    return tuple(np.flatnonzero(numbers != numbers[0]).tolist())
