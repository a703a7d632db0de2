# SPDX-License-Identifier: Apache-2.0
"""What a dry run says about memory: Megatron's count of weights, ours of everything else."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from sparsebalance_megatron.cost.memory import MemoryModel, memory_lines, stage_memory
from sparsebalance_megatron.cost.work_model import work_model_named
from sparsebalance_megatron.megatron.compat import weights_and_optimizer_bytes
from sparsebalance_megatron.plan.step_plan import StepPlan
from sparsebalance_megatron.training.inputs import Inputs

SOURCE = "weights, gradients and optimizer as Megatron's theoretical_memory_usage counts them"


def describe_memory(args: Namespace, inputs: Inputs, plan: StepPlan) -> list[str]:
    """Lines of text: GiB per pipeline stage while the planned step runs."""
    shape, job = inputs.settings.shape, inputs.job
    most_blocks = max(int(slot.budgets_LS.max()) for slot in plan.slots)
    model = MemoryModel(
        shape=shape,
        layers_per_stage=tuple(sum(map(len, stage)) for stage in job.stage_layers),
        virtual_stages=job.virtual_stages,
        micro_batch_group_size=job.micro_batch_group_size,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        sequence_parallel=inputs.settings.sequence_parallel,
        optimizer_ranks=args.data_parallel_size if args.use_distributed_optimizer else 1,
        selected_blocks_per_token=work_model_named(inputs.config.selection).list_entries_per_token(
            heads=shape.num_attention_heads,
            groups=shape.num_query_groups,
            block_size=inputs.config.block_size,
            budget_blocks=most_blocks,
        ),
        recompute_all=inputs.settings.recompute_all,
        recompute_attention=inputs.settings.recompute_attention,
        attention_kept=inputs.config.recompute_attention == "keep",
    )
    weights = weights_bytes(args, inputs)
    stages = [
        replace(memory, weights_bytes=of_stage)
        for memory, of_stage in zip(
            stage_memory(model, plan.share_tokens_RM()), weights, strict=True
        )
    ]
    return memory_lines(stages, SOURCE)


def weights_bytes(args: Namespace, inputs: Inputs) -> list[float]:
    """Weights, gradients and optimizer state of every stage's fullest rank, as Megatron counts.

    Megatron counts a whole model cut evenly; asked for a model of one stage's layers, and of as
    many embeddings as the stage holds, it counts the stage.
    """
    stages = inputs.job.stage_layers
    found = []
    for stage, chunks in enumerate(stages):
        layers = sorted(layer for chunk in chunks for layer in chunk)
        first, last = stage == 0, stage == len(stages) - 1
        tied = not args.untie_embeddings_and_output_weights
        embeddings = int(first) + int(last and not (first and tied))
        one_stage = Namespace(
            **vars(args)
            | {
                "num_layers": len(layers),
                "pipeline_model_parallel_size": 1,
                "padded_vocab_size": args.padded_vocab_size * embeddings,
                "untie_embeddings_and_output_weights": False,
                "moe_layer_freq": _frequency(args, layers),
            }
        )
        found.append(weights_and_optimizer_bytes(one_stage))
    return found


def _frequency(args: Namespace, layers: list[int]) -> int | list[int]:
    """``--moe-layer-freq`` of some of the layers, numbered from 0 in the whole model."""
    frequency = getattr(args, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        return [int(layer % frequency == 0) for layer in layers]
    return [frequency[layer] for layer in layers]
