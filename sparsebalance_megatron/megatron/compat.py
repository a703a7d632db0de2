# SPDX-License-Identifier: Apache-2.0
"""Every fact that depends on a Megatron version, and nothing else (megatron-core 0.19 and 0.20)."""

import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


def megatron_version() -> str:
    """Version of the installed megatron-core, such as 0.19.2.

    The commit that Megatron appends is that of whatever git repository surrounds the installation.
    """
    from megatron.core.package_info import __version__

    return str(__version__).partition("+")[0]


def quantized_token_multiple(config: Any) -> int:
    """Tokens that fp8 and fp4 matrix products need to divide by, as Megatron pads the tokens of
    every expert: 16, with the recipe mxfp8 32, with fp4 128; 1 without either."""
    if not (config.fp8 or config.fp4):
        return 1
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

    return max(1, int(get_align_size_for_quantization(config)))


def validated_arguments(add_flags: Callable[..., Any]) -> Namespace:
    """Megatron's arguments from the command line, with the flags that ``add_flags`` adds."""
    from megatron.training.arguments import parse_and_validate_args

    args: Namespace = parse_and_validate_args(extra_args_provider=add_flags)
    return args


def keep_built_data_set_helpers() -> None:
    """Have Megatron use its compiled data set helpers as they are where nothing can build them: the
    wheel has no Makefile, and Megatron's start ends the run where ``make`` finds none."""
    import megatron.core.datasets.utils as dataset_utils

    folder = Path(dataset_utils.__file__).parent
    if (folder / "Makefile").exists() or not any(folder.glob("helpers_cpp*.so")):
        return
    dataset_utils.compile_helpers = lambda: None


def run_pretrain(
    args: Namespace,
    *,
    dataset_provider: Callable[..., Any],
    forward_step: Callable[..., Any],
    configure_model: Callable[[Any], None] | None = None,
) -> None:
    """Call Megatron's ``pretrain``; ``configure_model`` may change its ``GPTModelConfig`` first."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )

    keep_built_data_set_helpers()
    model_config = gpt_config_from_args(args)
    if configure_model is not None:
        configure_model(model_config)
    pretrain(
        cfg_container=pretrain_cfg_container_from_args(args, model_config),
        train_valid_test_dataset_provider=dataset_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )


def gpt_model(args: Namespace, transformer_config: Any, layer_spec: Any) -> Any:
    """The whole ``GPTModel`` that flags describe."""
    from megatron.core.models.gpt import GPTModel

    return GPTModel(
        config=transformer_config,
        transformer_layer_spec=layer_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        **_position_keywords(args),
    )


def _position_keywords(args: Namespace) -> dict[str, Any]:
    return {
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "rope_scaling": args.use_rope_scaling,
        "rope_scaling_factor": args.rope_scaling_factor,
        "seq_len_interpolation_factor": args.rotary_seq_len_interpolation_factor,
    }


def model_settings(args: Namespace) -> dict[str, Any]:
    """What flags say of a GPT, not checked or completed for a machine: fields of
    ``TransformerConfig`` without those of ``ModelParallelConfig``, keywords of ``GPTModel``, and
    arguments that choose other classes, by name."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer import TransformerConfig
    from megatron.training.arguments import core_transformer_config_from_args

    @dataclass
    class Given(TransformerConfig):
        def __post_init__(self) -> None:
            pass

    other_classes = {
        "multi_latent_attention": False,
        **dict.fromkeys(("heterogeneous_layers_config_path", "spec", "yaml_cfg")),
    }
    unread = {"params_dtype": None, "te_precision_config_file": None}
    plain = {**vars(args), **other_classes, **unread}
    given = vars(core_transformer_config_from_args(Namespace(**plain), Given))
    elsewhere = {field.name for field in fields(ModelParallelConfig)}
    return {
        **{name: value for name, value in given.items() if name not in elsewhere},
        **_position_keywords(args),
        **{name: getattr(args, name) for name in other_classes},
    }


def enable_variable_lengths(transformer_config: Any) -> None:
    """Let pipeline stages exchange sequences of any length.

    Megatron refuses that with the allgather dispatcher, the default even of models without experts,
    which never dispatch.
    """
    transformer_config.variable_seq_lengths = True
    if transformer_config.num_moe_experts is None:
        transformer_config.moe_token_dispatcher_type = "alltoall"


def default_layer_spec(transformer_config: Any, vp_stage: int | None) -> Any:
    """The decoder spec that Megatron itself would choose for this config."""
    from megatron.core.models.gpt import gpt_layer_specs

    use_transformer_engine = transformer_config.transformer_impl == "transformer_engine"
    if transformer_config.num_moe_experts is not None:
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            transformer_config,
            use_transformer_engine=use_transformer_engine,
            normalization=transformer_config.normalization,
            qk_l2_norm=transformer_config.qk_l2_norm,
            vp_stage=vp_stage,
        )
    if use_transformer_engine:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=transformer_config.qk_layernorm,
            qk_l2_norm=transformer_config.qk_l2_norm,
            use_te_activation_func=transformer_config.use_te_activation_func,
            use_grouped_gemm_for_dense_mlp=transformer_config.use_grouped_gemm_for_dense_mlp,
            multi_latent_attention=transformer_config.multi_latent_attention,
        )
    return gpt_layer_specs.get_gpt_layer_local_spec(
        qk_layernorm=transformer_config.qk_layernorm,
        normalization=transformer_config.normalization,
        multi_latent_attention=transformer_config.multi_latent_attention,
    )


