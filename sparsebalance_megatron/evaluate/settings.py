# SPDX-License-Identifier: Apache-2.0
"""Settings of sparse attention in a Hugging Face config.json.

They lie under ``sparse_attention_config``, with the names of MiniMax-M3 where they mean the same. A
key that is not known is an error: another project's settings are not read as these.
"""

from typing import Annotated, Any, Literal

import msgspec

from sparsebalance_megatron.cost.work_model import work_model_named
from sparsebalance_megatron.errors import ConfigError
from sparsebalance_megatron.json_file import UnreadableFileError, checked
from sparsebalance_megatron.layer_budgets import DENSE, check_first_blocks, dense_up_to_blocks
from sparsebalance_megatron.selector_registry import SELECTORS, default_first_blocks

KEY = "sparse_attention_config"
"""The key of config.json, and the attribute of a ``transformers`` config."""

_Blocks = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class SparseAttention(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Settings of sparse attention that a model's layers read.

    Attributes:
        sparse_block_size: tokens of a KV block.
        sparse_topk_blocks: blocks that a query reads, its own included.
        sparse_selection: who selects them; a name that ``--sparse-balance-selection`` takes.
        sparse_layer_topk_blocks: one entry per layer in place of ``sparse_topk_blocks``; null makes
            a layer dense.
        sparse_dense_up_to_tokens: documents of up to this length are read whole, in layers with
            blocks of their own in proportion to them.
        sparse_local_block: blocks that are read wherever they score: the own one.
        sparse_init_block: blocks at a document's beginning of which this holds; None is what the
            selection reads by default.
    """

    sparse_block_size: _Blocks
    sparse_topk_blocks: _Blocks
    sparse_selection: str
    sparse_layer_topk_blocks: tuple[_Blocks | None, ...] | None = None
    sparse_dense_up_to_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    sparse_local_block: Literal[1] = 1
    sparse_init_block: Annotated[int, msgspec.Meta(ge=0, le=16)] | None = None

    def as_config(self) -> dict[str, Any]:
        """Settings as config.json holds them."""
        kept = {"sparse_local_block": 1, "sparse_init_block": self.first_blocks}
        return msgspec.to_builtins(self) | kept

    @property
    def first_blocks(self) -> int:
        """First blocks of a document that every query reads besides its own, within its budget."""
        if self.sparse_init_block is None:
            return default_first_blocks(self.sparse_selection)
        return self.sparse_init_block

    def base_budget(self, layer: int) -> int:
        """Blocks that a query of a layer may read; :data:`.DENSE` for a dense layer."""
        if self.sparse_layer_topk_blocks is None:
            return self.sparse_topk_blocks
        budget = self.sparse_layer_topk_blocks[layer]
        return DENSE if budget is None else budget

    def whole_up_to_tokens(self, layers: int) -> int | None:
        """The longest document that all layers read whole; None where they read every one so."""
        blocks = min(map(self._dense_blocks, range(layers)))
        return None if blocks >= DENSE else self.sparse_block_size * blocks

    def budget_blocks(self, layer: int, tokens: int) -> int:
        """Blocks that a query of a layer reads in a document of this length."""
        all_blocks = max(1, -(-tokens // self.sparse_block_size))
        return all_blocks if all_blocks <= self._dense_blocks(layer) else self.base_budget(layer)

    def _dense_blocks(self, layer: int) -> int:
        return dense_up_to_blocks(
            *(self.base_budget(layer), self.sparse_topk_blocks),
            *(self.sparse_dense_up_to_tokens, self.sparse_block_size),
        )

    def density(self, tokens: int, layers: int) -> float:
        """The share of causal attention that is computed for a document of this length.

        >>> settings = SparseAttention(
        ...     sparse_block_size=128, sparse_topk_blocks=8, sparse_selection="token-kv-head"
        ... )
        >>> settings.density(1024, layers=2), round(settings.density(131072, layers=2), 4)
        (1.0, 0.0156)
        """
        work = work_model_named(self.sparse_selection)
        blocks = tokens / self.sparse_block_size
        attended = sum(
            float(work.attended_pairs(blocks, self.budget_blocks(layer, tokens)))
            for layer in range(layers)
        )
        return attended / (layers * float(work.visible_pairs(blocks)))


_NEEDED = {"sparse_block_size", "sparse_topk_blocks", "sparse_selection"}
_NO_SETTINGS = (
    f"the model's config has no {KEY}: call "
    "sparsebalance_megatron.evaluate.configure(model, sparse_block_size=..., "
    "sparse_topk_blocks=..., sparse_selection=...), or give these to lm-eval's --model_args"
)


def configure(model: Any, **settings: Any) -> SparseAttention:
    """Set, or change some of, the settings of a ``transformers`` model; give all of them.

    Args:
        model: a model, whose config keeps them and saves them with ``save_pretrained``.
        settings: fields of :class:`SparseAttention`.

    Raises:
        ConfigError: a setting is missing, unknown or wrong.
    """
    config = model.config.get_text_config()
    kept = getattr(config, KEY, None)
    if kept is None and not settings.keys() >= _NEEDED:
        raise ConfigError(_NO_SETTINGS)
    kept = dict(kept or {})
    if settings.get("sparse_selection") not in (None, kept.get("sparse_selection")):
        # Another selection has a default of its own.
        kept.pop("sparse_init_block", None)
    found = checked_settings({**kept, **settings}, config)
    setattr(config, KEY, found.as_config())
    return found


def settings_of(config: Any) -> SparseAttention:
    """The settings in a ``transformers`` config; a ConfigError if they are missing or wrong."""
    config = config.get_text_config()
    found = getattr(config, KEY, None)
    if found is None:
        raise ConfigError(_NO_SETTINGS)
    return checked_settings(found, config)


def checked_settings(values: Any, config: Any) -> SparseAttention:
    """Read the settings of a model; a ConfigError if one is missing or wrong."""
    try:
        found: SparseAttention = checked(values, SparseAttention)
    except UnreadableFileError as error:
        raise ConfigError(f"{KEY}: {error}") from error
    SELECTORS.check_name(found.sparse_selection)
    by_layer = found.sparse_layer_topk_blocks
    if by_layer is not None and len(by_layer) != config.num_hidden_layers:
        raise ConfigError(
            f"{KEY}: sparse_layer_topk_blocks has {len(by_layer)} entries for "
            f"{config.num_hidden_layers} layers: give one per layer"
        )
    budgets = dict.fromkeys(map(found.base_budget, range(config.num_hidden_layers)), "topk_blocks")
    check_first_blocks(f"{KEY}: sparse_init_block", found.first_blocks, budgets)
    return found
