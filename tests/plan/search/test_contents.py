# SPDX-License-Identifier: Apache-2.0
"""Times of micro-batches from their contents are those of the placement."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from plan.search.search_cases import SEEDS, SHAPES, random_case


@settings(max_examples=25)
@given(SHAPES, SEEDS)
def test_times_of_micro_batches_are_those_of_the_placement(shape, seed):
    """Also on devices of different speed: every rank of one takes as long as the slowest."""
    (ranks, positions, stages, chunks), _ = shape
    case = random_case(*shape, seed)
    contents, where = case.contents, case.start
    expected = case.costs.micro_batch_ms(case.sample_2SC, where).by_micro_batch_2RPVM
    for rank in range(ranks):
        for position in range(positions):
            if not (samples := list(where.samples[rank][position])):
                continue
            cp_size = where.cp_sizes_RM[rank, position]
            held_X = contents.of_sample_SX[samples].sum(axis=0)
            found = contents.ms(held_X, cp_size, np.array(rank)).reshape(2, stages, chunks)
            for member in range(rank, rank + cp_size):
                np.testing.assert_allclose(found, expected[:, member, :, :, position], rtol=1e-9)