def stage_layers(transformer_config: Any) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Global, zero-based layer indices of every stage and virtual chunk, by Megatron's rule."""
    if transformer_config.pipeline_model_parallel_layout is not None:
        return _custom_layout(transformer_config.pipeline_model_parallel_layout)
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    virtual = transformer_config.virtual_pipeline_model_parallel_size
    chunks: list[int | None] = [None] if virtual is None else list(range(virtual))
    stages = []
    for stage in range(transformer_config.pipeline_model_parallel_size):
        stage_chunks = []
        for chunk in chunks:
            offset = get_transformer_layer_offset(transformer_config, chunk, stage)
            count = get_num_layers_to_build(transformer_config, chunk, stage)
            stage_chunks.append(tuple(range(offset, offset + count)))
        stages.append(tuple(stage_chunks))
    return tuple(stages)


def _custom_layout(layout: Any) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Layers of every stage and chunk of a ``--pipeline-model-parallel-layout``, numbered chunk by
    chunk, and within a chunk stage by stage; Megatron's functions need process groups."""
    from megatron.core.transformer.enums import LayerType

    counts_PV = [[chunk.count(LayerType.decoder) for chunk in stage] for stage in layout.layout]
    stages: list[list[tuple[int, ...]]] = [[] for _ in counts_PV]
    first = 0
    for counts_P in zip(*counts_PV, strict=True):
        for stage, count in zip(stages, counts_P, strict=True):
            stage.append(tuple(range(first, first + count)))
            first += count
    return tuple(tuple(stage) for stage in stages)


def batch_size_schedule(args: Namespace) -> tuple[tuple[int, int], ...]:
    """(samples consumed, global batch size) pairs, as Megatron's own calculator reads
    ``--step-batch-size-schedule``; one where the size is fixed."""
    if args.step_batch_size_schedule is None:
        return ((0, args.global_batch_size),)
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    calculator = StepBatchsizeNumMicroBatchesCalculator(
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        decrease_batch_size_if_needed=False,
        rank=-1,
        schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    return tuple((int(threshold), int(size)) for threshold, size in calculator.schedule)


def saved_state(directory: str, iteration: int, release: bool = False) -> dict[str, Any]:
    """What all ranks have in common in a ``torch_dist`` checkpoint; empty where there is none."""
    from megatron.core import dist_checkpointing
    from megatron.training.checkpointing import find_checkpoint_rank_0

    found = find_checkpoint_rank_0(directory, iteration, release)
    if found is None or not dist_checkpointing.check_is_distributed_checkpoint(found):
        return {}
    with warnings.catch_warnings():
        # One process may read it by itself, of which PyTorch warns.
        warnings.filterwarnings("ignore", message=".*in a single process", category=UserWarning)
        state: dict[str, Any] = dist_checkpointing.load_common_state_dict(found)
    return state


def arguments_of_weights(args: Namespace, *, resumed: bool = False) -> Namespace | None:
    """The ``args`` stored with the weights that a run at iteration 0 starts from, if any.

    ``resumed``: only where it goes on from there, and does not start anew with those weights.
    """
    for directory in filter(None, (args.load, None if resumed else args.pretrained_checkpoint)):
        content = _last_saved(directory)
        if content is None:
            continue
        release = content == "release"
        if not release and not content.isdecimal():
            # Megatron refuses it when it loads.
            return None
        if resumed and (release or args.finetune):
            return None
        iteration = 0 if release else args.ckpt_step or int(content)
        return saved_state(directory, iteration, release).get("args")
    return None


def _last_saved(directory: str) -> str | None:
    """What a ``--save`` directory says of its last complete checkpoint; None without one."""
    from megatron.training.checkpointing import get_checkpoint_tracker_filename

    tracker = Path(get_checkpoint_tracker_filename(directory))
    return tracker.read_text().strip() if tracker.is_file() else None


def has_weights(args: Namespace) -> bool:
    """Whether a run starts from a checkpoint; without one, Megatron trains random weights."""
    from megatron.training.checkpointing import checkpoint_exists

    return any(map(checkpoint_exists, (args.load, args.pretrained_checkpoint)))


def not_finite_statuses() -> tuple[int, int]:
    """Megatron's exit statuses where a loss or gradient is not finite: once, or twice alike."""
    from megatron.core import rerun_state_machine as machine

    return machine.EXIT_CODE_RESUME_TO_DISAMBIGUATE, machine.EXIT_CODE_FAILED_ON_RESULT_VALIDATION


def saves_for_another_try() -> bool:
    """Whether Megatron saves because a loss or gradient was not finite twice, and ends then."""
    from megatron.core import rerun_state_machine as machine

    state = machine.get_rerun_state_machine().state
    return state is machine.RerunState.WILL_RERUN_FROM_CHECKPOINT


def last_saved_iteration(directory: str) -> int | None:
    """Iteration of the last complete checkpoint in a ``--save`` directory; None without one."""
    content = _last_saved(directory) or ""
    return int(content) if content.isdigit() else None


def metric_writers() -> tuple[Any, Any, int] | None:
    """Megatron's TensorBoard and wandb writers, each None where it is off, and ``--log-interval``;
    None without a writer, and where ``megatron.training`` is not loaded."""
    if "megatron.training.global_vars" not in sys.modules:
        return None
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is None and wandb is None:
        return None
    return tensorboard, wandb, get_args().log_interval
