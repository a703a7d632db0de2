# SPDX-License-Identifier: Apache-2.0
"""Megatron's flags and GPTModel of a converted checkpoint, in one process on the CPU; settings of
sparse attention in its config.json and among Megatron's arguments.

Import only after the CPU adapter has been installed.
"""

import io
import math
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.convert.hf_config import Decoder, Rope
from sparsebalance_megatron.convert.mapping import parameters
from sparsebalance_megatron.convert.transfer import CONFIG
from sparsebalance_megatron.errors import ConvertError, listed
from sparsebalance_megatron.evaluate.settings import KEY, SparseAttention, checked_settings
from sparsebalance_megatron.json_file import read_json
from sparsebalance_megatron.layer_budgets import DENSE, base_budgets, layer_budgets_text
from sparsebalance_megatron.megatron.arguments import destination
from sparsebalance_megatron.megatron.compat import (
    default_layer_spec,
    gpt_model,
    model_settings,
)
from sparsebalance_megatron.megatron.single_process import (
    complete_flags,
    parse_flags,
    transformer_config,
)
from sparsebalance_megatron.megatron.training_arguments import trained_first_blocks
from sparsebalance_megatron.selector_registry import default_first_blocks

_ONE_PROCESS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "use_checkpoint_args", "vocab_size"),
)
"""Arguments of which flags after -- change none: the checkpoint loads at any parallel sizes."""

_SAME_FUNCTION = re.compile(
    # How numbers are computed: kernels, precision, memory, collectives.
    r".*(fus(ed|ion|er)|fp(8|4|32)|bf16|kitchen|quant_recipe|cuda_graph|recompute|offload"
    r"|dispatch|deepep|hybridep|ncclep|grouped|paged_stash|inference|pipeline|_stream|_backend).*"
    r"|distribute_saved_activations|persist_layer_norm|memory_efficient_layer_norm|cp_comm_type"
    r"|transformer_impl|flash_(decode|attention_version)|use_te_activation_func|batch_invariant_mode"
    r"|apply_query_key_layer_scaling|tp_only_amax_red|symmetric_ar_type|mlp_chunks_for_.*"
    r"|disable_parameter_transpose_cache|nccl_all_reduce_for_prefill|moe_shared_expert_overlap"
    r"|moe_router_(dtype|padding_for_quantization)|clone_scatter_output_in_embedding"
    r"|hetereogenous_dist_checkpoint"
    # Training alone.
    r"|.*init_.*|(hidden|attention)_dropout|calculate_per_token_loss|qk_clip.*|test_mode"
    r"|moe_(aux|z)_loss_coeff|moe_router_bias_update_rate|moe_per_layer_logging"
    r"|log_max_attention_logit|config_logger_dir"
    # Shapes and names of the tensors say it.
    r"|num_query_groups|moe_ffn_hidden_size|moe_layer_freq"
)
"""Settings of Megatron's models that change nothing of what a model computes from its weights."""

