# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings by true positions, where a rank holds some blocks of a sequence.

Megatron makes one table of embeddings per forward pass and hands it to the decoder; attention
applies row i of it to token i. A hook in front of the decoder puts the rows of this rank's tokens
in its place: a public function of torch, nothing of Megatron is replaced.
"""

from __future__ import annotations

from typing import Any

from megatron.core.utils import unwrap_model

_MARK = "_sparse_balance_true_positions"


def use_true_positions(model: Any) -> None:
    """Have a GPT model's decoder ask its micro-batch for positions; idempotent.

    Args:
        model: one chunk, wrapped by Megatron or not.
    """
    decoder = unwrap_model(model).decoder
    if not getattr(decoder, _MARK, False):
        decoder.register_forward_pre_hook(_hand_over_rows, with_kwargs=True)
        setattr(decoder, _MARK, True)


def _hand_over_rows(
    decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    context = getattr(kwargs.get("packed_seq_params"), "micro_batch", None)
    table = kwargs.get("rotary_pos_emb")
    if context is None or context.sequence is None or table is None:
        return args, kwargs
    rows = table.index_select(0, context.sequence.positions_T)
    return args, {**kwargs, "rotary_pos_emb": rows}
