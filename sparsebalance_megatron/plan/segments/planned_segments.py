# SPDX-License-Identifier: Apache-2.0
"""Micro-batches in segments: where they run, and how they are cut, at the expected budgets.

Ranks alone start from samples balanced by work. Lockstep groups start from the rows that are
planned. Ranks that share micro-batches start from cp_sizes searched as if all layers lay on one
stage, where ranks alone have unequal work: cut finely, a pipeline takes about what its
micro-batches take one after another. Then :mod:`.search` places, orders and cuts.

Segments are used where the step takes less than ``LEAST_GAIN`` of its time in one piece.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.candidate import Candidate, shortest
from sparsebalance_megatron.plan.context_groups import first_places
from sparsebalance_megatron.plan.metrics import imbalance, rounded_ms
from sparsebalance_megatron.plan.planned_cp_sizes import searched_cp_sizes
from sparsebalance_megatron.plan.segments.search import SegmentSearch
from sparsebalance_megatron.plan.segments.segmented_times import rows_of
from sparsebalance_megatron.plan.step_problem import StepProblem

LEAST_GAIN = 0.99
_EQUAL_RANKS = 1.05
"""Largest work of a rank over the mean at which ranks alone are as good as equal."""


def segments_of_ranks(problem: StepProblem, one_piece: Placement) -> Candidate | None:
    """The shortest step found in segments, of ranks that wait for nobody in a layer.

    Args:
        one_piece: the step's placement without segments. Its fullest rank holds at least as many
            tokens on its first stage as any rank with segments.

    Returns:
        None where no micro-batch is worth cutting, or every cut that was tried holds too many
        tokens.
    """
    try:
        start = problem.balanced_by(problem.expected_LS)
    except PlanError:
        start = one_piece
    return _in_segments(problem, Arrangement.of_groups(start), _most_tokens(problem, one_piece))


def segments_of_shared(
    problem: StepProblem, one_piece: Arrangement, cut: Candidate | None
) -> Candidate | None:
    """The shortest step found in segments whose ranks may share micro-batches, too.

    Cut finely, a pipeline takes about what its micro-batches take one after another. So cp_sizes
    are those of a step with all layers on one stage, and the best of every limit.

    Args:
        one_piece: the step without segments, see :func:`segments_of_ranks`.
        cut: the step in segments of ranks alone. Where their work is nearly equal, sharing can gain
            little.
    """
    if cut is not None and _imbalance_of_ranks(cut) < _EQUAL_RANKS:
        return None
    of_sums, most_tokens = _on_one_stage(problem), _most_rank_tokens(problem, one_piece)
    sample_2SC = of_sums.costs.sample_ms(problem.expected_LS)
    limit, found = problem.plan_settings.max_context_parallel, []
    while limit > 1:
        try:
            start = searched_cp_sizes(of_sums, sample_2SC, limit)
        except PlanError:
            # The cap asks for micro-batches that more ranks share.
            break
        found.append(_in_segments(problem, start, most_tokens))
        limit //= 2
    return shortest(*found) if any(found) else None


def _imbalance_of_ranks(cut: Candidate) -> float:
    """The largest over the mean of the ranks' work, where they share nothing."""
    costs, rank_of_S = cut.problem.costs, cut.arrangement.micro_batch_of_S
    work_S = cut.problem.expected_2SC.sum(axis=(0, 2))
    return imbalance(np.bincount(rank_of_S // costs.job.micro_batches, work_S))


def _most_rank_tokens(problem: StepProblem, where: Arrangement) -> int:
    """Tokens that 1F1B holds on the first stage of the fullest rank, in one piece."""
    lengths, places = problem.lengths_tokens, problem.job.places
    tokens_J = np.bincount(where.micro_batch_of_S, lengths, places)[first_places(where.cp_sizes_RM)]
    tokens_RM = -(-tokens_J.reshape(where.cp_sizes_RM.shape) // where.cp_sizes_RM)
    windows = sliding_window_view(
        tokens_RM, min(problem.job.pipeline_stages, tokens_RM.shape[1]), 1
    )
    return int(windows.sum(axis=2).max())


def _in_segments(problem: StepProblem, start: Arrangement, most_tokens: int) -> Candidate | None:
    arrangement, search_ms = SegmentSearch(problem, problem.expected_LS).best(start, most_tokens)
    if not arrangement.is_cut or not np.isfinite(search_ms):
        return None
    return Candidate.of(problem, arrangement)


def segments_of_groups(whole: Candidate) -> Candidate:
    """A step of lockstep groups in segments, or as it is where that takes no longer."""
    problem, start = whole.problem, whole.arrangement
    cut = _in_segments(problem, start, _most_tokens(problem, start.samples))
    limit_ms = rounded_ms(LEAST_GAIN * whole.makespan_ms)
    return cut if cut is not None and cut.makespan_ms < limit_ms else whole


def _most_tokens(problem: StepProblem, placement: Placement) -> int:
    """Tokens that 1F1B holds on the first stage of the fullest group, in one piece."""
    lengths = problem.lengths_tokens
    stages, most = problem.job.pipeline_stages, 0
    for rows in rows_of(placement, problem.job.lockstep_ranks):
        tokens = [max(sum(lengths[sample] for sample in each) for each in row) for row in rows]
        most = max(most, *(sum(tokens[m : m + stages]) for m in range(len(tokens))))
    return most


def _on_one_stage(problem: StepProblem) -> StepProblem:
    """The problem with all layers on one stage, whose time is the sum over positions."""
    costs, job = problem.costs, problem.job
    layers = costs.layers and replace(
        costs.layers,
        chunk_of_layer_L=np.zeros_like(costs.chunk_of_layer_L),
        outside_2SC=costs.layers.outside_2SC.sum(axis=2, keepdims=True),
        outside_sequence_2C=costs.layers.outside_sequence_2C.sum(axis=1, keepdims=True),
        together_2SC=costs.layers.together_2SC.sum(axis=2, keepdims=True),
    )
    return replace(
        problem,
        budgets=replace(
            problem.budgets,
            costs=replace(
                costs,
                job=replace(job, stage_layers=((tuple(range(job.layers)),),)),
                constant_2C=costs.constant_2C.sum(axis=1, keepdims=True),
                fixed_2SC=costs.fixed_2SC.sum(axis=2, keepdims=True),
                sparse_2CF=costs.sparse_2CF.sum(axis=1, keepdims=True),
                denser_2CF=costs.denser_2CF.mean(axis=1, keepdims=True),
                pair_2C=costs.pair_2C.mean(axis=1, keepdims=True),
                exchange_2SC=costs.exchange_2SC.sum(axis=2, keepdims=True),
                chunk_of_layer_L=np.zeros_like(costs.chunk_of_layer_L),
                slowness_RP=costs.slowness_RP.max(axis=1, keepdims=True),
                layers=layers,
            ),
        ),
    )
