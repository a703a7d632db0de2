# SPDX-License-Identifier: Apache-2.0
"""A host that reads, packs and feeds its own samples; docs/INTEGRATION.md explains the calls.

A driver, rank 0, plans every step from lengths and sends the plan; every rank runs its part.
``batches`` yields a list of token tensors per step, of any number. Sizes are ``vocab_size``,
``max_sample_tokens`` and ``global_batch_size``. Lines that end in ``#`` are the plugin's.
"""

from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from sparsebalance_megatron import integration as sparse_balance  #


def packed(samples):
    """A micro-batch's samples, one after another; labels are shifted here, before any cut."""
    return {
        "tokens": torch.cat([sample[:-1] for sample in samples]),
        "labels": torch.cat([sample[1:] for sample in samples]),
        "loss_mask": torch.cat([torch.ones(len(sample) - 1) for sample in samples]),
    }


def loss_function(loss_mask, losses):
    loss, tokens = (losses * loss_mask).sum(), loss_mask.sum().to(torch.int)
    return loss, tokens, {"loss": torch.stack([loss.detach(), tokens])}


def run_schedule(run, model, planned, batch, forward_only=False):
    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    micro_batches = planned.plan.for_rank(rank).micro_batches  #

    def forward_step(positions, model):
        position = next(positions)
        samples = [batch[sample] for sample in micro_batches[position].samples]  #
        inputs = run.cut(planned, position, packed(samples))  #
        carrier = run.attach(planned, position, model=model, learn=not forward_only)  #
        losses = model(
            inputs["tokens"][None],
            inputs["position_ids"][None],
            None,
            labels=inputs["labels"][None],
            packed_seq_params=carrier,  #
        )
        return losses, partial(loss_function, inputs["loss_mask"])

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(range(len(micro_batches))),
        model=[model],
        num_microbatches=len(micro_batches),  #
        seq_length=run.job.max_sample_tokens,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def train(transformer_config, balance_config, sizes, batches, log, checkpoint=None):
    run = sparse_balance.begin_host_run(balance_config, transformer_config, **sizes)  #
    model = GPTModel(
        transformer_config,
        run.layer_spec(),  #
        vocab_size=sizes["vocab_size"],
        max_sequence_length=sizes["max_sample_tokens"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    model = DistributedDataParallel(transformer_config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])
    transformer_config.finalize_model_grads_func = finalize_model_grads
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        run.load_state_dict(checkpoint["sparse_balance"])  #
    for batch in batches:  # every sample of the step; a rank reads only its own
        plan = [None]
        if torch.distributed.get_rank() == 0:  # a driver: another process will do
            plan[0] = run.planner.plan([len(sample) - 1 for sample in batch]).to_bytes()  #
        torch.distributed.broadcast_object_list(plan)
        planned = sparse_balance.PlannedStep.from_bytes(plan[0])  #
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = run_schedule(run, model, planned, batch)
        optimizer.step()
        log(reports, run.end_step())  #
    return (
        run,
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "sparse_balance": run.state_dict(),  #
        },
        model,
    )
