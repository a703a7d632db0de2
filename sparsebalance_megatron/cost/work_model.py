# SPDX-License-Identifier: Apache-2.0
"""Attention that a selection computes: block pairs of a document as a function of its budget.

Cost and plan know of a selection only what stands here.

Shape legend: S samples or documents of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from sparsebalance_megatron.selector_registry import load_work_model

FEATURES = ("micro_batches", "sequences", "tokens", "block_pairs", "visible_block_pairs")
"""Order of the feature vector; every entry adds up over the documents of a micro-batch."""


def by_feature(values: Mapping[str, float]) -> tuple[float, ...]:
    """Values in the order of :data:`FEATURES`; 0 for those that are not named."""
    return tuple(values.get(name, 0.0) for name in FEATURES)


class WorkModel(Protocol):
    """The work of one selection. Documents are of x >= 0 blocks, x a fraction where one is short.

    Arguments broadcast; results have the broadcast shape.
    """

    def attended_pairs(self, length_blocks: ArrayLike, budget_blocks: ArrayLike) -> np.ndarray:
        """Block pairs that attention computes at a budget of at least 1; infinity is dense."""

    def visible_pairs(self, length_blocks: ArrayLike) -> np.ndarray:
        """Block pairs that the router scores, whatever the budget."""

    def growth(self, budget_blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The terms (a, b), int64, by which attended pairs grow with the budget k.

        For k from 1 to the document's blocks ``attended_pairs(x, k) = a(k) x - b(k) + c(x)`` with
        some c that does not depend on k. So the pairs of many layers and budgets follow from two
        sums over the layers, whatever the lengths.
        """

    def scores_per_visible_pair(self, heads: int, groups: int, block_size: int) -> int:
        """Dot products over a head's dimension that the router computes per visible block pair."""

    def list_entries_per_token(
        self, *, heads: int, groups: int, block_size: int, budget_blocks: int
    ) -> float:
        """Entries of lists per token and layer, of all heads; single tokens have one each."""


@dataclass(frozen=True, kw_only=True)
class BlockTopK:
    """Every query reads the k best blocks before it, its own block included.

    Attributes:
        per_token: tokens select, not blocks of queries.
        per_query_head: query heads select, not the KV head they share.
    """

    per_token: bool
    per_query_head: bool

    def attended_pairs(self, length_blocks: ArrayLike, budget_blocks: ArrayLike) -> np.ndarray:
        """Query block j = 1..n, filled to the share l_j, counts ``l_j (min(j, k) - 1 + l_j)``.

        Whole blocks before it and its own, fractional where the last block is short. For whole
        blocks this is ``sum_j min(j, k)``.
        """
        length_blocks = np.asarray(length_blocks, dtype=np.float64)
        blocks = np.ceil(length_blocks)
        budget = np.minimum(budget_blocks, blocks)
        whole_blocks = np.maximum(blocks - 1.0, 0.0)
        rising = np.minimum(whole_blocks, budget)
        whole_pairs = rising * (rising + 1.0) / 2.0 + budget * (whole_blocks - rising)
        tail = length_blocks - whole_blocks
        return whole_pairs + tail * (budget - 1.0 + tail) * (blocks > 0.0)

    def visible_pairs(self, length_blocks: ArrayLike) -> np.ndarray:
        """All causal block pairs: what is attended without a budget."""
        return self.attended_pairs(length_blocks, np.inf)

    def growth(self, budget_blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``pairs(x, k) = k x - k (k - 1) / 2 + t (t - 1)``, t the filled share of the last block.

        *Proof.* Let n = ceil(x), so x = n - 1 + t. For k <= n - 1 the n - 1 whole blocks count
        k (k + 1) / 2 + k (n - 1 - k) = k (n - 1) - k (k - 1) / 2 and the last one t (k - 1 + t);
        they add up to k (n - 1 + t) - k (k - 1) / 2 + t (t - 1). For k = n the whole blocks count
        n (n - 1) / 2, which is k (n - 1) - k (k - 1) / 2 as well.
        """
        return budget_blocks, budget_blocks * (budget_blocks - 1) // 2

    def scores_per_visible_pair(self, heads: int, groups: int, block_size: int) -> int:
        """One per selecting head, and per token of the query block where tokens select."""
        return (heads if self.per_query_head else groups) * (block_size if self.per_token else 1)

    def list_entries_per_token(
        self, *, heads: int, groups: int, block_size: int, budget_blocks: int
    ) -> float:
        """One list of ``budget_blocks`` per row of scores."""
        return self.scores_per_visible_pair(heads, groups, block_size) / block_size * budget_blocks


@dataclass(frozen=True, kw_only=True)
class VerticalSlash(BlockTopK):
    """Blocks on diagonals and columns of keys, together as many keys as k whole blocks.

    So attention computes the pairs of lists of blocks by query block. The router attends, without
    values, from ``probe_tokens`` queries of every block.
    """

    probe_tokens: int

    def scores_per_visible_pair(self, heads: int, groups: int, block_size: int) -> int:
        """One per probe, query head and key."""
        return min(self.probe_tokens, block_size) * heads * block_size

    def list_entries_per_token(
        self, *, heads: int, groups: int, block_size: int, budget_blocks: int
    ) -> float:
        """One list per block of queries and KV head; one entry for every column."""
        columns_blocks = (budget_blocks + 1) // 4
        return groups * (budget_blocks / block_size + columns_blocks)


TOKEN_QUERY_HEAD = BlockTopK(per_token=True, per_query_head=True)
TOKEN_KV_HEAD = BlockTopK(per_token=True, per_query_head=False)
QUERY_BLOCK = BlockTopK(per_token=False, per_query_head=False)
VERTICAL_SLASH = VerticalSlash(per_token=False, per_query_head=False, probe_tokens=16)


def work_model_named(name: str) -> WorkModel:
    """The work model of a selection; a ConfigError where there is none of that name."""
    found: WorkModel = load_work_model(name)
    return found


def features(
    lengths_tokens: ArrayLike, budgets_blocks: ArrayLike, block_size: int, work: WorkModel
) -> np.ndarray:
    """[5] float64: what the cost of a micro-batch is affine in, in the order of :data:`FEATURES`.

    Args:
        lengths_tokens: [S], one length per document.
        budgets_blocks: [S] or one budget for all; infinity for dense attention.
    """
    lengths_S = np.asarray(lengths_tokens, dtype=np.float64)
    blocks_S = lengths_S / block_size
    pairs = work.attended_pairs(blocks_S, budgets_blocks).sum()
    visible = work.visible_pairs(blocks_S).sum()
    return np.array([1.0, lengths_S.size, lengths_S.sum(), pairs, visible])
