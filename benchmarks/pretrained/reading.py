# SPDX-License-Identifier: Apache-2.0
"""Passes of a model over a document, with attention that a benchmark chooses.

Built-in selections that read a whole document sparsely run through ``evaluate``, as users run
them. Everything else goes through :data:`NAME`, which asks a rule for lists of blocks and gives
them to ``block_sparse_attention``.

Shape legend: B documents of a batch, T tokens that are read, Q of them that ask, L layers, H query
heads, G KV heads, D head dim, E hidden size, V vocabulary, X scored labels.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface

from pretrained.documents import Document
from sparsebalance_megatron import evaluate
from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.layout import LayoutPair, packed_layout
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.layer_budgets import DENSE

NAME = "sparse_balance_lists"
"""Value of ``attn_implementation``."""
_LOGITS_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """What a rule is asked for: the lists of one layer.

    Attributes:
        q_QHD: the queries.
        k_TGD: the keys.
        layouts: the blocks of both.
    """

    layer: int
    q_QHD: Tensor
    k_TGD: Tensor
    layouts: LayoutPair
    softmax_scale: float


type Attend = Callable[[Tensor], Tensor]
"""Values, [T, G, D], to outputs, [Q, H, D]."""
type Rule = Callable[[Asked], Selection | Attend | None]
"""Lists of blocks, or what attends; None for dense attention."""
type Observer = Callable[[Asked], None]


@dataclass(frozen=True, kw_only=True)
class Wished:
    """What wishes added to lists, by layer; whole layers have none.

    Attributes:
        wishes_L: entries a tile, or a token and head that wishes; the mean.
        read_L: blocks that a token's head reads, list and wishes; the mean.
        cut: entries that tiles had no room for, in all layers.
    """

    wishes_L: tuple[float, ...]
    read_L: tuple[float, ...]
    cut: int


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scored labels' float32 loss in nats, and whether the label is the best guess."""

    loss_X: Tensor
    right_X: Tensor
    wished: Wished | None = None


class Reader:
    """One model and how it reads."""

    def __init__(self, model: Any) -> None:
        AttentionInterface.register(NAME, _attention)
        self.model = model
        self.layers: int = model.config.num_hidden_layers

    @torch.inference_mode()
    def dense(self, document: Document) -> Scores:
        """Read everything."""
        self.model.set_attn_implementation("sdpa")
        return self._scores(document, self._states(document.tokens[:-1]))

    @torch.inference_mode()
    def product(
        self,
        document: Document,
        *,
        block_size: int,
        selection: str,
        budgets: Sequence[int],
        **settings: Any,
    ) -> Scores:
        """Read sparsely from the first token, through ``evaluate``.

        Args:
            budgets: blocks by layer, or DENSE.
            settings: further fields of :class:`.evaluate.SparseAttention`.
        """
        self.configure(block_size, selection, budgets, **settings)
        return self._scores(document, self._states(document.tokens[:-1]))

    def configure(
        self, block_size: int, selection: str, budgets: Sequence[int], **settings: Any
    ) -> None:
        """Let the model read by a built-in selection."""
        evaluate.configure(
            self.model,
            sparse_block_size=block_size,
            sparse_topk_blocks=1,
            sparse_layer_topk_blocks=[None if each == DENSE else each for each in budgets],
            sparse_selection=selection,
            **settings,
        )
        self.model.set_attn_implementation(evaluate.NAME)

    @torch.inference_mode()
    def by_rule(self, document: Document, block_size: int, rule: Rule) -> Scores:
        """Read by a rule's lists from the first token."""
        with self._attending(_Reading(block_size=block_size, rule=rule)):
            return self._scores(document, self._states(document.tokens[:-1]))

    @torch.inference_mode()
    def observed(self, document: Document, block_size: int, observe: Observer) -> None:
        """Read everything, and show every layer's queries and keys."""
        with self._attending(_Reading(block_size=block_size, rule=_dense, observe=observe)):
            self._states(document.tokens[:-1])

    def attending(self, block_size: int, rule: Rule) -> AbstractContextManager[None]:
        """Within it the model reads by a rule's lists, every document of a batch by itself."""
        return self._attending(_Reading(block_size=block_size, rule=rule))

    def _states(self, tokens: Sequence[int]) -> Tensor:
        """Last hidden states, [T, E]."""
        found: Tensor = self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state
        return found[0]

    def _scores(self, document: Document, states_TE: Tensor) -> Scores:
        scored_X = torch.tensor(document.scored)
        label_X = torch.tensor(document.tokens)[scored_X + 1]
        return self.scores_of(states_TE[scored_X], label_X)

    @torch.inference_mode()
    def scores_of(self, states_XE: Tensor, label_X: Tensor) -> Scores:
        """Scores of labels from the states before them, a few logits at a time."""
        loss, right = [], []
        for states, label in zip(
            states_XE.split(_LOGITS_AT_ONCE), label_X.split(_LOGITS_AT_ONCE), strict=True
        ):
            logits = self.model.lm_head(states)
            loss.append(cross_entropy(logits, label, reduction="none"))
            right.append(logits.argmax(-1) == label)
        return Scores(loss_X=torch.cat(loss), right_X=torch.cat(right))

    def _attending(self, reading: "_Reading") -> "_Reading":
        self.model.set_attn_implementation(NAME)
        reading.modules = [layer.self_attn for layer in self.model.model.layers]
        return reading


class _Reading:
    """How all layers attend while it is entered."""

    def __init__(self, *, block_size: int, rule: Rule, observe: Observer | None = None) -> None:
        self.block_size, self.rule, self.observe = block_size, rule, observe
        self.modules: list[Any] = []

    def __enter__(self) -> None:
        for module in self.modules:
            module.reading = self

    def __exit__(self, *_: object) -> None:
        for module in self.modules:
            del module.reading

    def asked(self, layer: int, q_QHD: Tensor, k_TGD: Tensor, softmax_scale: float) -> Asked:
        layout = packed_layout((0, len(k_TGD)), self.block_size, "cpu")
        return Asked(
            layer=layer,
            q_QHD=q_QHD,
            k_TGD=k_TGD,
            layouts=LayoutPair.within(layout),
            softmax_scale=softmax_scale,
        )


def _attention(
    module: Any,
    query_BHQD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend to the lists of the module's rule; for ``transformers``, which passes no mask here."""
    assert attention_mask is None
    documents = zip(query_BHQD, key_BGTD, value_BGTD, strict=True)
    found = [_document_attention(module, *each, scaling) for each in documents]
    return torch.stack(found), None


def _document_attention(
    module: Any, q_HQD: Tensor, k_GTD: Tensor, v_GTD: Tensor, softmax_scale: float
) -> Tensor:
    """One document's outputs, [Q, H, D]."""
    reading = module.reading
    q_QHD, k_TGD, v_TGD = (x.transpose(0, 1) for x in (q_HQD, k_GTD, v_GTD))
    asked = reading.asked(module.layer_idx, q_QHD, k_TGD, softmax_scale)
    if reading.observe is not None:
        reading.observe(asked)
    selection = reading.rule(asked)
    if callable(selection):
        return selection(v_TGD)
    if selection is not None:
        return block_sparse_attention(q_QHD, k_TGD, v_TGD, selection, softmax_scale=softmax_scale)[
            0
        ]
    out_1HQD = scaled_dot_product_attention(
        *(q_HQD[None], k_GTD[None], v_GTD[None]),
        is_causal=True,
        scale=softmax_scale,
        enable_gqa=True,
    )
    return out_1HQD[0].transpose(0, 1)


def _dense(asked: Asked) -> None:
    """The rule that reads everything."""