_NOT_OF_THE_MODEL = {
    # Megatron asks for them although nothing is trained.
    "--micro-batch-size": 1,
    "--tokenizer-type": "NullTokenizer",
    "--ckpt-format": "torch_dist",
    # Every value is read from a checkpoint.
    "--no-initialization": True,
    # A converted checkpoint has neither.
    "--no-save-optim": True,
    "--no-save-rng": True,
}
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def parse_model_flags(model: Decoder, passed_on: Sequence[str], *, dtype: torch.dtype) -> Namespace:
    """Megatron's validated arguments: the model's own flags, and ``passed_on`` by the user.

    ``dtype`` is that of the parameters, unless the user's flags name a precision; the rows of the
    vocabulary are the user's, or rounded up as ``--make-vocab-size-divisible-by`` asks.

    Raises:
        ConfigError: if the user's flags contradict the model, or spread it over ranks.
        ConvertError: if Megatron cannot build the model with those flags.
    """
    own = {"--padded-vocab-size": None, "--seq-length": model.max_position_embeddings}
    flags = words(model_flags(model) | own | _NOT_OF_THE_MODEL)
    expected, args = _parse(flags), _parse((*flags, *passed_on))
    ranks = ((name, getattr(args, name), getattr(expected, name)) for name in _ONE_PROCESS)
    for name, given, fixed in chain(ranks, _differences(args, expected)):
        if given != fixed:
            raise ConfigError(
                f"flags after -- make {name} {given}, config.json and a conversion in one process "
                f"make it {fixed}; drop the flag"
            )
    if args.padded_vocab_size is None:
        divisor = args.make_vocab_size_divisible_by
        args.padded_vocab_size = -(-model.vocab_size // divisor) * divisor
    elif args.padded_vocab_size < model.vocab_size:
        raise ConfigError(
            f"--padded-vocab-size {args.padded_vocab_size}: the model has {model.vocab_size} rows"
        )
    if not (args.bf16 or args.fp16) and dtype in _PRECISIONS:
        setattr(args, _PRECISIONS[dtype], True)
    with redirect_stdout(io.StringIO()):
        complete_flags(args, set_globals=False)
    return args


def _differences(args: Namespace, described: Namespace) -> Iterator[tuple[str, Any, Any]]:
    """Settings of both models that differ and change what is computed: name and both values."""
    fixed = model_settings(described)
    try:
        settings = model_settings(args)
    except (AssertionError, ValueError) as error:
        raise ConvertError(
            "Megatron refuses the flags of the model, which contradict one another or those of "
            f"config.json: {str(error) or 'such as two activation functions'}"
        ) from error
    for name in sorted(settings.keys() | fixed.keys()):
        found, expected = settings.get(name), fixed.get(name)
        # Balancing losses act in training alone; sinkhorn chooses the experts.
        is_loss = name == "moe_router_load_balancing_type" and "sinkhorn" not in str(found)
        if found != expected and not is_loss and not _SAME_FUNCTION.fullmatch(name):
            yield name, found, expected


def _parse(flags: Sequence[str]) -> Namespace:
    with redirect_stdout(io.StringIO()):
        return parse_flags("sparse-balance convert", flags, enabled=False, on_cpu=True)


def build_model(
    model: Decoder,
    args: Namespace,
    layer_spec: Callable[[Any, int | None], Any] = default_layer_spec,
) -> Any:
    """The whole ``GPTModel``, with uninitialised parameters of ``args.params_dtype``.

    Raises:
        ConvertError: memory does not suffice, or Megatron has other parameters than the mapping.
    """
    config = transformer_config(args)
    try:
        with redirect_stdout(io.StringIO()):
            built = gpt_model(args, config, layer_spec(config, None))
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise ConvertError(
            f"a model of num_hidden_layers {model.num_hidden_layers}, hidden_size "
            f"{model.hidden_size}, intermediate_size {model.intermediate_size} and vocab_size "
            f"{model.vocab_size} exceeds this machine's memory; correct config.json, or "
            "convert on a larger machine"
        ) from error
    names = {name for name, _ in built.named_parameters()}
    if other := names ^ {parameter.name for parameter in parameters(model)}:
        raise ConvertError(f"Megatron's parameters are not those of config.json: {listed(other)}")
    return built.to(config.params_dtype).eval()


def check_trained(trained: Namespace, described: Namespace) -> None:
    """Raise ConvertError, with the setting, unless what trained the weights, by its arguments,
    computes what those of config.json describe."""
    # Megatron of another version knows other arguments.
    trained = Namespace(**(vars(described) | vars(trained)))
    for name, found, fixed in _differences(trained, described):
        raise ConvertError(
            f"the checkpoint was trained with {name} {found}, --hf-config makes it {fixed}; "
            "mend its config.json, or keep to Megatron where it has no such setting"
        )


Flags = dict[str, Any]
"""Flag -> value: True for a flag that takes none, None or False for one that is not given."""


def model_flags(model: Decoder, args: Namespace | None = None) -> Flags:
    """Flags of ``pretrain_gpt`` that build this model, its vocabulary padded as in ``args``.

    Without ``--padded-vocab-size`` Megatron would pad the size of the tokenizer, which is often
    smaller than the model's.
    """
    # The largest divisor that pads no row and divides Megatron's default.
    divisor, rows = math.gcd(model.vocab_size, 128), model.vocab_size
    if args is not None:
        divisor, rows = args.make_vocab_size_divisible_by, args.padded_vocab_size
    return {
        "--num-layers": model.num_hidden_layers,
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size": model.intermediate_size,
        "--num-attention-heads": model.num_attention_heads,
        "--group-query-attention": True,
        "--num-query-groups": model.num_key_value_heads,
        "--kv-channels": model.head_dim,
        "--max-position-embeddings": model.max_position_embeddings,
        **_rope_flags(model.rope_parameters),
        "--normalization": "RMSNorm",
        "--norm-epsilon": model.rms_norm_eps,
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--attention-dropout": model.attention_dropout,
        "--hidden-dropout": 0.0,
        "--vocab-size": model.vocab_size,
        "--make-vocab-size-divisible-by": divisor,
        "--padded-vocab-size": rows,
        "--add-qkv-bias": model.has_qkv_bias,
        "--untie-embeddings-and-output-weights": not model.tie_word_embeddings,
        "--qk-layernorm": model.has_qk_norm,
        **(_expert_flags(model) if model.num_experts else {}),
    }


def _expert_flags(model: Decoder) -> Flags:
    layers = ",".join(str(int(has)) for has in model.expert_layers)
    return {
        "--num-experts": model.num_experts,
        "--moe-ffn-hidden-size": model.moe_intermediate_size,
        "--moe-router-topk": model.num_experts_per_tok,
        # The dispatcher that takes packed sequences of any length.
        "--moe-token-dispatcher-type": "alltoall",
        # Weights of experts are shares of all experts; without it, of the chosen ones.
        "--moe-router-pre-softmax": not model.norm_topk_prob,
        "--moe-layer-freq": None if all(model.expert_layers) else f"[{layers}]",
    }


def _rope_flags(rope: Rope) -> Flags:
    kind = "yarn" if rope.rope_type == "yarn" else "rope"
    flags: Flags = {"--position-embedding-type": kind, "--rotary-base": f"{rope.rope_theta:.0f}"}
    match rope.rope_type:
        case "linear":
            flags["--rotary-seq-len-interpolation-factor"] = f"{rope.factor:.0f}"
        case "llama3":
            flags |= {"--use-rope-scaling": True, "--rope-scaling-factor": rope.factor}
        case "yarn":
            flags |= {
                "--rotary-scaling-factor": rope.factor,
                "--yarn-original-max-position-embeddings": rope.original_max_position_embeddings,
                "--yarn-beta-fast": rope.beta_fast,
                "--yarn-beta-slow": rope.beta_slow,
                "--mscale": rope.mscale,
                "--mscale-all-dim": rope.mscale_all_dim,
            }
    return flags


def _words_of_each(flags: Flags) -> Iterator[tuple[str, ...]]:
    for flag, value in flags.items():
        if value is not None and value is not False:
            yield (flag,) if value is True else (flag, *str(value).split())


def words(flags: Flags) -> tuple[str, ...]:
    """Words of a command line."""
    return tuple(chain.from_iterable(_words_of_each(flags)))


def model_arrays(model: Decoder, args: Namespace, hf_dir: Path) -> str:
    """Flags as bash arrays; where config.json has sparse attention, ``args`` gets it too."""
    text = bash_array("MODEL_ARGS", model_flags(model, args))
    settings = read_settings(hf_dir, model)
    if settings is None:
        return text
    for name, value in _fields(settings).items():
        setattr(args, destination(name), value)
    # Flags of ``pretrain_gpt`` that continue training with this attention.
    flags = {flag_name(name): value for name, value in _fields(settings).items()}
    return text + bash_array("SPARSE_BALANCE_ARGS", flags)


def bash_array(name: str, flags: Flags) -> str:
    """``name=( .. )``, one flag per line, for a script to source."""
    lines = (f"    {shlex.join(each)}\n" for each in _words_of_each(flags))
    return f"{name}=(\n{''.join(lines)})\n"


def read_settings(directory: Path, model: Decoder) -> SparseAttention | None:
    """The settings in ``directory/config.json``, if any; ConvertError where training cannot follow
    them."""
    path = directory / CONFIG
    values = read_json(path).get(KEY)
    if values is None:
        return None
    try:
        settings = checked_settings(values, model)
        SparseBalanceConfig(**_fields(settings))
    except ConfigError as error:
        raise ConvertError(f"{path}: {error}") from error
    return settings


def trained_settings(args: Namespace) -> SparseAttention | None:
    """The attention that a run with Megatron's ``args`` trained with; None where it is dense."""
    if not getattr(args, destination("enabled"), False):
        return None
    # The run may be of a release with other flags.
    names = ("block_size", "base_budget", "layer_budgets", "selection")
    trained = SparseBalanceConfig(**{name: getattr(args, destination(name)) for name in names})
    base_L = base_budgets(trained.base_budget, trained.layer_budgets, args.num_layers)
    if set(base_L) == {DENSE}:
        return None
    by_layer = tuple(None if budget == DENSE else budget for budget in base_L)
    dense_up_to = getattr(args, destination("dense_up_to"), "auto")
    return SparseAttention(
        sparse_block_size=trained.block_size,
        sparse_topk_blocks=trained.base_budget,
        sparse_selection=trained.selection,
        sparse_layer_topk_blocks=None if trained.layer_budgets is None else by_layer,
        # Earlier releases had no such length, and resolve what later ones leave to the costs.
        sparse_dense_up_to_tokens=SparseBalanceConfig(dense_up_to=dense_up_to).dense_up_to_tokens,
        sparse_init_block=trained_first_blocks(args),
    )


def config_keys(settings: SparseAttention | None) -> dict[str, Any]:
    """What a config.json says of the attention of training; None for a key that falls away."""
    return {KEY: None if settings is None else settings.as_config()}


def _fields(settings: SparseAttention) -> dict[str, Any]:
    base = settings.sparse_topk_blocks
    layers = range(len(settings.sparse_layer_topk_blocks or ()))
    named = {layer: settings.base_budget(layer) for layer in layers}
    own = {layer: budget for layer, budget in named.items() if budget != base}
    has_choice = settings.first_blocks or default_first_blocks(settings.sparse_selection)
    return {
        "enabled": True,
        "block_size": settings.sparse_block_size,
        "base_budget": base,
        "layer_budgets": layer_budgets_text(own) if own else None,
        "dense_up_to": str(settings.sparse_dense_up_to_tokens),
        "selection": settings.sparse_selection,
        "first_blocks": settings.first_blocks if has_choice else None,
    }
