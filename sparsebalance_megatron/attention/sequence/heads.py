# SPDX-License-Identifier: Apache-2.0
"""Heads travel: ranks that share a packed sequence attend to whole documents, each with its heads.

1. One all-to-all gives every member all tokens of its part of the query heads and of the KV heads
   that they read.
2. Attention runs on whole documents, as on one rank.
3. One all-to-all brings the outputs of all heads back to those who hold their tokens.

Backward takes the same two, in the other direction. Work is exactly an even part of the whole,
whatever the documents, and outputs are bit-equal to those of one rank. The scheme is that of
DeepSpeed-Ulysses (arXiv:2309.14509); where there are more members than KV heads, these travel to
several members.

Shape legend: T tokens (of a slice, or of the whole sequence), E values of a token and member side
by side, W members.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparsebalance_megatron.attention.sequence.slice import SequenceSlice


@dataclass(frozen=True, eq=False)
class TravellingHeads:
    """The exchange of heads of the first documents of a packed sequence, or of all, between ranks
    that can divide them (:meth:`..cost.exchange.Exchange.heads_obstacle`).

    ``sequence``: what this rank holds of it. ``tokens``: of these documents.
    """

    sequence: SequenceSlice
    tokens: int

    def attend(self, qkv: Sequence[Tensor], attention: Callable[..., Tensor]) -> Tensor:
        """Outputs [T, H, F] of this rank's tokens.

        Args:
            qkv: queries [T, H, D], keys [T, G, D] and values [T, G, F] of this rank's tokens.
            attention: gives outputs of any shape [T, ...] from those of all tokens, in the order of
                the sequence, and of this member's heads.
        """
        members, (own, query_heads, _) = self.sequence.group.members, qkv[0].shape
        if members == 1:
            return attention(*qkv).reshape(own, query_heads, qkv[2].shape[2])
        kv_heads = qkv[1].shape[1]
        # Query heads that read one KV head are neighbours, so are the members that have them.
        copies = max(1, members // kv_heads)
        parts = list(qkv)
        if copies > 1:
            parts[1:] = [x.repeat_interleave(copies, 1) for x in qkv[1:]]
        of_member = [(x.shape[1] // members, x.shape[2]) for x in parts]
        sizes = [heads * size for heads, size in of_member]
        packed = [x.reshape(own, members, size) for x, size in zip(parts, sizes, strict=True)]
        whole_TE = _Exchanged.apply(torch.cat(packed, dim=2), self, True)
        split = zip(whole_TE.split(sizes, dim=1), of_member, strict=True)
        out = attention(*(x.unflatten(1, shape) for x, shape in split))
        out_TE = out.reshape(self.tokens, of_member[0][0] * of_member[2][1])
        out_TWE = _Exchanged.apply(out_TE, self, False)
        return out_TWE.reshape(own, query_heads, of_member[2][1])

    def to_heads(self, x_TWE: Tensor) -> Tensor:
        """All tokens' values for this member, [T, E], from those of its own tokens for each."""
        own, members, size = x_TWE.shape
        received = x_TWE.new_empty(self.tokens, size)
        sent = x_TWE.transpose(0, 1).reshape(members * own, size)
        self._all_to_all(received, sent, self._held, [own] * members)
        return received.index_select(0, self._place_T)

    def to_tokens(self, x_TE: Tensor) -> Tensor:
        """Own tokens' values from each member, [T, W, E], from those of all tokens here."""
        members = self.sequence.group.members
        own = self._held[self.sequence.group.member]
        sent = x_TE.index_select(0, self._token_T)
        received = x_TE.new_empty(members * own, x_TE.shape[1])
        self._all_to_all(received, sent, [own] * members, self._held)
        return received.view(members, own, x_TE.shape[1]).transpose(0, 1).contiguous()

    def _all_to_all(
        self, received: Tensor, sent: Tensor, receives: list[int], sends: list[int]
    ) -> None:
        dist.all_to_all_single(
            received, sent.contiguous(), receives, sends, group=self.sequence.group.process_group
        )

    @cached_property
    def _held(self) -> list[int]:
        """Tokens of every member."""
        return [int((tokens < self.tokens).sum()) for tokens in self.sequence.tokens_W]

    @cached_property
    def _token_T(self) -> Tensor:
        """The numbers in the sequence of the members' tokens, member after member."""
        held = [tokens[tokens < self.tokens] for tokens in self.sequence.tokens_W]
        return self.sequence.on_device(np.concatenate(held))

    @cached_property
    def _place_T(self) -> Tensor:
        """For every token of the sequence, its place among the members'."""
        return self._token_T.argsort()


class _Exchanged(torch.autograd.Function):
    """One all-to-all, whose gradient is the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: TravellingHeads, to_heads: bool) -> Tensor:
        ctx.heads, ctx.to_heads = heads, to_heads
        return heads.to_heads(x) if to_heads else heads.to_tokens(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        heads: TravellingHeads = ctx.heads
        way_back = heads.to_tokens if ctx.to_heads else heads.to_heads
        return way_back(gradients[0]), None, None
