# SPDX-License-Identifier: Apache-2.0
"""A trainer that calls Megatron's schedule itself; lines that end in # are the plugin's.

``transformer_config`` is a ``TransformerConfig``, ``balance_config`` a ``SparseBalanceConfig``, and
``sizes`` has vocab_size, data_prefix, seq_length, micro_batch_size and global_batch_size. What a
trainer must keep to: docs/INTEGRATION.md.
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


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        packed_seq_params=batch["packed_seq_params"],  #
    )
    return losses, partial(loss_function, batch["loss_mask"])


def loss_function(loss_mask, losses):
    loss, tokens = (losses * loss_mask).sum(), loss_mask.sum().to(torch.int)
    return loss, tokens, {"loss": torch.stack([loss.detach(), tokens])}


def train(transformer_config, balance_config, sizes, steps, log, checkpoint=None):
    run = sparse_balance.begin_run(balance_config, transformer_config, **sizes)  #
    model = GPTModel(
        transformer_config,
        run.layer_spec(),  #
        vocab_size=sizes["vocab_size"],
        max_sequence_length=sizes["seq_length"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    model = DistributedDataParallel(transformer_config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])
    transformer_config.finalize_model_grads_func = finalize_model_grads
    consumed_samples = 0
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        consumed_samples = checkpoint["consumed_samples"]
        run.load_state_dict(checkpoint["sparse_balance"])  #
    forward_backward = run.wrap_schedule(get_forward_backward_func())  #
    data_iterator = run.train_data_iterator(consumed_samples=consumed_samples)  #
    balanced_forward_step = run.wrap_forward_step(forward_step)  #
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = forward_backward(
            forward_step_func=balanced_forward_step,
            data_iterator=data_iterator,
            model=[model],
            num_microbatches=run.micro_batches,  #
            seq_length=sizes["seq_length"],
            micro_batch_size=sizes["micro_batch_size"],
            forward_only=False,
        )
        optimizer.step()
        consumed_samples += sizes["global_batch_size"]
        log(reports, run.end_step())  #
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "consumed_samples": consumed_samples,
        "sparse_balance": run.state_dict(),  #
    }
