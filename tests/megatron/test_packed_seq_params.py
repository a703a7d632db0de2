# SPDX-License-Identifier: Apache-2.0
"""What the plan says of a micro-batch is what a rank's layers find in its parameters."""

import numpy as np
import torch
from plan.plan_cases import job_shape, planned, random_lengths, step_inputs

from sparsebalance_megatron.cost.model import StageScales
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.megatron.packed_seq_params import local_micro_batches
from sparsebalance_megatron.run.micro_batches import SequencePacking


def test_layers_attend_densely_to_what_the_plan_says() -> None:
    """Padding behind dense documents needs no lists; the plan may come from another process."""
    for seed in range(20):
        job = job_shape(2, 3, stages=1 + seed % 2)
        lengths = random_lengths(4 * job.places, seed, longest=2**13)
        inputs = step_inputs(job, lengths, seed, dense_up_to=2 ** (8 + seed % 5))
        plan = planned(**inputs)
        ones = StageScales.ones(job.pipeline_stages)
        sent = PlannedStep(plan=plan, samples=np.arange(len(lengths)), scales=ones, plan_ms=0.0)
        packing = SequencePacking(block_size=64, pad_to_multiple_of=(1, 96)[seed // 2 % 2])
        for micro_batch in PlannedStep.from_bytes(sent.to_bytes()).plan.micro_batches:
            boundaries = packing.cu_seqlens(micro_batch)
            (local,) = local_micro_batches(
                *(micro_batch, boundaries, [None]),
                block_size=64,
                observe=True,
                device=torch.device("cpu"),
            )
            longest = local.params().max_seqlen_q
            # On the host, and of few values: kernels are built for each.
            assert isinstance(longest, int) and longest & (longest - 1) == 0
            assert max(np.diff(boundaries)) <= longest < 2 * max(np.diff(boundaries))
            planned_L, samples = micro_batch.dense_documents_L, len(micro_batch.samples)
            for layer, documents in enumerate(planned_L.tolist()):
                every = len(boundaries) - 1 if documents == samples else documents
                assert local.dense_documents(layer) == every
                assert local.is_dense(layer) == (documents == samples)
    assert plan.digest() == sent.from_bytes(sent.to_bytes()).plan.digest()
