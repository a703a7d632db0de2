# SPDX-License-Identifier: Apache-2.0
"""slime's ``build_dp_schedule``: samples placed by predicted time under the token cap.

For the process that splits rollouts, which has no device: replace the name that it imports, in the
module of ``--rollout-function-path`` for example:

    slime.ray.rollout.build_dp_schedule = hosts.slime_schedule.build_dp_schedule

Budgets are chosen later, by :mod:`.slime` on the training ranks, where coverage is known.

Tested against slime 624b824 (2026-08-21): its own tests/test_dp_schedule.py, with this function in
the place of slime's. One of its nine tests does not hold and cannot: it expects the very partition
that slime's estimate of FLOPs gives.
"""

from __future__ import annotations

import logging
from typing import Any

from sparsebalance_megatron import SparseBalanceConfig, integration

logger = logging.getLogger(__name__)


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, int],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """Place the samples of a rollout; arguments, results and assertions are those of slime's.

    A sample above the token cap gets a micro-batch to itself, as there.
    """
    ranks = train_parallel_config["dp_size"]
    assert train_parallel_config["cp_size"] == 1, "sparse balance: context parallelism; use 1"
    samples_of: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        samples_of.setdefault(rollout, []).append(sample)
    steps = len(samples_of) // global_batch_size
    assert steps >= 1, f"num_rollouts ({len(samples_of)}) < global_batch_size ({global_batch_size})"
    left_over = len(samples_of) - steps * global_batch_size
    if left_over:
        logger.warning("sparse balance: %d rollouts fill no step and are dropped", left_over)

    planner, cap_tokens = _placing_planner(args, train_parallel_config, total_lengths)
    above_cap = sum(length > cap_tokens for length in total_lengths)
    if above_cap:
        logger.warning("sparse balance: %d samples are above the token cap", above_cap)
    rollouts = list(samples_of.values())
    partitions: list[list[int]] = [[] for _ in range(ranks)]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in range(ranks)]
    num_microbatches = []
    for first in range(0, steps * global_batch_size, global_batch_size):
        samples = [s for rollout in rollouts[first : first + global_batch_size] for s in rollout]
        plan = planner.plan(
            # Counted as filling its micro-batch, one above the cap has it for itself.
            [min(total_lengths[sample], cap_tokens) for sample in samples],
            micro_batches=_static_micro_batches(args, len(samples), ranks),
        ).plan
        for rank in range(ranks):
            for micro_batch in plan.for_rank(rank).micro_batches:
                start = len(partitions[rank])
                partitions[rank] += [samples[local] for local in micro_batch.samples]
                micro_batch_indices[rank].append(list(range(start, len(partitions[rank]))))
        num_microbatches.append(len(plan.for_rank(0).micro_batches))
    return partitions, micro_batch_indices, num_microbatches, [global_batch_size] * steps


def _static_micro_batches(args: Any, samples: int, ranks: int) -> int | None:
    """``--micro-batch-size`` is then the average number of samples."""
    if args.use_dynamic_batch_size:
        return None
    micro_batches, rest = divmod(samples, args.micro_batch_size * ranks)
    assert not rest, f"static path: {samples} samples do not divide over {ranks} ranks"
    return micro_batches


def _placing_planner(args: Any, layout: dict[str, int], lengths: list[int]) -> tuple[Any, int]:
    """A planner of placements, and the token cap of a micro-batch."""
    cap_tokens = (
        args.max_tokens_per_gpu
        if args.use_dynamic_batch_size
        else args.micro_batch_size * max(lengths)
    )
    stages = getattr(args, "pipeline_model_parallel_size", 1)
    chunks = stages * layout["vpp_size"]
    per_chunk = -(-args.num_layers // chunks)
    chunk_layers = [range(args.num_layers)[c * per_chunk :][:per_chunk] for c in range(chunks)]
    job = integration.HostJob(
        shape=integration.ModelShape(
            hidden_size=args.hidden_size,
            ffn_hidden_size=args.ffn_hidden_size,
            num_attention_heads=args.num_attention_heads,
            num_query_groups=args.num_query_groups,
            head_dim=args.kv_channels,
            vocab_size=args.vocab_size,
            gated_linear_unit=getattr(args, "swiglu", True),
            tensor_parallel_size=getattr(args, "tensor_model_parallel_size", 1),
        ),
        layout=integration.Job(
            stage_layers=tuple(
                tuple(tuple(layers) for layers in chunk_layers[stage::stages])
                for stage in range(stages)
            ),
            data_parallel_size=layout["dp_size"],
            micro_batch_group_size=layout["microbatch_group_size_per_vp_stage"],
        ),
        max_sample_tokens=cap_tokens,
        global_batch_size=len(lengths),
    )
    choices = getattr(args, "sparse_balance", {}) | {
        "tuning": "off",
        "max_tokens_per_micro_batch": cap_tokens,
    }
    return integration.HostPlanner(SparseBalanceConfig(**choices), job), cap_tokens
