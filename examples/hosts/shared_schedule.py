# SPDX-License-Identifier: Apache-2.0
"""Schedules whose micro-batches ranks share, for frameworks that run such schedules already.

The process that schedules plans; placement and cp_sizes are ours, execution is the framework's.

NeMo-RL's driver (its draft of dynamic context parallelism, pull request 4125) sends what it plans
to Ray workers:

    dynamic_context_parallel.plan_cp_phases = hosts.shared_schedule.cp_phases(config, job)

Megatron's ``DefaultDynamicCPScheduler`` is a class that verl (pull request 6555) and
Megatron-Bridge ask for groups:

    schedule = hosts.shared_schedule.Scheduler(config, job)
    verl.utils.dynamic_cp_scheduler.get_megatron_dynamic_cp_scheduler_cls = lambda: schedule

``job`` is an ``integration.HostJob``, whose ranks and token cap follow the framework's. In verl,
:mod:`.verl_shared` lets workers attend with the plan's budgets as well.

Tested for the promises of both forms, as NeMo-RL 47cd040 (2026-09) and verl 27d8693 (2026-07) state
them; NeMo-RL's types are stubs. Never run with either framework, whose workers need GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sparsebalance_megatron import SparseBalanceConfig, integration


def planned(
    config: SparseBalanceConfig,
    job: integration.HostJob,
    lengths: Sequence[int],
    *,
    ranks: int,
    cap_tokens: int,
    largest: int,
    group_size: int | None = None,
    pad_samples_to: int = 1,
) -> integration.PlannedStep:
    """A plan of so many ranks under a cap on what each holds of a micro-batch."""
    job = replace(
        job,
        layout=replace(job.layout, data_parallel_size=ranks, micro_batch_group_size=group_size),
        max_sample_tokens=max(lengths),
        global_batch_size=len(lengths),
        pad_samples_to=pad_samples_to,
    )
    config = replace(config, max_tokens_per_micro_batch=cap_tokens, max_context_parallel=largest)
    return integration.HostPlanner(config, job).plan(lengths)


class Scheduler:
    """Megatron's ``DefaultDynamicCPScheduler``, class and object; ``planned`` is the last plan.

    Args:
        run: of :func:`.integration.begin_host_run` on a worker, whose planner knows what its steps
            taught; None is a planner that knows nothing yet.
    """

    def __init__(self, config: SparseBalanceConfig, job: Any, run: Any = None) -> None:
        self._config, self._job, self._run = config, job, run
        self._sizes: dict[str, Any] = {}
        self.planned: Any = None

    def __call__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None = None,
        min_cp_size: int = 1,
    ) -> Scheduler:
        assert min_cp_size == 1, "sparse balance: min_cp_size; use 1"
        ranks = dp_size * cp_size
        self._sizes = {
            "ranks": ranks,
            "cap_tokens": max_seqlen_per_dp_cp_rank,
            "largest": ranks & -ranks,  # the largest power of two that divides them
            "group_size": microbatch_group_size_per_vp_stage,
        }
        return self

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]]
    ) -> list[list[list[int]]]:
        """[micro-batch][rank] -> ids of the samples that the rank takes part in."""
        ids, lengths = zip(*sample_id_seqlens, strict=True)
        if self._run is not None:
            self.planned = self._run.planner.plan(lengths)
        else:
            self.planned = planned(self._config, self._job, lengths, **self._sizes)
        plan = self.planned.plan
        ranks = [plan.for_rank(rank).micro_batches for rank in range(plan.data_parallel_size)]
        return [
            [[ids[sample] for sample in micro_batch.samples] for micro_batch in at_position]
            for at_position in zip(*ranks, strict=True)
        ]


def cp_phases(config: SparseBalanceConfig, job: integration.HostJob) -> Callable[..., Any]:
    """NeMo-RL's ``plan_cp_phases``: a group per position, with a task for every micro-batch."""

    def plan_cp_phases(
        lengths: list[int],
        *,
        lanes: int,
        min_size: int,
        max_size: int,
        tokens_per_rank: int,
        sequence_parallel_size: int,
        user_pad_multiple: int,
        token_alignment: int = 1,
        atomic_groups: Any = None,
        align_full_domain_collectives: bool = False,  # all ranks have as many positions anyway
    ) -> tuple[Any, ...]:
        from nemo_rl.distributed.dynamic_context_parallel import CPAssignment, CPSyncGroup

        assert min_size == 1, "sparse balance: dynamic context parallelism's min_size; use 1"
        assert atomic_groups is None, "sparse balance: samples are placed one by one, not in pairs"

        def multiple(cp_size: int) -> int:
            """Divisor of every sample's tokens: NeMo-RL cuts each in two chunks per rank."""
            chunks = 2 * cp_size if cp_size > 1 else 1
            return math.lcm(user_pad_multiple, chunks * sequence_parallel_size * token_alignment)

        if not lengths:  # asked at start-up, to check the flags
            return ()
        step = planned(
            config,
            job,
            lengths,
            ranks=lanes,
            cap_tokens=tokens_per_rank,
            largest=max_size,
            pad_samples_to=multiple(max_size),
        )
        positions: dict[int, list[Any]] = {}
        for micro_batch in step.plan.micro_batches:
            pad = multiple(micro_batch.cp_size)
            tokens = sum(-(-lengths[sample] // pad) * pad for sample in micro_batch.samples)
            task = CPAssignment(
                sample_indices=micro_batch.samples,
                lane_start=micro_batch.rank,
                cp_size=micro_batch.cp_size,
                pad_multiple=pad,
                padded_tokens=tokens,
            )
            positions.setdefault(micro_batch.position, []).append(task)
        return tuple(CPSyncGroup(tuple(tasks)) for _, tasks in sorted(positions.items()))

    return plan_cp_phases
