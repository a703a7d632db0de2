# SPDX-License-Identifier: Apache-2.0
"""True positions of tokens for Megatron's multi-latent attention, which rotates inside the layer.

Shape legend: T tokens that a rank computes.
"""

import copy
from typing import Any

from torch import Tensor

from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch


class TruePositions:
    """Mixed into Megatron's multi-latent attention: rotates by the true positions of tokens.

    Other attention gets its table of rotary embeddings from the model; this one makes it in every
    layer, for one sequence from position 0. A packed sequence with a plan passes in the sbhd
    layout, with a batch of one: line i of the table then belongs to token i, values keep their head
    dim, and no boundary is read from the device. Other inputs pass as they are.
    """

    rotary_pos_emb: Any

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._position_T: Tensor | None = None
        self.rotary_pos_emb.register_forward_pre_hook(self._uncut, with_kwargs=True)
        self.rotary_pos_emb.register_forward_hook(self._lines_of_tokens)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        packed: Any = keywords.get("packed_seq_params")
        context: LocalMicroBatch | None = getattr(packed, "micro_batch", None)
        self._position_T = None
        if context is not None:
            sequence = context.sequence
            self._position_T = (
                context.layout.position_T if sequence is None else sequence.positions_T
            )
            packed = copy.copy(packed)
            packed.qkv_format = "sbhd"
        keywords["packed_seq_params"] = packed
        return super().forward(*arguments, **keywords)  # type: ignore[misc]

    def _uncut(self, _: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        """Ask for the lines of the whole sequence, where Megatron would cut them by rank."""
        if self._position_T is not None:
            keywords = {**keywords, "packed_seq": True}
        return arguments, keywords

    def _lines_of_tokens(self, _: Any, __: Any, table: Any) -> Any:
        """Give the line of each token, [T, 1, rotary dim]; YaRN's table comes with a scale."""
        if self._position_T is None:
            return table
        lines, *scale = table if isinstance(table, tuple) else (table,)
        of_tokens = lines[:, 0].index_select(0, self._position_T)
        return (of_tokens, *scale) if scale else of_tokens
