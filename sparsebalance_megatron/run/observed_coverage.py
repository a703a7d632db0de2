# SPDX-License-Identifier: Apache-2.0
"""This rank's coverage observations of one step, laid side by side in one tensor.

Shape legend: O rows of observations, one per (micro-batch and chunk, layer, sample); K budgets of
the grid, U length buckets, C columns: those of the grid and five more, S samples of the
micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from sparsebalance_megatron.learn.measurement import Piece
from sparsebalance_megatron.megatron.packed_seq_params import CoverageObservation, MicroBatchContext
from sparsebalance_megatron.plan.coverage import length_bucket

EXECUTED, BASE, GROWN, TOKENS, LOST_TOKENS = range(-5, 0)
"""Columns behind the K of the grid: executed coverage, coverage at base budgets, 1 where the guard
raised the budget, the sample's tokens, and those times what base budgets had covered more."""
EXTRA_COLUMNS = 5


@dataclass(frozen=True, kw_only=True)
class ObservedCoverage:
    """``pieces`` says whose the rows are; ``values_OC`` holds the grid's coverage and then the
    extra columns, float64, on the device that observed, or is None where nothing was."""

    pieces: tuple[Piece, ...]
    bucket_O: np.ndarray
    values_OC: torch.Tensor | None

    @classmethod
    def gather(cls, seen: Iterable[MicroBatchContext]) -> ObservedCoverage:
        """Gather what the layers of this rank's micro-batches observed.

        Padding sequences come after the planned samples and are left out. Ranks that share a row
        see the same of it, and the first of them speaks for all.
        """
        pieces, buckets, columns = [], [], []
        for context in seen:
            if context.sequence is not None and context.sequence.group.member > 0:
                continue
            blocks = context.layout.blocks_per_document
            samples = len(blocks) - context.padding_documents
            bucket_S = length_bucket(np.array(blocks[:samples]))
            for layer, observation in context.observations.items():
                pieces.append(Piece(context.position, layer, samples))
                buckets.append(bucket_S)
                tokens_S = context.layout.tokens_S
                some = None if len(blocks) == samples else samples
                columns.append(_columns(observation, tokens_S, some))
        return cls(
            pieces=tuple(pieces),
            bucket_O=np.concatenate(buckets) if buckets else np.empty(0, dtype=np.int64),
            values_OC=_side_by_side(columns) if pieces else None,
        )

    def group_O(self, buckets: int) -> np.ndarray:
        """``layer * U + bucket`` of every row."""
        layer_O = np.repeat([p.layer for p in self.pieces], [p.samples for p in self.pieces])
        return layer_O.astype(np.int64) * buckets + self.bucket_O

    def executed_and_grown(self) -> np.ndarray:
        """[O, 2] on the host; waits for the device."""
        if self.values_OC is None:
            return np.empty((0, 2))
        return self.values_OC[:, [EXECUTED, GROWN]].cpu().numpy()


def _columns(
    observation: CoverageObservation, tokens_S: torch.Tensor, samples: int | None
) -> tuple[torch.Tensor, ...]:
    """Grid and extra columns of the first samples, or of all."""
    executed_S, base_S = observation.executed_S, observation.base_S
    lost_S = (base_S.double() - executed_S) * tokens_S
    columns = (observation.grid_SK, executed_S, base_S, observation.grown_S, tokens_S, lost_S)
    return columns if samples is None else tuple(column[:samples] for column in columns)


def _side_by_side(columns: Iterable[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """[O, K + 5]; the same few operations on the device, however many observations."""
    grid_OK, *extra = (torch.cat(pieces) for pieces in zip(*columns, strict=True))
    return torch.cat([grid_OK.double(), torch.stack([x.double() for x in extra], dim=1)], dim=1)
