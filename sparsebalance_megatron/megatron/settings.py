# SPDX-License-Identifier: Apache-2.0
"""Settings that the plugin reads of a trainer: from Megatron's flags, or from a trainer with its
own loop."""

import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.cost.table import (
    ExpertShape,
    ModelShape,
    latent_attention_weights,
)
from sparsebalance_megatron.learn.host_planner import HostJob
from sparsebalance_megatron.learn.scheduler import BatchSizes
from sparsebalance_megatron.megatron import cpu
from sparsebalance_megatron.megatron.compat import (
    batch_size_schedule,
    quantized_token_multiple,
    stage_layers,
)
from sparsebalance_megatron.plan.job import Job, whole_parts
from sparsebalance_megatron.plan.pipeline.orders import Schedule

RANKS_PER_NODE = 8
"""Where no GPU is, which is in tests and dry runs."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One run's model, layout, batches and data, by Megatron's names; alike on all ranks.

    Attributes:
        host_job: model and layout; its samples are at most ``--seq-length`` long, its steps the
            largest.
        dtype: see :func:`dtype_name`.
        sharded_parameters: whether ranks divide weights and gradients, too.
        micro_batch_size: samples of a micro-batch on average.
        data_flags: attributes with Megatron's names of flags that name data.
        pad_to_multiple_of: see :func:`token_multiple`.
        train_iters: None where the run ends otherwise.
        warm_up_samples: trained on while the learning rate rises.
    """

    host_job: HostJob
    dtype: str
    sequence_parallel: bool
    micro_batch_size: int

    batch_sizes: BatchSizes
    split: str
    seed: int
    data_flags: Namespace
    eval_iters: int = 0
    evaluation_batch_size: int
    evaluation_micro_batch_size: int

    tied_embeddings: bool = False
    distributed_optimizer: bool = False
    sharded_parameters: bool = False
    pad_to_multiple_of: int = 1
    distributed_timeout_minutes: float = 10.0
    train_iters: int | None = None
    warm_up_samples: int = 0

    @property
    def seq_length(self) -> int:
        """Tokens of the longest sample."""
        return self.host_job.max_sample_tokens

    @property
    def context_parallel_size(self) -> int:
        """Megatron's."""
        return self.host_job.layout.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Megatron's, which counts no context-parallel ranks."""
        return self.host_job.layout.groups.data_parallel_size

    def check_batch_sizes(self, step: int) -> None:
        """Refuse a global batch size still to come that does not fill its micro-batches evenly."""
        for size in self.batch_sizes.sizes_from(step):
            self._micro_batches(size, self.micro_batch_size, self.data_parallel_size)

    @staticmethod
    def _micro_batches(size: int, micro_batch_size: int, data_parallel_size: int) -> int:
        """Micro-batches of a rank in a step of so many samples."""
        sizes = {"--micro-batch-size": micro_batch_size, "data-parallel size": data_parallel_size}
        return whole_parts(size, "global batch size", sizes)

    @classmethod
    def from_transformer_config(
        cls,
        transformer_config: Any,
        *,
        vocab_size: int,
        data_parallel_size: int,
        seq_length: int,
        micro_batch_size: int,
        batch_sizes: BatchSizes,
        shards_parameters: bool = False,
        order: Schedule | None = None,
        **others: Any,
    ) -> "RunSettings":
        """Settings of a model; ``others`` are the fields that Megatron's config does not hold.

        ``vocab_size``: with padding. ``data_parallel_size``: Megatron's, which counts no
        context-parallel ranks. ``shards_parameters``: whether all ranks gather the weights of every
        layer, and so begin it together. ``order``: see :class:`.Job`.
        """
        largest = batch_sizes.largest
        ranks = data_parallel_size * transformer_config.context_parallel_size
        return cls(
            host_job=host_job(
                transformer_config,
                vocab_size=vocab_size,
                data_parallel_size=ranks,
                lockstep_ranks=ranks if shards_parameters else None,
                order=order,
                micro_batches=cls._micro_batches(largest, micro_batch_size, data_parallel_size),
                max_sample_tokens=seq_length,
                global_batch_size=largest,
            ),
            dtype=dtype_name(transformer_config),
            micro_batch_size=micro_batch_size,
            batch_sizes=batch_sizes,
            sequence_parallel=bool(transformer_config.sequence_parallel),
            pad_to_multiple_of=token_multiple(transformer_config),
            **others,
        )

    @classmethod
    def from_args(cls, args: Namespace) -> "RunSettings":
        """Settings of a run of ``megatron.training``, from its validated arguments."""
        from megatron.training.arguments import core_transformer_config_from_args

        return cls.from_transformer_config(
            core_transformer_config_from_args(args),
            vocab_size=args.padded_vocab_size,
            data_parallel_size=args.data_parallel_size,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            batch_sizes=BatchSizes(schedule=batch_size_schedule(args)),
            shards_parameters=_shards_parameters(args),
            split=args.split or "100,0,0",
            seed=args.seed,
            train_iters=args.train_iters,
            warm_up_samples=warm_up_samples(args),
            data_flags=args,
            eval_iters=args.eval_iters or 0,
            evaluation_batch_size=args.eval_global_batch_size,
            evaluation_micro_batch_size=args.eval_micro_batch_size,
            distributed_timeout_minutes=args.distributed_timeout_minutes,
            tied_embeddings=not args.untie_embeddings_and_output_weights,
            distributed_optimizer=bool(args.use_distributed_optimizer),
            sharded_parameters=_shards_parameters(args)
            and args.data_parallel_sharding_strategy != "optim_grads",
        )


