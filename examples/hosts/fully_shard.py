# SPDX-License-Identifier: Apache-2.0
"""A loop of its own with parameters in shards: torch's ``fully_shard`` (FSDP2).

All data-parallel ranks gather the weights of every layer together, so they wait for one another in
every layer: ``lockstep_ranks`` says so, and plans level each position. Lines that end in ``#`` are
the plugin's; the rest is a loop around Megatron's schedule. Run it on two CPU ranks, without data:

    torchrun --nproc-per-node 2 examples/hosts/fully_shard.py
"""

if __name__ == "__main__":
    from sparsebalance_megatron.megatron import cpu

    cpu.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sparsebalance_megatron import SparseBalanceConfig  #
from sparsebalance_megatron import integration as sparse_balance  #


def sharded(model):
    """Every layer in shards of its own, the rest in others."""
    mesh = init_device_mesh(sparse_balance_device().type, (dist.get_world_size(),))
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sparse_balance_device():
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def divide_by_tokens(models, tokens, **_):
    """Gradients of the mean over all tokens: shards hold the mean over ranks of their sums."""
    dist.all_reduce(tokens)
    for model in models:
        for parameter in model.parameters():
            parameter.grad.to_local().mul_(dist.get_world_size() / tokens)


def loss_function(losses):
    loss, tokens = losses.sum(), torch.tensor(losses.numel(), dtype=torch.int)
    return loss, tokens, {"loss": torch.stack([loss.detach(), tokens])}


def run_schedule(run, model, planned, batch):
    micro_batches = planned.plan.for_rank(dist.get_rank()).micro_batches  #

    def forward_step(positions, model):
        position = next(positions)
        samples = [batch[sample] for sample in micro_batches[position].samples]  #
        losses = model(
            torch.cat([sample[:-1] for sample in samples])[None],
            torch.cat([torch.arange(len(sample) - 1) for sample in samples])[None],
            None,
            labels=torch.cat([sample[1:] for sample in samples])[None],
            packed_seq_params=run.attach(planned, position),  #
        )
        return losses, loss_function

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(range(len(micro_batches))),
        model=[model],
        num_microbatches=len(micro_batches),  #
        seq_length=run.job.max_sample_tokens,
        micro_batch_size=1,
        forward_only=False,
    )


def train(transformer_config, balance_config, sizes, batches, log):
    run = sparse_balance.begin_host_run(  #
        balance_config,
        transformer_config,
        lockstep_ranks=dist.get_world_size(),
        device=sparse_balance_device(),
        **sizes,
    )
    model = sharded(
        GPTModel(
            transformer_config,
            run.layer_spec(),  #
            vocab_size=sizes["vocab_size"],
            max_sequence_length=sizes["max_sample_tokens"],
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    transformer_config.finalize_model_grads_func = divide_by_tokens
    for batch in batches:  # every sample of the step; a rank reads only its own
        planned = run.planner.plan([len(sample) - 1 for sample in batch])  # alike on all ranks
        optimizer.zero_grad()
        reports = run_schedule(run, model, planned, batch)
        optimizer.step()
        log(reports, run.end_step())  #


def main():
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    dist.init_process_group()
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    model = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        transformer_impl="local",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    generator = torch.Generator().manual_seed(1)

    def batches(steps, samples):
        for _ in range(steps):
            lengths = torch.exp(torch.randn(samples, generator=generator) + 5).clamp(2, 2048)
            yield [torch.randint(256, (int(n),), generator=generator) for n in lengths]

    def log(reports, figures):
        if dist.get_rank() == 0:
            loss, tokens = sum(report["loss"] for report in reports).tolist()
            coverage = figures["sparse-balance/coverage"]
            print(f"loss of rank 0 {loss / tokens:.3f}, coverage {coverage:.3f}")

    train(
        model,
        SparseBalanceConfig(block_size=16, base_budget=8),
        {"vocab_size": 256, "max_sample_tokens": 2048, "global_batch_size": 16},
        batches(8, 16),
        log,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
