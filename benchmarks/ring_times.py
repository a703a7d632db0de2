# SPDX-License-Identifier: Apache-2.0
"""Context parallelism in rings: who computes what at which step, and how long the forward takes.

Keys and values go round; at step t rank r attends to those of rank r - t. A step's work is what the
rank's queries read of that rank's keys, so it follows from the mask and from which rank holds which
block. The functions below say how evenly a mask falls on ranks and steps, and simulate the forward
pass of MTraining's flat and hierarchical rings (arXiv:2510.18830) and of a gather.

Shape legend: N blocks, W ranks that share it (the first one by queries, the second by
keys).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np


def contiguous(blocks: int, ranks: int) -> np.ndarray:
    """owner_N: every rank holds neighbouring blocks."""
    return np.arange(blocks) * ranks // blocks


def zigzag(blocks: int, ranks: int) -> np.ndarray:
    """owner_N: twice as many pieces as ranks; a rank holds one from the front and one from the end.

    Megatron's layout, which makes dense causal attention even.
    """
    piece_N = np.arange(blocks) * 2 * ranks // blocks
    return np.minimum(piece_N, 2 * ranks - 1 - piece_N)


def striped(blocks: int, ranks: int) -> np.ndarray:
    """owner_N: blocks are dealt in turn, as this package and MTraining do."""
    return np.arange(blocks) % ranks


LAYOUTS: Mapping[str, Callable[[int, int], np.ndarray]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
}


def work_of_ranks(work_NN: np.ndarray, owner_N: np.ndarray, ranks: int) -> np.ndarray:
    """work_WW of a rank's queries on a rank's keys, from that of query and key blocks."""
    held_NW = (owner_N[:, None] == np.arange(ranks)).astype(np.float64)
    return held_NW.T @ work_NN @ held_NW


def worker_imbalance(work_WW: np.ndarray) -> float:
    """The greatest total of a rank over the mean one; 1 is even."""
    totals_W = work_WW.sum(1)
    return float(totals_W.max() / totals_W.mean())


def step_imbalance(work_WW: np.ndarray) -> float:
    """What ranks take that wait for the slowest one at every step of a ring, over the mean total.

    At least :func:`worker_imbalance`.
    """
    ranks = len(work_WW)
    rank_W = np.arange(ranks)
    slowest = sum(work_WW[rank_W, (rank_W - step) % ranks].max() for step in range(ranks))
    return float(slowest / work_WW.sum(1).mean())


def diagonals_work(blocks: int, distances: Iterable[int]) -> np.ndarray:
    """work_NN of diagonals that lie whole blocks apart, 1 for a pair of blocks."""
    back_NN = np.arange(blocks)[:, None] - np.arange(blocks)
    return (np.isin(back_NN, list(distances)) & (back_NN >= 0)).astype(np.float64)


def columns_work(blocks: int, columns: Iterable[int], share: float = 1.0) -> np.ndarray:
    """work_NN of columns that all later query blocks read ``share`` of."""
    work_NN = np.zeros((blocks, blocks))
    for column in columns:
        work_NN[column:, column] = share
    return work_NN


@dataclass(frozen=True, kw_only=True)
class Links:
    """How long one rank's keys and values of a layer travel.

    Attributes:
        inner_ms: to the next rank of the same node.
        outer_ms: to a rank of another node.
        node_ranks: ranks of a node, side by side.
    """

    inner_ms: float
    outer_ms: float
    node_ranks: int

    def hop_ms(self, rank: int, ranks: int) -> float:
        """From ``rank`` to the next one of a ring over all ranks."""
        same_node = rank // self.node_ranks == (rank + 1) % ranks // self.node_ranks
        return self.inner_ms if same_node else self.outer_ms


def flat_ring_ms(work_ms_WW: np.ndarray, links: Links) -> float:
    """Forward pass of one ring over all ranks, until the last rank has finished.

    A rank passes keys on while it attends to them, and takes the next ones in once it has finished
    those before: two shares in memory. A link carries one share at a time.
    """
    ranks = len(work_ms_WW)
    rank_W = np.arange(ranks)
    hop_W = np.array([links.hop_ms((rank - 1) % ranks, ranks) for rank in range(ranks)])
    has_W, finished_W, before_W = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    for step in range(ranks):
        if step:
            has_W = np.maximum.reduce([np.roll(has_W, 1), has_W, before_W]) + hop_W
        before_W = finished_W
        finished_W = np.maximum(finished_W, has_W) + work_ms_WW[rank_W, (rank_W - step) % ranks]
    return float(finished_W.max())


def hierarchical_ring_ms(work_ms_WW: np.ndarray, links: Links) -> float:
    """Forward pass of rings within nodes, whose shares go round between nodes meanwhile.

    An outer transfer begins with an inner ring and is awaited after it, on links of its own.

    Raises:
        ValueError: nodes are not full.
    """
    ranks, inner = len(work_ms_WW), links.node_ranks
    if ranks % inner:
        raise ValueError(f"{ranks} ranks: must fill nodes of {inner}")
    nodes = ranks // inner
    node_W, place_W = np.divmod(np.arange(ranks), inner)
    outer_has_W, finished_W = np.zeros(ranks), np.zeros(ranks)
    for outer in range(nodes):
        begun_W = np.maximum(outer_has_W, finished_W)
        has_W, before_W = outer_has_W, finished_W
        for step in range(inner):
            if step:
                came_W = np.roll(has_W.reshape(nodes, inner), 1, axis=1).ravel()
                has_W = np.maximum.reduce([came_W, has_W, before_W]) + links.inner_ms
            before_W = finished_W
            owner_W = (node_W - outer) % nodes * inner + (place_W - step) % inner
            finished_W = np.maximum(finished_W, has_W) + work_ms_WW[np.arange(ranks), owner_W]
        # Sent from the node before, once the receiver's ring has begun too.
        sent_W = np.maximum(np.roll(begun_W, inner), begun_W)
        outer_has_W = sent_W + links.outer_ms
    return float(finished_W.max())


def gathered_ms(work_ms_WW: np.ndarray, links: Links, kv_heads: int) -> float:
    """Forward pass where every rank gathers all keys first, one KV head in flight after another.

    Each share crosses to every other node once, then goes round within nodes. Heads have equal
    work.
    """
    ranks = len(work_ms_WW)
    nodes = -(-ranks // links.node_ranks)
    gather_ms = (nodes - 1) * links.outer_ms + (ranks - nodes) * links.inner_ms
    head_gather_ms, head_work_ms = gather_ms / kv_heads, work_ms_WW.sum(1).max() / kv_heads
    return head_gather_ms + (kv_heads - 1) * max(head_gather_ms, head_work_ms) + head_work_ms