def warm_up_samples(args: Namespace) -> int:
    """Samples while the learning rate rises, as Megatron's ``get_optimizer_param_scheduler`` counts
    them."""
    size, samples = args.global_batch_size, args.lr_warmup_samples
    decay_samples = args.lr_decay_samples or args.train_samples
    if args.train_iters:
        samples = args.lr_warmup_iters * size
        decay_samples = (args.lr_decay_iters or args.train_iters) * size
    if args.lr_warmup_fraction is not None:
        samples = args.lr_warmup_fraction * decay_samples
    return math.ceil(samples)


def _shards_parameters(args: Namespace) -> bool:
    """Whether ranks gather weights, or scatter gradients, layer by layer in every micro-batch."""
    layer_by_layer = args.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")
    return bool(args.use_torch_fsdp2 or (args.use_megatron_fsdp and layer_by_layer))


def dtype_name(transformer_config: Any) -> str:
    """The model's dtype, torch's name without the prefix."""
    return str(transformer_config.params_dtype).removeprefix("torch.")


def token_multiple(transformer_config: Any) -> int:
    """Divisor of a rank's tokens of a packed sequence: sequence parallelism cuts them, and fp8 and
    fp4 multiply tiles."""
    parallel = transformer_config.sequence_parallel
    parts = int(transformer_config.tensor_model_parallel_size) if parallel else 1
    return parts * quantized_token_multiple(transformer_config)


def model_shape(transformer_config: Any, vocab_size: int) -> ModelShape:
    """The sizes that a layer's cost depends on."""
    key_dim, value_dim = head_dims(transformer_config)
    latent_weights = None
    if transformer_config.multi_latent_attention:
        latent_weights = latent_attention_weights(
            hidden_size=transformer_config.hidden_size,
            heads=transformer_config.num_attention_heads,
            q_rank=transformer_config.q_lora_rank,
            kv_rank=transformer_config.kv_lora_rank,
            qk_dim=transformer_config.qk_head_dim,
            rotary_dim=transformer_config.qk_pos_emb_head_dim,
            value_dim=value_dim,
        )
    return ModelShape(
        hidden_size=transformer_config.hidden_size,
        ffn_hidden_size=transformer_config.ffn_hidden_size,
        num_attention_heads=transformer_config.num_attention_heads,
        num_query_groups=transformer_config.num_query_groups,
        head_dim=key_dim,
        value_head_dim=None if value_dim == key_dim else value_dim,
        attention_weights=latent_weights,
        experts=expert_shape(transformer_config),
        vocab_size=vocab_size,
        gated_linear_unit=transformer_config.gated_linear_unit,
        tensor_parallel_size=transformer_config.tensor_model_parallel_size,
    )


