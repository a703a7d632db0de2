# SPDX-License-Identifier: Apache-2.0
"""Megatron flags that are refused with ``--sparse-balance``, and what to do instead.

``MODEL`` holds fields of Megatron's ``TransformerConfig``, which are flags of the same names;
``TRAINING`` holds flags of ``megatron.training`` alone; docs/SUPPORT.md is generated from both.
Flags are checked as typed, before Megatron's own assertions can fail over them, and again when
Megatron has completed its arguments.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from sparsebalance_megatron.attention.select import selector_named
from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.layer_budgets import base_budgets
from sparsebalance_megatron.megatron.compat import arguments_of_weights
from sparsebalance_megatron.plan.groups import is_power_of_two
from sparsebalance_megatron.plan.job import whole_parts


@dataclass(frozen=True)
class Settings:
    """Megatron's arguments, or its config, by name."""

    megatron: object
    config: SparseBalanceConfig

    def __call__(self, name: str, default: Any = None) -> Any:
        """A setting, or ``default`` where it is None or this Megatron does not have it."""
        value = getattr(self.megatron, name, None)
        return default if value is None else value


def _kv_heads_are_shared(get: Settings) -> bool:
    """Whether tensor-parallel ranks hold query heads of the same KV head."""
    grouped = get("group_query_attention", True)
    return grouped and 0 < get("num_query_groups", 0) < get("tensor_model_parallel_size", 1)


def _rotates_all(get: Settings) -> bool:
    scaled = get("position_embedding_type") in ("rope", "yarn")
    return scaled and bool(get("rotary_percent", 1.0) == 1.0)


def _has_experts(get: Settings) -> bool:
    return bool(get("num_experts") or get("num_moe_experts"))


