# SPDX-License-Identifier: Apache-2.0
"""Every rank reduces one step twice: with the plan of all others, then with one of its own.

    reducing_rank.py DIRECTORY

leaves ``same-rank0.pt``, ``own-rank0.pt`` and so on: what each rank learnt.
"""

import math
import os
import sys
from collections.abc import Sequence

import torch

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.learn.measurement import (
    RankPlace,
    Span,
    StepMeasurement,
    StepTimes,
)
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch
from sparsebalance_megatron.plan.coverage import budget_grid
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.run.step_reducer import ObservedCoverage, StepReducer

GRID = budget_grid(4)
BUCKETS = 3
RANKS = 2
JOB = Job(
    data_parallel_size=RANKS, micro_batches=2, stage_layers=(((0, 1),),), lockstep_ranks=RANKS
)


def seen(rank: int, layer: int) -> LocalMicroBatch:
    """Two samples of 1 and 4 blocks, then padding that must not count."""
    coverage = 0.5 + 0.1 * rank + 0.01 * layer
    # At the budgets of the grid, base budgets and executed ones.
    row_K = [coverage] * len(GRID) + [coverage + 0.05, coverage]
    seen_SK = torch.tensor([[1.0] * len(row_K), row_K, [math.nan] * len(row_K)])
    return observed_micro_batch(
        (0, 5, 69, 72), {layer: seen_SK}, position=layer, padding_documents=1
    )


def observed_micro_batch(
    cu_seqlens: Sequence[int],
    observations: dict[int, torch.Tensor],
    *,
    position: int = 0,
    padding_documents: int = 0,
) -> LocalMicroBatch:
    """A micro-batch whose layers have observed their coverage."""
    return LocalMicroBatch(
        observations=observations,
        layout=packed_layout(cu_seqlens, 16, "cpu"),
        budgets_LS=torch.ones(2, len(cu_seqlens) - 1, dtype=torch.int32),
        max_budgets=(1, 1),
        observe=True,
        position=position,
        padding_documents=padding_documents,
    )


def reduce_on_rank(rank: int, digest: bytes) -> StepMeasurement:
    place = RankPlace(
        data_parallel_rank=rank,
        pipeline_rank=0,
        tensor_parallel_rank=0,
        world_rank=rank,
        world_size=RANKS,
    )
    reducer = StepReducer(
        JOB, place, buckets=BUCKETS, grid_size=len(GRID), device=torch.device("cpu")
    )
    spans = [("forward", 0, 1.0 + rank), ("backward", 0, 10.0 + rank)]
    spans += [("forward", 1, 0.5), ("backward", 1, 15.0), ("backward", 1, 5.0 + rank)]
    if rank == 0:
        spans.append(("forward", 1, 1.5))
    measured, _ = reducer.reduce(
        segments_M=(1, 2),
        most_segments=2,
        times=StepTimes(
            schedule_ms=40.0 + rank,
            start_unix_s=None,
            spans=tuple(
                Span(direction, 0, position, 5.0, 5.0 + ms) for direction, position, ms in spans
            ),
            # Rank 1 waits 0.5 ms in a collective of forward 0, rank 0 6 ms in two of backward 0. In
            # backward 1 each waits 3 ms in a segment of its own, 1 ms in a pass of its own.
            collectives=(
                ((0, 0, 0, 1, 0), 0.25),
                ((0, 0, 0, 2, 0), 0.25 + 0.5 * rank),
                *(((0, 0, 0, number, 1), 1.0 + 3.0 * (1 - rank)) for number in (4, 5)),
                *(((0, 1, 0, 4, 1), 0.5 + 3.0 * (1 - rank)), ((0, 1, 1, 4, 1), 0.5 + 3.0 * rank)),
                *(((0, 1, 1, 5, 1), 0.5 + 1.0 * (1 - rank)), ((0, 1, 1, 5, 2), 0.5 + 1.0 * rank)),
            ),
        ),
        observed=ObservedCoverage.gather((seen(rank, layer) for layer in (0, 1)), BUCKETS),
        loss_and_tokens=torch.tensor([6.0 * (rank + 1), 3.0]),
        digest=digest,
    )
    return measured


if __name__ == "__main__":
    directory, rank = sys.argv[1], int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    for name, digest in (("same", b"same digest"), ("own", f"{rank}: own digest".encode())):
        torch.save(reduce_on_rank(rank, digest), f"{directory}/{name}-rank{rank}.pt")
    torch.distributed.destroy_process_group()