def head_dims(transformer_config: Any) -> tuple[int, int]:
    """Head dim of queries and keys, and of values."""
    if not transformer_config.multi_latent_attention:
        return transformer_config.kv_channels, transformer_config.kv_channels
    key_dim = transformer_config.qk_head_dim + transformer_config.qk_pos_emb_head_dim
    return key_dim, transformer_config.v_head_dim


def expert_shape(transformer_config: Any) -> ExpertShape | None:
    """Experts of a model; None where it has none.

    Raises:
        ConfigError: they cannot be, or their layers are not those of the model.
    """
    config = transformer_config
    if not config.num_moe_experts:
        return None
    every, layers = config.moe_layer_freq, config.num_layers
    if isinstance(every, int) and every > 0:
        pattern = [layer % every == 0 for layer in range(layers)]
    elif isinstance(every, list) and len(every) == layers and {0, 1}.issuperset(every):
        pattern = every
    else:
        raise ConfigError(
            f"--moe-layer-freq {every}: must be at least 1, or a list of 0 and 1 with one for each "
            f"of the {layers} layers"
        )
    if not any(pattern):
        return None
    return ExpertShape(
        experts=config.num_moe_experts,
        top_k=config.moe_router_topk,
        ffn_hidden_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
        shared_ffn_hidden_size=config.moe_shared_expert_intermediate_size or 0,
        layers_share=sum(map(bool, pattern)) / layers,
    )


def micro_batch_group_size(transformer_config: Any) -> int | None:
    """Micro-batches of a group of the interleaved schedule; None for the number of stages, and
    where stages have no chunks."""
    size = transformer_config.microbatch_group_size_per_vp_stage
    stages = transformer_config.pipeline_model_parallel_size
    if transformer_config.virtual_pipeline_model_parallel_size is None or size in (None, stages):
        return None
    return int(size)


def expert_group_ranks(transformer_config: Any) -> int:
    """Neighbouring data-parallel ranks, context-parallel ones counted, that exchange tokens in
    every layer of experts.

    An expert-parallel group with its tensor-parallel ranks is so many neighbouring ranks of a
    stage, and ranks of one tensor-parallel group wait for one another, too.
    """
    if not transformer_config.num_moe_experts:
        return 1
    tensor = transformer_config.tensor_model_parallel_size
    expert_tensor = transformer_config.expert_tensor_parallel_size or tensor
    together = math.lcm(transformer_config.expert_model_parallel_size * expert_tensor, tensor)
    return int(together // tensor)


def host_job(
    transformer_config: Any,
    *,
    vocab_size: int,
    data_parallel_size: int,
    micro_batches: int = 1,
    lockstep_ranks: int | None = None,
    order: Schedule | None = None,
    **others: Any,
) -> HostJob:
    """The job of this model; ``others`` are fields that its config does not hold.

    ``data_parallel_size`` counts context-parallel ranks too, ``vocab_size`` padding;
    ``lockstep_ranks``: None is as many as an expert group has.
    """
    shape = model_shape(transformer_config, vocab_size)
    ranks_per_node = RANKS_PER_NODE if cpu.installed() else torch.cuda.device_count()
    if lockstep_ranks is None:
        lockstep_ranks = expert_group_ranks(transformer_config)
    granularity = transformer_config.recompute_granularity
    return HostJob(
        layout=Job(
            stage_layers=stage_layers(transformer_config),
            data_parallel_size=data_parallel_size,
            micro_batches=micro_batches,
            context_parallel_size=transformer_config.context_parallel_size,
            micro_batch_group_size=micro_batch_group_size(transformer_config),
            lockstep_ranks=lockstep_ranks,
            order=order,
        ),
        shape=shape,
        neighbours_per_node=max(1, ranks_per_node // shape.tensor_parallel_size),
        expert_parallel_size=transformer_config.expert_model_parallel_size,
        # On a CPU, where local is the default, times are counted for a GPU.
        takes_packed_sequences=transformer_config.transformer_impl != "local"
        or transformer_config.use_cpu_initialization,
        recompute_all=granularity == "full",
        recompute_attention=granularity == "selective"
        and "core_attn" in transformer_config.recompute_modules,
        **others,
    )


def device_name(device_type: str) -> str:
    """How cost tables name this process's device."""
    return "cpu" if device_type == "cpu" else torch.cuda.get_device_name()
