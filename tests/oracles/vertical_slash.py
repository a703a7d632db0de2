# SPDX-License-Identifier: Apache-2.0
"""Vertical-slash selection from its definition, one probe, one key and one query at a time.

All in float64 and plain Python. Blocks are (document, begin, end) in tokens of the sequence.
"""

from dataclasses import dataclass

from torch import Tensor

from oracles.attention import Block, blocks_of

PROBES, SINKS = 16, 30


@dataclass(frozen=True)
class Choice:
    """What one query block reads of one KV head at one budget, as numbers of tokens and blocks."""

    blocks: list[int]
    columns: list[int]


def even_probes(block: Block, block_size: int) -> list[int]:
    _, begin, end = block
    count = min(PROBES, block_size)
    return [begin + max(0, (rank + 1) * (end - begin) // count - 1) for rank in range(count)]


def attention_of(
    q_THD: Tensor, k_TGD: Tensor, head: int, probe: int, first: int, scale: float
) -> list[Tensor]:
    """Softmax of every query head of a KV head, over the keys from ``first`` to the probe."""
    group = q_THD.shape[1] // k_TGD.shape[1]
    keys = k_TGD[first : probe + 1, head].double()
    return [
        (keys @ q_THD[probe, head * group + member].double() * scale).softmax(0)
        for member in range(group)
    ]


def ranked(
    q_THD: Tensor,
    k_TGD: Tensor,
    cu_seqlens: list[int],
    block_size: int,
    scale: float,
) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """(query block, KV head) -> all its visible blocks in order, and all possible columns."""
    blocks = blocks_of(cu_seqlens, block_size)
    found = {}
    for own, (document, begin, _) in enumerate(blocks):
        first = cu_seqlens[document]
        first_block = next(n for n, block in enumerate(blocks) if block[0] == document)
        probes = even_probes(blocks[own - 1], block_size) if own > first_block else []
        for head in range(k_TGD.shape[1]):
            diagonal = dict.fromkeys(range(first_block, own + 1), 0.0)
            column = dict.fromkeys(range(first, max(first, begin - block_size)), 0.0)
            for probe in probes:
                for mass in attention_of(q_THD, k_TGD, head, probe, first, scale):
                    for place, share in enumerate(mass.tolist()):
                        if first + place in column:
                            column[first + place] += share
                        if place < min(SINKS, block_size // 4):
                            continue
                        # Every query of a whole block looks back as far as the probe does.
                        low = begin - (probe - first - place)
                        near = first_block + (low - first) // block_size
                        for number in {near, near + 1} & diagonal.keys():
                            start = first + (number - first_block) * block_size
                            queries = min(low, start) + block_size - max(low, start)
                            diagonal[number] += share * queries / block_size
            window = [n for n in (own, own - 1) if n in diagonal]
            others = sorted(diagonal.keys() - window, key=lambda n: (-diagonal[n], n))
            sinks = [c for c in column if c - first < min(SINKS, block_size // 4)]
            rest = sorted(column.keys() - sinks, key=lambda c: (-column[c], c))
            found[own, head] = [*window, *others], [*sinks, *rest]
    return found


def cut(
    order: tuple[list[int], list[int]], budget: int, cu_seqlens: list[int], block_size: int
) -> Choice:
    """At a budget: everything where it suffices, else a quarter of it, rounded, in columns."""
    blocks, columns = order
    if budget >= len(blocks):
        return Choice(blocks=blocks, columns=[])
    units = (budget + 1) // 4
    read = blocks[: budget - units]
    grid = blocks_of(cu_seqlens, block_size)
    inside = {token for number in read for token in range(*grid[number][1:])}
    outside = [c for c in columns if c not in inside]
    return Choice(blocks=read, columns=outside[: units * block_size])


def seen_by_blocks(
    q_THD: Tensor, k_TGD: Tensor, cu_seqlens: list[int], block_size: int, scale: float
) -> dict[tuple[int, int], list[list[float]]]:
    """(query block, KV head) -> softmax of every own probe and query head, from the document's
    first key on."""
    return {
        (own, head): [
            mass.tolist()
            for probe in even_probes(block, block_size)
            for mass in attention_of(q_THD, k_TGD, head, probe, cu_seqlens[block[0]], scale)
        ]
        for own, block in enumerate(blocks_of(cu_seqlens, block_size))
        for head in range(k_TGD.shape[1])
    }


def coverage(
    seen: dict[tuple[int, int], list[list[float]]],
    cu_seqlens: list[int],
    block_size: int,
    choices: dict[tuple[int, int], Choice],
) -> list[float]:
    """Per document: the mean softmax mass that probes of a block find in what the block reads."""
    grid = blocks_of(cu_seqlens, block_size)
    covered, weights = ([0.0] * (len(cu_seqlens) - 1) for _ in range(2))
    for (own, head), choice in choices.items():
        document, begin, end = grid[own]
        first = cu_seqlens[document]
        read = {token for n in choice.blocks for token in range(*grid[n][1:])} | {*choice.columns}
        shares = [
            sum(share for place, share in enumerate(mass) if first + place in read)
            for mass in seen[own, head]
        ]
        covered[document] += (end - begin) * sum(shares) / len(shares)
        weights[document] += end - begin
    return [c / w for c, w in zip(covered, weights, strict=True)]
