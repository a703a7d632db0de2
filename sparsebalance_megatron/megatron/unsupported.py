# SPDX-License-Identifier: Apache-2.0
"""What does not go together with ``--sparse-balance``: every flag that is refused, and why.

docs/SUPPORT.md lists the same flags. They are looked at twice: as typed, before Megatron's own
assertions can fail over them, and once more when Megatron has completed its arguments.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.megatron.compat import has_yarn_flags


class _Arguments:
    """Megatron's arguments by name; None for those that this version does not have."""

    def __init__(self, args: Namespace, config: SparseBalanceConfig) -> None:
        self._args = args
        self.config = config

    def __call__(self, name: str, default: Any = None) -> Any:
        return _value(self._args, name, default)


def _value(args: Namespace, name: str, default: Any = None) -> Any:
    value = getattr(args, name, None)
    return default if value is None else value


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A flag that is refused, or a field of the model's config that has no flag.

    ``name`` is its attribute among Megatron's arguments, if that differs from the flag; ``found``
    says whether the user asked for what is refused, by default by any value that is true.
    """

    flag: str
    remedy: str
    name: str | None = None
    found: Callable[[_Arguments], object] | None = None

    @property
    def attribute(self) -> str:
        return self.name or self.flag.removeprefix("--").replace("-", "_")

    def applies(self, get: _Arguments) -> bool:
        return bool(get(self.attribute) if self.found is None else self.found(get))

    def as_given(self, get: _Arguments) -> str:
        """The flag with its value, as the user may have typed it."""
        value = get(self.attribute)
        if value is None or isinstance(value, bool):
            return self.flag
        values = value if isinstance(value, list | tuple) else [value]
        return " ".join([self.flag, *(str(getattr(item, "name", item)) for item in values)])


_NO_GRAPHS = "graphs freeze budgets and lengths; use --cuda-graph-impl none"
_NO_SHARDED_WEIGHTS = (
    "ranks would wait for one another in every layer; drop it, or use --use-distributed-optimizer"
)
_FIXED_BATCH = "the global batch size must stay fixed; drop it"
_NO_FP8 = "rows have any number of tokens, and these kernels need multiples of 16; drop it"
_GPT_ONLY = "only layers with attention have budgets; drop it"
_ONE_VALIDATION_SET = "there is one validation set, and it has no end; drop it"
_ONE_PREFIX = "give one prefix made by `sparse-balance prepare-data` as --data-path"
_NO_LOGITS = "logits are stored per row of fixed length; drop it"


def _more_shards_than_ranks(get: _Arguments, shards: str, ranks: int) -> bool:
    return get(shards, 1) > ranks


def _kv_heads_are_shared(get: _Arguments) -> bool:
    """Whether several tensor-parallel ranks have query heads of one KV head."""
    grouped = get("group_query_attention", True)
    return grouped and 0 < get("num_query_groups", 0) < get("tensor_model_parallel_size", 1)


REFUSALS = (
    # Parallelism and schedules
    Refusal(
        flag="--context-parallel-size",
        remedy="context parallelism is not supported; use 1",
        found=lambda get: get("context_parallel_size", 1) > 1,
    ),
    Refusal(flag="--hybrid-context-parallel", remedy="both place samples; drop it"),
    Refusal(
        flag="--overlap-moe-expert-parallel-comm",
        remedy="its combined schedule hides micro-batch times; drop it",
    ),
    Refusal(
        flag="--microbatch-group-size-per-virtual-pipeline-stage",
        remedy="the simulated schedule has groups of the pipeline's size; drop it",
        name="microbatch_group_size_per_vp_stage",
        found=lambda get: (
            get("microbatch_group_size_per_vp_stage", 0)
            not in (0, get("pipeline_model_parallel_size", 1))
        ),
    ),
    Refusal(flag="--tp-comm-overlap", remedy="its buffers need a fixed sequence length; drop it"),
    Refusal(flag="--use-megatron-fsdp", remedy=_NO_SHARDED_WEIGHTS),
    Refusal(flag="--use-torch-fsdp2", remedy=_NO_SHARDED_WEIGHTS),
    Refusal(
        flag="--tensor-parallel-num-weight-shards",
        remedy=_NO_SHARDED_WEIGHTS,
        found=lambda get: _more_shards_than_ranks(
            get, "tensor_parallel_num_weight_shards", get("tensor_model_parallel_size", 1)
        ),
    ),
    Refusal(
        flag="--expert-tensor-parallel-num-weight-shards",
        remedy=_NO_SHARDED_WEIGHTS,
        found=lambda get: _more_shards_than_ranks(
            get,
            "expert_tensor_parallel_num_weight_shards",
            get("expert_tensor_parallel_size", get("tensor_model_parallel_size", 1)),
        ),
    ),
    Refusal(
        flag="--moe-token-dispatcher-type",
        remedy="rows differ in length; use --moe-token-dispatcher-type alltoall",
        found=lambda get: (
            (get("num_experts") or get("num_moe_experts"))
            and get("moe_token_dispatcher_type") == "allgather"
        ),
    ),
    Refusal(
        flag="--num-query-groups",
        remedy="a KV head's ranks would choose blocks each by itself; use as many groups as "
        "tensor-parallel ranks, or --sparse-balance-selection token-query-head",
        found=lambda get: _kv_heads_are_shared(get) and get.config.selection != "token-query-head",
    ),
    # Kernels
    Refusal(
        flag="--cuda-graph-impl",
        remedy=_NO_GRAPHS,
        found=lambda get: get("cuda_graph_impl", "none") != "none",
    ),
    Refusal(flag="--enable-cuda-graph", remedy=_NO_GRAPHS),
    Refusal(flag="--external-cuda-graph", remedy=_NO_GRAPHS),
    Refusal(flag="--fp8-format", remedy=_NO_FP8, name="fp8"),
    Refusal(flag="--fp4-format", remedy=_NO_FP8, name="fp4"),
    Refusal(flag="fp8_dot_product_attention", remedy="attention runs in the model's dtype"),
    Refusal(flag="fp8_multi_head_attention", remedy="attention runs in the model's dtype"),
    Refusal(
        flag="--transformer-impl",
        remedy="its layers are for inference; use transformer_engine or local",
        found=lambda get: get("transformer_impl") == "inference_optimized",
    ),
    Refusal(flag="--use-kitchen-attention", remedy="both replace core attention; drop it"),
    Refusal(
        flag="--attention-backend",
        remedy="Megatron would replace the plugin's attention; drop it",
        found=lambda get: getattr(get("attention_backend"), "name", None) == "local",
    ),
    # Models
    Refusal(
        flag="--multi-latent-attention",
        remedy="budgets need plain or grouped-query attention; drop it",
    ),
    Refusal(flag="--experimental-attention-variant", remedy="both replace core attention; drop it"),
    Refusal(flag="--hybrid-layer-pattern", remedy=_GPT_ONLY),
    Refusal(flag="--hybrid-override-pattern", remedy=_GPT_ONLY),
    Refusal(flag="--is-hybrid-model", remedy=_GPT_ONLY),
    Refusal(flag="--spec", remedy="both choose the layers; drop it"),
    Refusal(
        flag="--heterogeneous-layers-config-path",
        remedy="the cost model knows layers that are alike; drop it",
    ),
    Refusal(
        flag="ModelOpt", remedy="both choose the layers; train without it", name="modelopt_enabled"
    ),
    Refusal(
        flag="--mtp-num-layers", remedy="multi-token prediction layers are not planned; drop it"
    ),
    Refusal(
        flag="--position-embedding-type",
        remedy="documents have one position per token; use rope, yarn, learned_absolute or none",
        found=lambda get: get("position_embedding_type") in ("mrope", "relative"),
    ),
    Refusal(
        flag="--position-embedding-type yarn",
        remedy="this megatron-core has no flags for it; use 0.19 or newer, or rope",
        name="yarn",
        found=lambda get: get("position_embedding_type") == "yarn" and not has_yarn_flags(),
    ),
    Refusal(
        flag="--attention-dropout",
        remedy="block-sparse attention has no dropout; use --attention-dropout 0",
        found=lambda get: get("attention_dropout", 0.0) > 0.0,
    ),
    Refusal(
        flag="--softmax-type",
        remedy="only the plain softmax is implemented; use vanilla",
        found=lambda get: get("softmax_type", "vanilla") != "vanilla",
    ),
    Refusal(flag="--window-size", remedy="the block selection replaces sliding windows; drop it"),
    Refusal(flag="--qk-clip", remedy="logits of unselected blocks are never computed; drop it"),
    Refusal(
        flag="--log-max-attention-logit",
        remedy="logits of unselected blocks are never computed; drop it",
    ),
    # Batches and data
    Refusal(flag="--rampup-batch-size", remedy=_FIXED_BATCH),
    Refusal(flag="--step-batch-size-schedule", remedy=_FIXED_BATCH),
    Refusal(flag="--decrease-batch-size-if-needed", remedy=_FIXED_BATCH),
    Refusal(
        flag="--iterations-to-skip",
        remedy="Megatron reads the rows it skips as rows of fixed length; drop it",
    ),
    Refusal(
        flag="--phase-transition-iterations",
        remedy="one order of samples holds for the whole run; drop it",
    ),
    Refusal(flag="--full-validation", remedy=_ONE_VALIDATION_SET),
    Refusal(flag="--multiple-validation-sets", remedy=_ONE_VALIDATION_SET),
    Refusal(flag="--mock-data", remedy=f"plans need real lengths; {_ONE_PREFIX}"),
    Refusal(flag="--train-data-path", remedy=_ONE_PREFIX),
    Refusal(flag="--valid-data-path", remedy=f"{_ONE_PREFIX}, and its parts with --split"),
    Refusal(flag="--test-data-path", remedy=f"{_ONE_PREFIX}, and its parts with --split"),
    Refusal(flag="--data-args-path", remedy=_ONE_PREFIX),
    Refusal(flag="--per-split-data-args-path", remedy=_ONE_PREFIX),
    Refusal(
        flag="no --data-path",
        remedy=f"plans need real lengths; {_ONE_PREFIX}",
        name="no_data_path",
        found=lambda get: not get("data_path"),
    ),
    Refusal(
        flag="--data-path",
        remedy="blends are not supported; give one prefix",
        found=lambda get: len(get("data_path")) > 1,
    ),
    Refusal(
        flag="--dataloader-type",
        remedy="the plugin brings its own iterator; use external or drop the flag",
        found=lambda get: get("dataloader_type") != "external",
    ),
    Refusal(
        flag="--sft",
        remedy="prepare conversations with `sparse-balance prepare-data` and drop it",
    ),
    Refusal(flag="--fim-data", remedy="samples are trained on as they are stored; drop it"),
    Refusal(
        flag="--eod-mask-loss",
        remedy="loss masks are made by `sparse-balance prepare-data`; drop it",
    ),
    Refusal(flag="--logits-save-dir", remedy=_NO_LOGITS),
    Refusal(flag="--logits-load-dir", remedy=_NO_LOGITS),
    Refusal(
        flag="per-sample loss",
        remedy="regrouping needs --calculate-per-token-loss",
        name="calculate_per_token_loss",
        found=lambda get: not get("calculate_per_token_loss"),
    ),
    # The training loop and its checkpoints
    Refusal(flag="--perform-rl-step", remedy="rollouts are not planned; drop it"),
    Refusal(flag="--yaml-cfg", remedy="give every flag on the command line instead"),
    Refusal(flag="--inprocess-restart", remedy="let torchrun restart the ranks; drop it"),
    Refusal(
        flag="--non-persistent-ckpt-type",
        remedy="the plugin's state is in regular checkpoints only; drop it",
    ),
    Refusal(
        flag="--override-ckpt-iteration",
        remedy="plans follow the samples consumed; choose a checkpoint with --ckpt-step",
    ),
    Refusal(
        flag="--ckpt-format",
        remedy="the plugin's state is read from torch_dist checkpoints; use torch_dist",
        found=lambda get: (
            (get("save") or get("load")) and get("ckpt_format", "torch_dist") != "torch_dist"
        ),
    ),
)
"""In the order in which they are looked at; the first that applies is named."""


def check_supported(args: Namespace, config: SparseBalanceConfig) -> None:
    """Refuse combinations of Megatron flags with ``--sparse-balance`` that would go wrong.

    Raises:
        ConfigError: naming both flags and the remedy.
    """
    get = _Arguments(args, config)
    for refusal in REFUSALS:
        if refusal.applies(get):
            raise ConfigError(f"--sparse-balance with {refusal.as_given(get)}: {refusal.remedy}")
    cap, seq_length = config.max_tokens_per_micro_batch, get("seq_length", 0)
    if cap is not None and cap < seq_length:
        raise ConfigError(
            f"--sparse-balance with --seq-length {seq_length}: "
            f"{flag_name('max_tokens_per_micro_batch')} {cap} cannot hold one longest sample; use "
            f"at least {seq_length}"
        )


def check_batches(args: Namespace) -> None:
    """Refuse a global batch that does not fill its slots, before Megatron asserts as much.

    Asks the flags as typed; what cannot be told yet, because flags are missing or will come from a
    checkpoint, is left to Megatron.

    Raises:
        ConfigError: naming the flags and the remedy.
    """
    get = partial(_value, args)
    ranks_per_model = (
        get("tensor_model_parallel_size", 1)
        * get("pipeline_model_parallel_size", 1)
        * get("context_parallel_size", 1)
    )
    ranks = get("world_size", 1)
    if get("use_checkpoint_args") or ranks % ranks_per_model:
        return
    data_parallel_size = ranks // ranks_per_model
    micro_batch_size, global_batch_size = get("micro_batch_size"), get("global_batch_size")
    sizes = {
        "": (micro_batch_size, global_batch_size),
        "eval-": (
            get("eval_micro_batch_size", micro_batch_size),
            get("eval_global_batch_size", global_batch_size),
        ),
    }
    for prefix, (micro, whole) in sizes.items():
        if micro and whole and whole % (micro * data_parallel_size):
            raise ConfigError(
                f"--{prefix}global-batch-size {whole} must be a multiple of "
                f"--{prefix}micro-batch-size {micro} x data-parallel size {data_parallel_size} = "
                f"{micro * data_parallel_size}"
            )
