# SPDX-License-Identifier: Apache-2.0
"""What of a model does not go together with ``--sparse-balance``, and what to do instead.

Fields of Megatron's ``TransformerConfig``, which are flags of the same names; those of
``megatron.training`` alone are in :mod:`.unsupported_training`. docs/SUPPORT.md is generated from
both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sparsebalance_megatron.attention.select import selector_named
from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.megatron.compat import has_yarn_flags
from sparsebalance_megatron.plan.context_groups import is_power_of_two


@dataclass(frozen=True)
class Settings:
    """Megatron's arguments, or its config, by name."""

    megatron: object
    config: SparseBalanceConfig

    def __call__(self, name: str, default: Any = None) -> Any:
        return value_of(self.megatron, name, default)


def value_of(megatron: object, name: str, default: Any = None) -> Any:
    """A setting of Megatron, or ``default`` where it is None or this version does not have it."""
    value = getattr(megatron, name, None)
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
    found: Callable[[Settings], object] | None = None

    @property
    def attribute(self) -> str:
        return self.name or self.flag.removeprefix("--").replace("-", "_")

    def applies(self, get: Settings) -> bool:
        return bool(get(self.attribute) if self.found is None else self.found(get))

    def as_given(self, get: Settings) -> str:
        """The flag with its value, as the user may have typed it."""
        value = get(self.attribute)
        if value is None or isinstance(value, bool):
            return self.flag
        values = value if isinstance(value, list | tuple) else [value]
        return " ".join([self.flag, *(str(getattr(item, "name", item)) for item in values)])


_NO_GRAPHS = "graphs freeze budgets and lengths; use --cuda-graph-impl none"
NO_SHARDED_WEIGHTS = (
    "ranks would wait for one another in every layer; drop it, or use --use-distributed-optimizer"
)
_PLACES_SAMPLES = "both place samples; drop it"
_PADS_SEQUENCES = "both pad packed sequences; drop it"
_REPLACES_ATTENTION = "both replace core attention; drop it"
GPT_ONLY = "only layers with attention have budgets; drop it"


def _more_shards_than_ranks(get: Settings, shards: str, ranks: int) -> bool:
    return get(shards, 1) > ranks


def _kv_heads_are_shared(get: Settings) -> bool:
    """Whether several tensor-parallel ranks have query heads of one KV head."""
    grouped = get("group_query_attention", True)
    return grouped and 0 < get("num_query_groups", 0) < get("tensor_model_parallel_size", 1)


