# SPDX-License-Identifier: Apache-2.0
"""Cuts micro-batches into segments of nearly equal predicted cost, and says what each takes.

A query reads the blocks before it, up to its budget, so a piece of a sample costs the difference
of two prefixes: tokens, attended pairs and visible pairs of blocks a..b are those of b blocks less
those of a blocks.

Shape legend: S samples of a global batch, L layers, P pipeline stages, U segments of a
micro-batch, X boundaries of a sample or of a micro-batch; a leading 2: forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.plan.step_costs import StepCosts

_BOUNDARIES_PER_SEGMENT = 4
"""Places of a sample where it may be cut, for each segment that it may have."""
_LEAST_BOUNDARIES = 32


class Cut(NamedTuple):
    """The segments of a micro-batch: where each begins, its ms on every stage, its tokens."""

    first_blocks: tuple[int, ...]
    forward_UP: np.ndarray
    backward_UP: np.ndarray
    tokens_U: np.ndarray


def prefix_ms(costs: StepCosts, budgets_LS: np.ndarray, blocks_SX: np.ndarray) -> np.ndarray:
    """[2, S, X, P] ms of the first ``blocks_SX`` blocks of every sample, in one piece.

    What a micro-batch and a sequence cost whatever their length is not in it.
    """
    tokens_SX = np.minimum(blocks_SX * costs.block_size, costs.lengths_tokens_S[:, None])
    length_SX = tokens_SX / costs.block_size
    pairs_PSX = np.zeros((costs.chunks, *blocks_SX.shape))
    for layer in costs.sparse_layers:
        pairs_PSX[costs.chunk_of_layer_L[layer]] += costs.work.attended_pairs(
            length_SX, budgets_LS[layer][:, None]
        )
    visible_SX = costs.work.visible_pairs(length_SX)
    return (
        tokens_SX[..., None] * costs.token_2C[:, None, None]
        + visible_SX[..., None] * costs.visible_2C[:, None, None]
        + pairs_PSX.transpose(1, 2, 0) * costs.pair_2C[:, None, None]
    )


@dataclass(frozen=True, kw_only=True)
class CutCosts:
    """What pieces of samples take at given budgets, on an average device.

    ``blocks_SX``: the places where samples may be cut, from 0 to all blocks, never falling.
    ``prefix_2SXP``: of :func:`prefix_ms` there.
    """

    costs: StepCosts
    blocks_SX: np.ndarray
    prefix_2SXP: np.ndarray

    @classmethod
    def at(cls, costs: StepCosts, budgets_LS: np.ndarray, max_segments: int) -> CutCosts:
        """The costs at budgets, with places to cut at equal distances."""
        places = max(_LEAST_BOUNDARIES, _BOUNDARIES_PER_SEGMENT * max_segments)
        blocks_SX = np.rint(costs.blocks_S[:, None] * np.arange(places + 1) / places)
        blocks_SX = blocks_SX.astype(np.int64)
        return cls(
            costs=costs, blocks_SX=blocks_SX, prefix_2SXP=prefix_ms(costs, budgets_LS, blocks_SX)
        )

    @cached_property
    def work_S(self) -> np.ndarray:
        """[S] ms of every sample on all stages, forward and backward."""
        return np.asarray(self.prefix_2SXP[:, :, -1].sum(axis=(0, 2)))

    @classmethod
    def of_segments(
        cls,
        costs: StepCosts,
        budgets_LS: np.ndarray,
        micro_batches: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    ) -> CutCosts:
        """The costs at budgets, with the places where micro-batches are cut already.

        Args:
            micro_batches: (samples, first blocks of the segments) of each.
        """
        most = max(len(first_blocks) for _, first_blocks in micro_batches)
        blocks_SX = np.repeat(costs.blocks_S[:, None], most + 1, axis=1)
        blocks_SX[:, 0] = 0
        for samples, first_blocks in micro_batches:
            start = 0
            for sample in samples:
                end = start + int(costs.blocks_S[sample])
                inside = [block - start for block in first_blocks if start < block < end]
                blocks_SX[sample, 1 : len(inside) + 1] = inside
                start = end
        return cls(
            costs=costs, blocks_SX=blocks_SX, prefix_2SXP=prefix_ms(costs, budgets_LS, blocks_SX)
        )

    def cut(self, samples: Sequence[int], segments: int) -> Cut:
        """A micro-batch in at most so many segments, as equal in ms as the places allow."""
        joined = self._joined(samples)
        work_X = joined.prefix_2XP.sum(axis=(0, 2))
        wanted = work_X[-1] * np.arange(1, segments) / segments
        first_blocks = joined.blocks_X[np.abs(work_X - wanted[:, None]).argmin(axis=1)]
        inner = sorted({*first_blocks.tolist()} - {0, int(joined.blocks_X[-1])})
        return self._cut(joined, (0, *inner))

    def cut_at(self, samples: Sequence[int], first_blocks: tuple[int, ...]) -> Cut:
        """A micro-batch in segments that begin at these blocks, all of them places to cut."""
        return self._cut(self._joined(samples), first_blocks)

    def _joined(self, samples: Sequence[int]) -> _Joined:
        lengths = self.costs.lengths_tokens_S
        parts, blocks, tokens, end_blocks = [], [], [], []
        before: np.ndarray | float = 0.0
        first_block = first_token = 0
        for number, sample in enumerate(samples):
            # The end of a sample is the beginning of the next.
            own = slice(int(number > 0), None)
            prefix_2XP = before + self.prefix_2SXP[:, sample]
            parts.append(prefix_2XP[:, own])
            blocks.append(first_block + self.blocks_SX[sample, own])
            in_sample_X = self.blocks_SX[sample, own] * self.costs.block_size
            tokens.append(first_token + np.minimum(in_sample_X, lengths[sample]))
            before = prefix_2XP[:, -1:]
            first_block += int(self.costs.blocks_S[sample])
            end_blocks.append(first_block)
            first_token += int(lengths[sample])
        return _Joined(
            np.concatenate(parts, axis=1),
            np.concatenate(blocks),
            np.concatenate(tokens),
            end_blocks,
        )

    def _cut(self, joined: _Joined, first_blocks: tuple[int, ...]) -> Cut:
        costs, bounds = self.costs, [*first_blocks, joined.blocks_X[-1]]
        ends = np.searchsorted(joined.blocks_X, bounds)
        work_2UP = np.diff(joined.prefix_2XP[:, ends], axis=1)
        if len(first_blocks) > 1:
            work_2UP = work_2UP * costs.segments.slowness
        before_U = np.searchsorted(joined.end_blocks, bounds[:-1], side="right")
        sequences_U = np.searchsorted(joined.end_blocks, bounds[1:]) - before_U + 1
        each_2 = np.array(costs.segments.operation_ms)
        forward_UP, backward_UP = (
            work_2UP
            + sequences_U[:, None] * costs.sequence_2C[:, None]
            + costs.constant_2C[:, None]
            + each_2[:, None, None]
        )
        return Cut(first_blocks, forward_UP, backward_UP, np.diff(joined.tokens_X[ends]))


class _Joined(NamedTuple):
    """A packed sequence at all its places: work so far, blocks and tokens before. ``end_blocks``:
    where its samples end."""

    prefix_2XP: np.ndarray
    blocks_X: np.ndarray
    tokens_X: np.ndarray
    end_blocks: list[int]
