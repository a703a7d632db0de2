# SPDX-License-Identifier: Apache-2.0
"""Cost of what ranks exchange: keys and values of shared micro-batches, tokens of experts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.cost.table import ModelShape

NOMINAL_GIGABYTES_PER_SECOND = 45.0
"""That a rank receives from other nodes, where nothing was measured: about one 400 Gb/s network
card each."""
_NOMINAL_IN_NODE_GIGABYTES_PER_SECOND = 330.0
"""Likewise from its own node, over NVLink of an H100 or H200."""
RANKS_PER_NODE = 8
NODE_GIGABYTES_PER_SECOND = 150.0
"""A rank receives tokens of experts at this rate inside a node: about what DeepEP reports for 8
ranks on an H800 (github.com/deepseek-ai/DeepEP, README)."""
_BYTES_PER_MS_AND_GIGABYTE = 1e6
_HALF = 2
"""Bytes of a number in bfloat16."""
_ELEMENT_BYTES: Mapping[str, float] = {"float64": 8.0, "float32": 4.0}
"""Data type wider than two bytes -> its bytes."""


def ms_per_byte(gigabytes_per_second: float) -> float:
    return 1.0 / (gigabytes_per_second * _BYTES_PER_MS_AND_GIGABYTE)


def gigabytes_per_second(ms_per_byte: float) -> float:
    return 1.0 / (ms_per_byte * _BYTES_PER_MS_AND_GIGABYTE)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Costs of a micro-batch that several ranks share. Nothing of it is taken to overlap with work.

    Attributes:
        bytes_per_token: keys and values of a token in a layer, on one tensor-parallel rank;
            ``gradient_bytes_per_token`` likewise, of their gradients.
        ms_per_byte: of what a rank receives.
        cp_size_slowness: (cp_size, factor) in rising order: at this cp_size a byte takes ``factor``
            times as long, as where ranks of several nodes share. A cp_size between two takes the
            larger one's factor, one beyond all the last; without any, all cp_sizes are alike.
        loss: by which share the work of a rank exceeds an even split of the whole. Dealt blocks of
            256 tokens lose 1 to 3 % where most tokens are in long documents, up to 7 % elsewhere.
        repeated: whether backward repeats what forward exchanges, as recomputation does.
        query_heads, kv_heads: of a tensor-parallel rank.
        heads_within: most ranks between which heads travel (:mod:`..attention.sequence.heads`);
            more gather keys and values.
    """

    bytes_per_token: float = 0.0
    gradient_bytes_per_token: float = 0.0
    ms_per_byte: float = ms_per_byte(NOMINAL_GIGABYTES_PER_SECOND)
    cp_size_slowness: tuple[tuple[int, float], ...] = ()
    loss: float = 0.02
    repeated: bool = False
    query_heads: int = 1
    kv_heads: int = 1
    heads_within: int = 1

    @classmethod
    def of(cls, shape: ModelShape, dtype: str = "bfloat16") -> "Exchange":
        """The exchange of a model at the nominal bandwidth; gradients travel in float32 at
        least."""
        query_heads, kv_heads = shape.rank_heads
        elements = kv_heads * (shape.head_dim + shape.value_dim)
        element_bytes = _ELEMENT_BYTES.get(dtype, 2.0)
        return cls(
            bytes_per_token=elements * element_bytes,
            gradient_bytes_per_token=elements * max(element_bytes, 4.0),
            query_heads=query_heads,
            kv_heads=kv_heads,
        )

    def ms_per_token(self, direction: Direction) -> float:
        """Ms per token and layer if a rank received all tokens; see :meth:`received_share`."""
        received = self.times(direction) * self.bytes_per_token
        if direction is Direction.BACKWARD:
            received += self.gradient_bytes_per_token
        return received * self.ms_per_byte

    def times(self, direction: Direction) -> int:
        """How often a direction exchanges what forward does."""
        return 2 if self.repeated and direction is Direction.BACKWARD else 1

    def received_share(self, cp_size: int) -> float:
        """Part of ``ms_per_token`` that a micro-batch takes whose keys and values are gathered:
        (c - 1) / c, times its slowness."""
        if cp_size == 1:
            return 0.0
        wider = (factor for known, factor in self.cp_size_slowness if known >= cp_size)
        last = self.cp_size_slowness[-1][1] if self.cp_size_slowness else 1.0
        return (cp_size - 1) / cp_size * next(wider, last)

    def in_nodes(self, ranks: int) -> "Exchange":
        """The exchange at the nominal rates within nodes of so many ranks and between them."""
        slower = _NOMINAL_IN_NODE_GIGABYTES_PER_SECOND / NOMINAL_GIGABYTES_PER_SECOND
        return replace(
            self,
            ms_per_byte=ms_per_byte(_NOMINAL_IN_NODE_GIGABYTES_PER_SECOND),
            cp_size_slowness=((ranks, 1.0), (ranks + 1, slower)),
        )

    def heads_obstacle(self, cp_size: int) -> str | None:
        """Why heads do not travel between so many ranks; None where they do, or one has all."""
        if cp_size == 1:
            return None
        if cp_size > self.heads_within:
            return f"heads travel between {self.heads_within} ranks at most"
        for heads, kind in ((self.query_heads, "query heads"), (self.kv_heads, "KV heads")):
            if heads % cp_size and (kind == "query heads" or cp_size % heads):
                return f"{cp_size} ranks share no {heads} {kind} of a tensor-parallel rank evenly"
        return None

    def heads_serve(self, most_ranks: int) -> bool:
        """Whether heads travel between 2, 4, ... and so many ranks."""
        sizes = (1 << power for power in range(most_ranks.bit_length()))
        return all(self.heads_obstacle(size) is None for size in sizes)

    def lists_by_heads(self, cp_size: int) -> bool:
        """Whether heads travel for documents that are attended to by lists, too: members select as
        one rank would where each has all query heads of its KV heads, and gathers take longer."""
        if cp_size == 1 or self.heads_obstacle(cp_size) or self.kv_heads % cp_size:
            return False
        passes = sum(map(self.times, Direction))
        gathered = sum(map(self.ms_per_token, Direction)) * self.received_share(cp_size)
        return passes * self.heads_ms_per_token(cp_size) < gathered

    def heads_ms_per_token(self, cp_size: int) -> float:
        """Ms per token and layer in which heads travel there and outputs back, once."""
        heads = (self.query_heads + max(self.kv_heads, cp_size)) / self.kv_heads
        received = heads * self.bytes_per_token / cp_size
        return received * self.ms_per_byte * self.received_share(cp_size)

    def share(self, cp_size: int) -> float:
        """Part of a micro-batch's work that each of its ranks does."""
        return 1.0 if cp_size == 1 else (1.0 + self.loss) / cp_size


def exchange_ms_per_token(
    shape: ModelShape, ranks: int, gigabytes_per_second: float | None = None
) -> float:
    """Ms per token of one direction in which tokens go to their experts' ranks and come back: the
    mean of all layers.

    Nothing is taken to overlap, and no token that two experts of a rank take is counted once.

    Args:
        shape: of a model with experts.
        ranks: of the expert-parallel group.
        gigabytes_per_second: in place of the rates in a node and between nodes.
    """
    assert shape.experts is not None
    one_node = ranks * shape.tensor_parallel_size <= RANKS_PER_NODE
    rate = NODE_GIGABYTES_PER_SECOND if one_node else NOMINAL_GIGABYTES_PER_SECOND
    copies_bytes = _HALF * shape.hidden_size * shape.experts.top_k / shape.tensor_parallel_size
    sent_bytes = copies_bytes * (ranks - 1) / ranks
    return shape.experts.layers_share * (2 * sent_bytes * ms_per_byte(gigabytes_per_second or rate))