MODEL = (
    Refusal(
        flag="--context-parallel-size",
        remedy="1, 2, 4, ... ranks share a packed sequence; use a power of two",
        found=lambda get: not is_power_of_two(get("context_parallel_size", 1)),
    ),
    Refusal(flag="--hybrid-context-parallel", remedy=_PLACES_SAMPLES),
    Refusal(flag="--dynamic-context-parallel", remedy=_PLACES_SAMPLES),
    Refusal(flag="--sequence-packing-scheduler", remedy=_PLACES_SAMPLES),
    Refusal(flag="--pad-packed-seq-alignment", remedy=_PADS_SEQUENCES),
    Refusal(flag="--thd-max-packed-sequences", remedy=_PADS_SEQUENCES),
    Refusal(flag="--thd-tail-padding-policy", remedy=_PADS_SEQUENCES),
    Refusal(
        flag="--cp-partition-mode",
        remedy="plans say which rank holds which blocks; drop it",
        found=lambda get: get("cp_partition_mode", "zigzag") != "zigzag",
    ),
    Refusal(
        flag="--enable-mhc-connections",
        remedy="layers with several residual streams are not planned; drop it",
        name="enable_hyper_connections",
        found=lambda get: get("enable_mhc_connections") or get("enable_hyper_connections"),
    ),
    Refusal(
        flag="--hierarchical-context-parallel-sizes",
        remedy="both exchange keys and values; use --sparse-balance-exchange hierarchical-ring",
    ),
    Refusal(
        flag="--overlap-moe-expert-parallel-comm",
        remedy="its combined schedule hides micro-batch times; drop it",
    ),
    Refusal(flag="--tp-comm-overlap", remedy="its buffers need a fixed sequence length; drop it"),
    Refusal(
        flag="--tensor-parallel-num-weight-shards",
        remedy=NO_SHARDED_WEIGHTS,
        found=lambda get: _more_shards_than_ranks(
            get, "tensor_parallel_num_weight_shards", get("tensor_model_parallel_size", 1)
        ),
    ),
    Refusal(
        flag="--expert-tensor-parallel-num-weight-shards",
        remedy=NO_SHARDED_WEIGHTS,
        found=lambda get: _more_shards_than_ranks(
            get,
            "expert_tensor_parallel_num_weight_shards",
            get("expert_tensor_parallel_size", get("tensor_model_parallel_size", 1)),
        ),
    ),
    Refusal(
        flag="--moe-token-dispatcher-type",
        remedy="packed sequences differ in length; use --moe-token-dispatcher-type alltoall",
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
    Refusal(
        flag="--cuda-graph-impl",
        remedy=_NO_GRAPHS,
        found=lambda get: get("cuda_graph_impl", "none") != "none",
    ),
    Refusal(flag="--enable-cuda-graph", remedy=_NO_GRAPHS),
    Refusal(flag="--external-cuda-graph", remedy=_NO_GRAPHS),
    Refusal(flag="fp8_dot_product_attention", remedy="attention runs in the model's dtype"),
    Refusal(flag="fp8_multi_head_attention", remedy="attention runs in the model's dtype"),
    Refusal(
        flag="--transformer-impl",
        remedy="its layers are for inference; use transformer_engine or local",
        found=lambda get: get("transformer_impl") == "inference_optimized",
    ),
    Refusal(flag="--use-kitchen-attention", remedy=_REPLACES_ATTENTION),
    Refusal(
        flag="--attention-backend",
        remedy="Megatron would replace the plugin's attention; drop it",
        found=lambda get: getattr(get("attention_backend"), "name", None) == "local",
    ),
    Refusal(
        flag="--multi-latent-attention",
        remedy="budgets need plain or grouped-query attention; drop it",
    ),
    Refusal(flag="--experimental-attention-variant", remedy=_REPLACES_ATTENTION),
    Refusal(flag="--linear-attention-type", remedy=_REPLACES_ATTENTION),
    Refusal(flag="--is-hybrid-model", remedy=GPT_ONLY),
    Refusal(
        flag="--heterogeneous-layers-config-path",
        remedy="the cost model knows layers that are alike; drop it",
    ),
    Refusal(
        flag="--mtp-num-layers",
        remedy="its loss depends on which samples share a micro-batch, and its attention cannot be "
        "told from the first layers'; drop it",
    ),
    Refusal(
        flag="--position-embedding-type",
        remedy="documents have one position per token; use rope, yarn, learned_absolute or none",
        found=lambda get: get("position_embedding_type") in ("mrope", "relative"),
    ),
    Refusal(
        flag="--rotary-base-per-layer",
        remedy="layers with tables of their own would rotate shared sequences by wrong "
        "positions; use --rotary-base",
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
    Refusal(
        flag="per-sample loss",
        remedy="regrouping needs --calculate-per-token-loss",
        name="calculate_per_token_loss",
        found=lambda get: not get("calculate_per_token_loss"),
    ),
)
"""In the order in which they are looked at; the first that applies is named."""


def check_model(transformer_config: object, config: SparseBalanceConfig) -> None:
    """Refuse a model that budgets would go wrong in.

    Raises:
        ConfigError: naming both flags and the remedy.
    """
    refuse(MODEL, Settings(transformer_config, config))


def check_cap(
    seq_length: int, config: SparseBalanceConfig, *, context_parallel_size: int = 1
) -> None:
    """Refuse a cap on a rank's tokens that the shares of a sample of ``seq_length`` exceed.

    Raises:
        ConfigError: naming the cap that would do.
    """
    cap = config.max_tokens_per_micro_batch
    ranks = max(context_parallel_size, config.max_context_parallel or 1)
    if cap is not None and cap * ranks < seq_length:
        raise ConfigError(
            f"--sparse-balance with --seq-length {seq_length}: "
            f"{flag_name('max_tokens_per_micro_batch')} {cap} cannot hold one longest sample; use "
            f"at least {-(-seq_length // ranks)}"
        )


def check_selection(config: SparseBalanceConfig, *, context_parallel_size: int = 1) -> None:
    """Refuse a selection that needs a sequence's last queries, where ranks may share it.

    Raises:
        ConfigError: naming the selection, the flag that lets ranks share it, and the remedy.
    """
    sharing = {
        "--context-parallel-size": context_parallel_size,
        flag_name("max_context_parallel"): config.max_context_parallel or 1,
    }
    for flag, ranks in sharing.items():
        if ranks > 1 and getattr(selector_named(config.selection), "needs_whole_documents", False):
            raise ConfigError(
                f"{flag_name('selection')} {config.selection} with {flag} {ranks}: its probes are "
                "the last queries of a sequence, which one rank must hold; use vertical-slash, or "
                "1 rank"
            )


def refuse(refusals: Iterable[Refusal], get: Settings) -> None:
    """Raise :class:`ConfigError` for the first that applies."""
    for refusal in refusals:
        if refusal.applies(get):
            raise ConfigError(f"--sparse-balance with {refusal.as_given(get)}: {refusal.remedy}")