def shards_unequally(get: Settings) -> bool:
    """Whether ranks that share parameters cannot save them: rows of a weight do not divide. Sizes
    that Megatron has not set yet are left out."""
    if not get("use_torch_fsdp2") or not (get("save") or get("load")):
        return False
    parts, heads = get("tensor_model_parallel_size", 1), get("num_attention_heads", 0)
    expert_parts = get("expert_tensor_parallel_size", parts)
    ranks = max(1, get("world_size", 1) // parts)
    if get("multi_latent_attention"):
        key_dim, shared_dim = get("qk_head_dim", 0), get("qk_pos_emb_head_dim", 0)
        of_attention: tuple[int, ...] = (
            *(get("q_lora_rank", 0), get("kv_lora_rank", 0), shared_dim),
            heads * (key_dim + shared_dim) // parts,
            heads * (key_dim + get("v_head_dim", 0)) // parts,
        )
    else:
        groups = get("num_query_groups", 0) if get("group_query_attention") else heads
        of_attention = (
            (heads + 2 * groups) * get("kv_channels", 0) // parts,
            get("kv_channels", 0) if get("qk_layernorm") else 0,
        )
    rows = (
        *(get("hidden_size", 0), get("num_experts", 0), *of_attention),
        *(get(name, 0) // parts for name in ("ffn_hidden_size", "padded_vocab_size")),
        get("moe_shared_expert_intermediate_size", 0) // parts,
        get("moe_ffn_hidden_size", 0) // expert_parts,
    )
    # Gates and what they multiply lie in one weight, one behind the other.
    halves_are_cut = bool(get("swiglu")) and ranks > 1 and ranks % 2
    return bool(halves_are_cut or any(each % ranks for each in rows))


_ATTENTION_DTYPE = "attention runs in the model's dtype; drop it"
DATA_FLAGS = (
    *("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path"),
    "per_split_data_args_path",
)
_GPT_ONLY = "only layers with attention have budgets; drop it"
_NO_INDEX_CACHE = "the plugin reads .idx files, and keeps no index of samples to load; drop it"
_NO_GRAPHS = "graphs freeze budgets and lengths; use --cuda-graph-impl none"
_NO_LOGITS = "logits are stored per sequence of fixed length; drop it"
_NO_SHARDED_WEIGHTS = (
    "plans do not know that its ranks would wait for one another in every layer; drop it, or use "
    "--use-distributed-optimizer"
)
_NO_UNSELECTED_LOGITS = "logits of unselected blocks are never computed; drop it"
_ONE_VALIDATION_SET = "there is one validation set, and it is endless; drop it"
_PADS_SEQUENCES = "both pad packed sequences; drop it"
_PLACES_SAMPLES = "both place samples; drop it"
_REAL_DATA = "give prefixes made by `sparse-balance prepare-data` as --data-path"
_REPLACES_ATTENTION = "both replace core attention; drop it"

MODEL = {
    "--context-parallel-size": "1, 2, 4, ... ranks share a packed sequence; use a power of two",
    "--hybrid-context-parallel": _PLACES_SAMPLES,
    "--dynamic-context-parallel": _PLACES_SAMPLES,
    "--sequence-packing-scheduler": _PLACES_SAMPLES,
    "--pad-packed-seq-alignment": _PADS_SEQUENCES,
    "--thd-max-packed-sequences": _PADS_SEQUENCES,
    "--thd-tail-padding-policy": _PADS_SEQUENCES,
    "--cp-partition-mode": "plans say which rank holds which blocks; drop it",
    "--enable-mhc-connections": "layers with several residual streams are not planned; drop it",
    "--hierarchical-context-parallel-sizes": "both exchange keys and values; drop it",
    "--overlap-moe-expert-parallel-comm": "its combined schedule hides micro-batch times; drop it",
    "--tp-comm-overlap": "its buffers need a fixed sequence length; drop it",
    "--tensor-parallel-num-weight-shards": _NO_SHARDED_WEIGHTS,
    "--expert-tensor-parallel-num-weight-shards": _NO_SHARDED_WEIGHTS,
    "--moe-token-dispatcher-type": (
        "packed sequences differ in length; use --moe-token-dispatcher-type alltoall"
    ),
    "--moe-pad-expert-input-to-capacity": (
        "ranks of an expert group would exchange buffers of different sizes and hang; drop it, or "
        "use --expert-model-parallel-size 1"
    ),
    "--moe-router-load-balancing-type": (
        "global_aux_loss divides by the tokens of one micro-batch, and these differ; use aux_loss "
        "or seq_aux_loss"
    ),
    "--moe-paged-stash": (
        "plans may have fewer micro-batches than it reads; use --sparse-balance-config "
        "positions=fixed"
    ),
    "--num-query-groups": (
        "a KV head's ranks would choose blocks each by itself; use as many groups as "
        "tensor-parallel ranks, or --sparse-balance-selection token-query-head"
    ),
    "--cuda-graph-impl": _NO_GRAPHS,
    "--enable-cuda-graph": _NO_GRAPHS,
    "--external-cuda-graph": _NO_GRAPHS,
    "fp8_dot_product_attention": _ATTENTION_DTYPE,
    "fp8_multi_head_attention": _ATTENTION_DTYPE,
    "--transformer-impl": "its layers are for inference; use transformer_engine or local",
    "--use-kitchen-attention": _REPLACES_ATTENTION,
    "--attention-backend": "Megatron would replace the plugin's attention; drop it",
    "--multi-latent-attention": (
        "its fusions and its cache of latents are not tested; use --no-rope-fusion, and drop "
        "--mla-down-proj-fusion and --cache-mla-latents"
    ),
    "--tensor-model-parallel-size": (
        "Megatron's local layers of multi-latent attention do not add up gradients of rotary keys "
        "over ranks; use --transformer-impl transformer_engine, or 1"
    ),
    "--experimental-attention-variant": _REPLACES_ATTENTION,
    "--linear-attention-type": _REPLACES_ATTENTION,
    "--is-hybrid-model": _GPT_ONLY,
    "--heterogeneous-layers-config-path": "the cost model knows layers that are alike; drop it",
    "--mtp-num-layers": ("its loss depends on which samples share a micro-batch; drop it"),
    "--position-embedding-type": (
        "documents have one position per token; use rope, yarn, learned_absolute or none"
    ),
    "--rotary-base-per-layer": (
        "shared sequences would be rotated by wrong positions; use --rotary-base"
    ),
    "--attention-dropout": "block-sparse attention has no dropout; use --attention-dropout 0",
    "--window-size": "the block selection replaces sliding windows; drop it",
    "--qk-clip": _NO_UNSELECTED_LOGITS,
    "--log-max-attention-logit": _NO_UNSELECTED_LOGITS,
    "per-sample loss": "regrouping needs --calculate-per-token-loss",
}
"""Flag or field -> the reason and the remedy, in the order in which they are looked at; the first
that applies is named."""

TRAINING = {
    "--seq-length": "ranks divide it; use a multiple of twice --context-parallel-size",
    "--use-megatron-fsdp": (
        "it needs GPUs, and no test trains with it; plan with --sparse-balance-dry-run, and train "
        "with --use-torch-fsdp2 or --use-distributed-optimizer"
    ),
    "--use-torch-fsdp2": (
        "a checkpoint takes equal shards of the rows of every weight, and of each half of a gated "
        "one; use a number of ranks that divides them, --use-distributed-optimizer, or neither "
        "--save nor --load"
    ),
    "--hybrid-layer-pattern": _GPT_ONLY,
    "--hybrid-override-pattern": _GPT_ONLY,
    "--spec": "both choose the layers; drop it",
    "ModelOpt": "both choose the layers; train without it",
    "--rampup-batch-size": "Megatron ignores it; use --step-batch-size-schedule",
    "--step-batch-size-schedule": (
        "Megatron counts a learning rate's schedule in iterations as if all had its first size; "
        "use --train-samples with --lr-decay-samples, --lr-warmup-samples and "
        "--lr-wsd-decay-samples"
    ),
    "--decrease-batch-size-if-needed": (
        "the global batch size must not depend on the number of ranks; drop it"
    ),
    "--iterations-to-skip": "Megatron reads what it skips as sequences of fixed length; drop it",
    "--phase-transition-iterations": "one order of samples holds for the whole run; drop it",
    "--full-validation": _ONE_VALIDATION_SET,
    "--multiple-validation-sets": _ONE_VALIDATION_SET,
    "--use-varlen-dataset": f"both pack documents; {_REAL_DATA}",
    "--mock-data": f"plans need real lengths; {_REAL_DATA}",
    "no --data-path": f"plans need real lengths; {_REAL_DATA}",
    "--split": "every split has sources of its own already; drop it",
    "--dataloader-type": "the plugin brings its own iterator; use external or drop the flag",
    "--sft": "prepare conversations with `sparse-balance prepare-data` and drop it",
    "--object-storage-cache-path": "data sets are read from local files; copy them, and drop it",
    "--dataloader-fast-cache-load": _NO_INDEX_CACHE,
    "--dataloader-defer-npy-index-mmap": _NO_INDEX_CACHE,
    "--fim-data": "samples are trained on as they are stored; drop it",
    "--eod-mask-loss": "loss masks are made by `sparse-balance prepare-data`; drop it",
    "--logits-save-dir": _NO_LOGITS,
    "--logits-load-dir": _NO_LOGITS,
    "--perform-rl-step": "rollouts are not planned; drop it",
    "--yaml-cfg": "give every flag on the command line instead",
    "--inprocess-restart": "let torchrun restart the ranks; drop it",
    "--non-persistent-ckpt-type": "the plugin's state is in regular checkpoints only; drop it",
    "--override-ckpt-iteration": (
        "plans follow the samples consumed; choose a checkpoint with --ckpt-step"
    ),
    "--ckpt-format": "the plugin's state is read from torch_dist checkpoints; use torch_dist",
}
"""Likewise of training; looked at after those of the model."""

_SOME_VALUES: dict[str, Callable[[Settings], object]] = {
    "--context-parallel-size": lambda get: not is_power_of_two(get("context_parallel_size", 1)),
    "--cp-partition-mode": lambda get: get("cp_partition_mode", "zigzag") != "zigzag",
    "--enable-mhc-connections": lambda get: (
        get("enable_mhc_connections") or get("enable_hyper_connections")
    ),
    # Weights are cut further than among their ranks.
    "--tensor-parallel-num-weight-shards": lambda get: (
        get("tensor_parallel_num_weight_shards", 1) > get("tensor_model_parallel_size", 1)
    ),
    "--expert-tensor-parallel-num-weight-shards": lambda get: (
        get("expert_tensor_parallel_num_weight_shards", 1)
        > get("expert_tensor_parallel_size", get("tensor_model_parallel_size", 1))
    ),
    "--moe-token-dispatcher-type": lambda get: (
        _has_experts(get) and get("moe_token_dispatcher_type") == "allgather"
    ),
    "--moe-pad-expert-input-to-capacity": lambda get: (
        get("moe_pad_expert_input_to_capacity") and get("expert_model_parallel_size", 1) > 1
    ),
    "--moe-router-load-balancing-type": lambda get: (
        _has_experts(get) and "global_aux_loss" in get("moe_router_load_balancing_type", ())
    ),
    "--moe-paged-stash": lambda get: get("moe_paged_stash") and get.config.positions == "planned",
    "--num-query-groups": lambda get: (
        _kv_heads_are_shared(get) and get.config.selection != "token-query-head"
    ),
    "--multi-latent-attention": lambda get: (
        get("multi_latent_attention")
        and (get("apply_rope_fusion") or get("mla_down_proj_fusion") or get("cache_mla_latents"))
    ),
    "--tensor-model-parallel-size": lambda get: (
        get("multi_latent_attention")
        and get("tensor_model_parallel_size", 1) > 1
        and get("transformer_impl") == "local"
    ),
    "--cuda-graph-impl": lambda get: get("cuda_graph_impl", "none") != "none",
    "--transformer-impl": lambda get: get("transformer_impl") == "inference_optimized",
    "--attention-backend": lambda get: getattr(get("attention_backend"), "name", None) == "local",
    "--position-embedding-type": lambda get: (
        get("position_embedding_type") in ("mrope", "relative")
    ),
    "--attention-dropout": lambda get: get("attention_dropout", 0.0) > 0.0,
    "per-sample loss": lambda get: not get("calculate_per_token_loss"),
    "--seq-length": lambda get: (
        get("context_parallel_size", 1) > 1
        and get("seq_length", 0) % (2 * get("context_parallel_size", 1))
    ),
    "no --data-path": lambda get: not any(map(get, DATA_FLAGS)),
    "--split": lambda get: get("split") and any(map(get, DATA_FLAGS[2:])),
    "--dataloader-type": lambda get: get("dataloader_type") != "external",
    "--step-batch-size-schedule": lambda get: (
        get("step_batch_size_schedule")
        and not get("train_samples")
        and (
            get("lr_decay_style", "linear") != "constant"
            or get("lr_warmup_iters")
            or get("lr_warmup_fraction")
        )
    ),
    "--use-megatron-fsdp": lambda get: get("use_megatron_fsdp") and get.config.dry_run is None,
    "--use-torch-fsdp2": shards_unequally,
    "--ckpt-format": lambda get: (
        (get("save") or get("load")) and get("ckpt_format", "torch_dist") != "torch_dist"
    ),
    "ModelOpt": lambda get: get("modelopt_enabled"),
}
"""Flag -> whether it is refused; every other flag is refused for any value that is true."""

_AT_LEAST_1 = "--hidden-size --ffn-hidden-size --num-attention-heads --moe-router-topk"
_ABOVE_0 = "--rotary-base --rotary-seq-len-interpolation-factor --rope-scaling-factor"
_SHARES = "--hidden-dropout --adam-beta1 --adam-beta2"
_NUMBERS: tuple[tuple[str, str, Callable[[Settings, Any], object]], ...] = (
    (f"{_AT_LEAST_1} --log-interval", "must be at least 1", lambda get, n: n < 1),
    ("--eval-interval", "must be at least 1", lambda get, n: n < 1 and get("eval_iters", 1)),
    (_ABOVE_0, "must be above 0", lambda get, n: n <= 0),
    ("--init-method-std", "must be at least 0", lambda get, n: n < 0),
    (_SHARES, "must be at least 0 and below 1", lambda get, n: not 0 <= n < 1),
    ("--num-layers", "must be 1 to 4096", lambda get, n: not 1 <= n <= 4096),
    (
        *("--num-query-groups", "must be at least 1, and divide --num-attention-heads"),
        lambda get, n: (
            get("group_query_attention", True) and (n < 1 or get("num_attention_heads", n) % n)
        ),
    ),
    (
        *("--kv-channels", "must be at least 1, and even where all of them rotate"),
        lambda get, n: n < 1 or (n % 2 and _rotates_all(get)),
    ),
)
"""Flags, the rule for their numbers, and whether a number breaks it: what Megatron takes, and fails
at while it builds the model or in the first iteration."""

OF_REPLACED_ATTENTION = (
    *("fp8_dot_product_attention", "fp8_multi_head_attention", "--num-query-groups"),
    *("--attention-dropout", "--window-size", "--qk-clip", "--log-max-attention-logit"),
)
"""Flags and fields of :data:`MODEL` that Megatron's own attention has, where it runs: in mode
exact, with Transformer Engine."""

OF_UNSHARED_ATTENTION = (
    *("fp8_dot_product_attention", "fp8_multi_head_attention"),
    *("--qk-clip", "--log-max-attention-logit"),
)
"""Those that it has only where ranks share no micro-batch: they keep state of every head."""

_ONE_CHUNK = "segments run in a schedule of one model chunk per stage; drop it"
_UNTESTED = "segments are not tested with it; drop it"

SEGMENTS = {
    "--pipeline-model-parallel-size": ("without a pipeline nothing overlaps; use at least 2"),
    "--num-layers-per-virtual-pipeline-stage": _ONE_CHUNK,
    "--num-virtual-stages-per-pipeline-rank": _ONE_CHUNK,
    "virtual_pipeline_model_parallel_size": _ONE_CHUNK,
    "--context-parallel-size": "plans do not cut micro-batches that ranks share; use 1",
    "--fp8-format": _UNTESTED,
    "--fp4-format": _UNTESTED,
    "--defer-embedding-wgrad-compute": _UNTESTED,
    "--delay-wgrad-compute": _UNTESTED,
    "--fine-grained-activation-offloading": _UNTESTED,
    "--moe-paged-stash": _UNTESTED,
}
"""Likewise where micro-batches may have several segments."""

_SOME_SEGMENTS: dict[str, Callable[[Settings], object]] = {
    "--pipeline-model-parallel-size": lambda get: (
        get("pipeline_model_parallel_size", 1) == 1 and not get("use_mp_args_from_checkpoint_args")
    ),
    "--context-parallel-size": lambda get: get("context_parallel_size", 1) > 1,
    "--fp8-format": lambda get: get("fp8"),
    "--fp4-format": lambda get: get("fp4"),
}

_LARGEST_SEED = 2**31 - 1
"""Megatron adds numbers of ranks to it, and numpy takes 32 bits."""


def check_supported(args: Namespace, config: SparseBalanceConfig) -> None:
    """Refuse combinations of Megatron flags with ``--sparse-balance`` that would go wrong."""
    get = Settings(args, config)
    if not 1 <= (seed := get("seed", 1)) <= _LARGEST_SEED:
        raise ConfigError(f"--seed {seed}: must be 1 to {_LARGEST_SEED}")
    _check(get, MODEL | TRAINING, get("seq_length", 0))


def check_model(transformer_config: object, config: SparseBalanceConfig, longest: int = 0) -> None:
    """Refuse a model that budgets would go wrong in; ``longest`` is of a sample, in tokens."""
    _check(Settings(transformer_config, config), MODEL, longest)


def check_replaced_attention(transformer_config: object, config: SparseBalanceConfig) -> None:
    """Refuse what attention of this plugin's does not have."""
    refusals = {flag: MODEL[flag] for flag in OF_REPLACED_ATTENTION}
    _refuse(Settings(transformer_config, config), refusals, _SOME_VALUES)


def check_segments(get: Settings) -> None:
    """Refuse what does not train with micro-batches in segments."""
    if get.config.max_segments > 1:
        flag = flag_name("max_segments")
        beside = f"{flag} {get.config.max_segments}"
        _refuse(get, SEGMENTS, _SOME_SEGMENTS, beside, f", or use {flag} 1")


def _refuse(
    get: Settings,
    refusals: Mapping[str, str],
    some_values: Mapping[str, Callable[[Settings], object]],
    beside: str = "--sparse-balance",
    otherwise: str = "",
) -> None:
    """Raise at the first flag that applies, naming the flag beside which it is refused."""
    for flag, remedy in refusals.items():
        value = get(flag.removeprefix("--").replace("-", "_"))
        if some_values[flag](get) if flag in some_values else value:
            raise ConfigError(f"{beside} with {_as_given(flag, value)}: {remedy}{otherwise}")


def _check(get: Settings, refusals: Mapping[str, str], longest: int) -> None:
    if get.config.leaves_attention and get("transformer_impl") != "local":
        most_ranks = max(get.config.max_context_parallel or 1, get("context_parallel_size", 1))
        lacking = OF_UNSHARED_ATTENTION if most_ranks > 1 else ()
        served = set(OF_REPLACED_ATTENTION).difference(lacking)
        refusals = {flag: refusals[flag] for flag in refusals if flag not in served}
    _refuse(get, refusals, _SOME_VALUES)
    for flags, rule, is_broken in _NUMBERS:
        for flag in flags.split():
            number = get(flag.removeprefix("--").replace("-", "_"))
            if number is not None and is_broken(get, number):
                raise ConfigError(f"{flag} {number}: {rule}")
    if get("num_layers"):
        # Layers with budgets of their own are layers of the model.
        base_budgets(get.config.base_budget, get.config.layer_budgets, get("num_layers"))
    selector_named(get.config.selection, get.config.router, get.config.first_blocks)
    _check_sharing(get, longest)
    check_segments(get)


def _as_given(flag: str, value: Any) -> str:
    """The flag with its value, as the user may have typed it."""
    if value is None or isinstance(value, bool):
        return flag
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join([flag, *(str(getattr(item, "name", item)) for item in values)])


def _check_sharing(get: Settings, longest: int) -> None:
    """Refuse a cap that the shares of the longest sample exceed."""
    cap = get.config.max_tokens_per_micro_batch
    ranks = max(get("context_parallel_size", 1), get.config.max_context_parallel or 1)
    if cap is not None and cap * ranks < longest:
        raise ConfigError(
            f"--sparse-balance with --seq-length {longest}: "
            f"{flag_name('max_tokens_per_micro_batch')} {cap} cannot hold one longest sample; use "
            f"at least {-(-longest // ranks)}"
        )


def check_resumed(args: Namespace) -> None:
    """Refuse a checkpoint whose optimizer, or schedule of the learning rate, Megatron does not take
    up in this run, before it fails at it or asserts as much."""
    if args.no_load_optim or not args.load:
        return
    saved = arguments_of_weights(args, resumed=True)
    if saved is not None and not getattr(saved, "no_save_optim", False):
        check_optimizer(saved, args)
        check_schedule(saved, args)


def check_optimizer(saved: Namespace, args: Namespace) -> None:
    """Refuse an optimizer that Megatron cannot read: experts of an expert-parallel group have one
    of their own, the distributed one names its state otherwise, and optimizers differ in what they
    keep."""
    runs = [Settings(each, SparseBalanceConfig()) for each in (saved, args)]
    distributed, sharded = "--use-distributed-optimizer", "--use-torch-fsdp2"
    found = None
    was, now = (get("expert_model_parallel_size", 1) for get in runs)
    if runs[1]("num_experts") and min(was, now) == 1 < max(was, now):
        found = f"--expert-model-parallel-size {was}", now, "more than 1" if was > 1 else "1"
    was, now = (get("optimizer", "adam") for get in runs)
    if was != now:
        found = f"--optimizer {was}", now, f"--optimizer {was}"
    was, now = (
        next((flag for flag in (distributed, sharded) if get(flag[2:].replace("-", "_"))), "")
        for get in runs
    )
    if was != now and (was == distributed or (was, now) == (sharded, distributed)):
        found = was, now or "no such flag", was
    if found is not None:
        raise ConfigError(
            f"--load {args.load}: saved with {found[0]}, and this run has {found[1]}: an "
            f"optimizer's state does not go from the one to the other; use {found[2]}, or "
            "--no-load-optim to go on with the weights alone (Megatron then begins the learning "
            "rate's schedule anew: give the rate that was reached as --lr)"
        )


def check_schedule(saved: Namespace, args: Namespace) -> None:
    """Refuse a schedule of the learning rate that is not the checkpoint's."""
    follows_one = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    if args.skip_train or follows_one or saved.lr is None:
        return
    names = ["lr", "min_lr", "lr_decay_style"]
    if saved.train_iters and args.train_iters:
        # Megatron counts steps in samples.
        theirs, ours = (each.train_iters * each.global_batch_size for each in (saved, args))
        names += ["train_iters", "global_batch_size"] if theirs != ours else []
    for name in names:
        theirs, ours = getattr(saved, name), getattr(args, name)
        if theirs != ours:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"--load {args.load}: saved with {flag} {theirs}, and this run has {ours}; give "
                "--override-opt-param-scheduler to follow this run's schedule of the learning rate "
                "and weight decay, --use-checkpoint-opt-param-scheduler to follow the "
                f"checkpoint's, or {flag} {theirs}"
            )


def not_installed(args: Namespace) -> list[str]:
    """A sentence for each package that flags need and this machine lacks."""
    needed, get = {}, Settings(args, SparseBalanceConfig())
    if (optimizer := get("optimizer", "adam")) not in ("adam", "sgd"):
        needed[f"--optimizer {optimizer}"] = "emerging-optimizers"
    if get("wandb_project"):
        needed["--wandb-project"] = "wandb"
    return [
        f"{flag}: the package {package} is not installed here; pip install {package}"
        for flag, package in needed.items()
        if find_spec(package.replace("-", "_")) is None
    ]


def check_global_batch(args: Namespace) -> None:
    """Refuse a global batch that does not fill its micro-batches, before Megatron says so of
    evaluation's, which is as large; what a checkpoint decides is left to Megatron."""
    get = Settings(args, SparseBalanceConfig())
    kinds = ("tensor_model", "pipeline_model", "context")
    ranks_per_model = max(1, math.prod(get(f"{kind}_parallel_size", 1) for kind in kinds))
    ranks, rest = divmod(get("world_size", 1), ranks_per_model)
    size, micro_batch_size = get("global_batch_size"), get("micro_batch_size")
    if size and micro_batch_size and not rest and not get("use_checkpoint_args"):
        parts = {"--micro-batch-size": micro_batch_size, "data-parallel size": ranks}
        whole_parts(size, "--global-batch-size", parts)
