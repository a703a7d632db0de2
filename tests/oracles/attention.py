# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention written from its definition, one number at a time.

Takes and returns plain Python where it can. A block is (document, begin, end) in tokens of the
sequence; lists map (selecting row, selecting head) to numbers of blocks in the sequence.
"""

import math

import torch
from torch import Tensor

Block = tuple[int, int, int]
Lists = dict[tuple[int, int], list[int]]


def blocks_of(cu_seqlens: list[int], block_size: int) -> list[Block]:
    blocks = []
    for document in range(len(cu_seqlens) - 1):
        begin = cu_seqlens[document]
        while begin < cu_seqlens[document + 1]:
            end = min(begin + block_size, cu_seqlens[document + 1])
            blocks.append((document, begin, end))
            begin = end
    return blocks


def selectors(
    q_THD: Tensor, kv_heads: int, blocks: list[Block], kind: str
) -> list[tuple[int, int, int, int, Tensor]]:
    """Every selector as (row, head, own block, KV head, query vector), in float64."""
    group = q_THD.shape[1] // kv_heads
    found = []
    for own, (_, begin, end) in enumerate(blocks):
        if kind == "previous-block":
            # A document's first block has none before it, and reads itself whatever it asks.
            follows = own and blocks[own - 1][0] == blocks[own][0]
            speaking = slice(*blocks[own - follows][1:])
            for head in range(kv_heads):
                heads = slice(head * group, (head + 1) * group)
                vector = q_THD[speaking, heads].double().mean(dim=(0, 1))
                found.append((own, head, own, head, vector))
            continue
        for token in range(begin, end):
            if kind == "token-kv-head":
                for head in range(kv_heads):
                    vector = q_THD[token, head * group : (head + 1) * group].double().mean(0)
                    found.append((token, head, own, head, vector))
            else:
                for head in range(q_THD.shape[1]):
                    found.append((token, head, own, head // group, q_THD[token, head].double()))
    return found


def visible_scores(
    vector: Tensor, k_TGD: Tensor, kv_head: int, own: int, blocks: list[Block]
) -> dict[int, float]:
    """Scores of the own block and the earlier blocks of its document, by number in the sequence."""
    scores = {}
    for number in range(own + 1):
        document, begin, end = blocks[number]
        if document == blocks[own][0]:
            mean = k_TGD[begin:end, kv_head].mean(dim=0)
            scores[number] = float(vector @ mean.double())
    return scores


def moba_lists(
    q_THD: Tensor,
    k_TGD: Tensor,
    cu_seqlens: list[int],
    block_size: int,
    budgets: list[int],
    kind: str,
    first_blocks: int = 1,
) -> Lists:
    blocks = blocks_of(cu_seqlens, block_size)
    lists = {}
    for row, head, own, kv_head, vector in selectors(q_THD, k_TGD.shape[1], blocks, kind):
        scores = visible_scores(vector, k_TGD, kv_head, own, blocks)
        firsts = sorted(scores.keys() - {own})[:first_blocks]
        past = sorted(scores.keys() - {own, *firsts}, key=lambda n: (-scores[n], n))
        lists[row, head] = [own, *firsts, *past][: budgets[blocks[own][0]]]
    return lists


def coverage(
    q_THD: Tensor,
    k_TGD: Tensor,
    cu_seqlens: list[int],
    block_size: int,
    kind: str,
    softmax_scale: float,
    budget: int,
    first_blocks: int = 1,
) -> list[float]:
    """Mean router mass per document inside what a budget reads."""
    blocks = blocks_of(cu_seqlens, block_size)
    covered = [0.0] * (len(cu_seqlens) - 1)
    weights = [0.0] * (len(cu_seqlens) - 1)
    for _, _, own, kv_head, vector in selectors(q_THD, k_TGD.shape[1], blocks, kind):
        scores = visible_scores(vector, k_TGD, kv_head, own, blocks)
        peak = max(scores.values())
        mass = {n: math.exp(softmax_scale * (s - peak)) for n, s in scores.items()}
        firsts = sorted(mass.keys() - {own})[:first_blocks]
        others = [mass[n] for n in firsts]
        others += sorted((mass[n] for n in mass.keys() - {own, *firsts}), reverse=True)
        document, begin, end = blocks[own]
        weight = end - begin if kind == "previous-block" else 1
        inside = mass[own] + sum(others[: budget - 1])
        covered[document] += weight * inside / sum(mass.values())
        weights[document] += weight
    return [c / w for c, w in zip(covered, weights, strict=True)]


def token_mask(
    lists: Lists,
    query_heads: int,
    selecting_heads: int,
    cu_seqlens: list[int],
    block_size: int,
    kind: str,
    columns: Lists | None = None,
) -> Tensor:
    """bool [H, T, T]: which key (column) a query (row) reads; ``columns`` are lists of tokens."""
    blocks = blocks_of(cu_seqlens, block_size)
    tokens = cu_seqlens[-1]
    mask = torch.zeros(query_heads, tokens, tokens, dtype=torch.bool)
    for own, (_, own_begin, own_end) in enumerate(blocks):
        for token in range(own_begin, own_end):
            row = token if kind.startswith("token") else own
            for head in range(query_heads):
                place = row, head * selecting_heads // query_heads
                for number in lists[place]:
                    _, begin, end = blocks[number]
                    mask[head, token, begin : min(end, token + 1)] = True
                mask[head, token, columns[place] if columns else []] = True
    return mask


def plain_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, mask_HTT: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Masked dense attention in the dtype given: its error is what rounding alone costs."""
    group = q_THD.shape[1] // k_TGD.shape[1]
    q, k, v = q_THD, k_TGD.repeat_interleave(group, 1), v_TGD.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    logits = logits.masked_fill(~mask_HTT, -torch.inf)
    out_THD = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return out_THD, logits.to(wide).logsumexp(-1).t()


def tokens_of_members(
    cu_seqlens: list[int], block_size: int, owners: list[int], members: int
) -> list[list[tuple[int, int, int]]]:
    """Per member the tokens it holds, as (token, document, block), numbered in the sequence."""
    held: list[list[tuple[int, int, int]]] = [[] for _ in range(members)]
    block = -1
    for document in range(len(cu_seqlens) - 1):
        for token in range(cu_seqlens[document], cu_seqlens[document + 1]):
            if (token - cu_seqlens[document]) % block_size == 0:
                block += 1
            held[owners[block]].append((token, document, block))
    return held
