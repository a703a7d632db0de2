# SPDX-License-Identifier: Apache-2.0
"""Micro-batches in segments: where they run, how they are cut, and their budgets.

1. *Budgets to cut by.* Ranks alone: between those expected and the least allowed, since ranks that
   the step waits for end below what is expected of all. Lockstep groups: those tuned in one piece,
   and those tuned as if all layers lay on one stage. Tuning for a pipeline lets rise whatever does
   not lie on its longest chain. Cut finely, a pipeline has hardly any room, and takes about what
   its rows take one after another.
2. *Places and cuts* (:mod:`.search`). Ranks alone: from samples balanced by work. Lockstep groups:
   from the rows that are planned. Ranks that share micro-batches: from cp_sizes searched as if all
   layers lay on one stage, where ranks alone have unequal work.
3. *Budgets for the cuts* of ranks alone, and of those that share (:mod:`.stage_levels`).

Segments are used where the step takes less than ``LEAST_GAIN`` of its time in one piece.

Shape legend: S samples of a global batch, L layers, R data-parallel ranks, M micro-batches,
J = R x M places, C chunks; a leading 2: forward and backward.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.budgets.policy import tuned_budgets
from sparsebalance_megatron.plan.candidate import Candidate, shortest
from sparsebalance_megatron.plan.context_groups import first_places
from sparsebalance_megatron.plan.metrics import imbalance, rounded_ms
from sparsebalance_megatron.plan.plan_error import PlanError
from sparsebalance_megatron.plan.planned_cp_sizes import searched_cp_sizes
from sparsebalance_megatron.plan.segments.search import SegmentSearch
from sparsebalance_megatron.plan.segments.segmented_times import rows_of
from sparsebalance_megatron.plan.segments.stage_levels import balanced_over_stages
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
        start = problem.balanced_by(_search_LS(problem))
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
    sample_2SC = of_sums.costs.sample_ms(_search_LS(problem))
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
    work_S = costs.sample_ms(cut.tuned.budgets_LS).sum(axis=(0, 2))
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


def _search_LS(problem: StepProblem) -> np.ndarray:
    """Budgets by which ranks that wait for nobody in a layer are cut."""
    return (problem.expected_LS + problem.budgets.allowed.floor_LS) // 2


def _in_segments(problem: StepProblem, start: Arrangement, most_tokens: int) -> Candidate | None:
    search = SegmentSearch(problem, _search_LS(problem))
    arrangement, search_ms = search.best(start, most_tokens)
    if not arrangement.is_cut or not np.isfinite(search_ms):
        return None
    tuned_LS, ms_R = balanced_over_stages(problem, arrangement)
    slowest = np.repeat(ms_R == ms_R.max(), problem.job.micro_batches)
    stuck_S = problem.budgets.stuck_S(tuned_LS) & slowest[arrangement.micro_batch_of_S]
    return Candidate.of(problem, arrangement, tuned_budgets(problem.budgets, tuned_LS, stuck_S))


def segments_of_groups(whole: Candidate) -> Candidate:
    """A step of lockstep groups in segments, or as it is where that takes no longer."""
    problem, best = whole.problem, whole
    limit_ms = rounded_ms(LEAST_GAIN * whole.makespan_ms)
    wanted = problem.budgets.covered(whole.tuned.budgets_LS)
    choices = [whole.tuned]
    if problem.pricing is not None:
        wanted = min(wanted, problem.pricing.wanted_coverage)
        of_sums = _on_one_stage(problem).tuned_where(whole.arrangement)
        if problem.budgets.covers(of_sums.budgets_LS, wanted):
            choices.append(of_sums)
    samples = whole.arrangement.samples
    for tuned in choices:
        search = SegmentSearch(problem, tuned.budgets_LS)
        arrangement, _ = search.best(whole.arrangement, _most_tokens(problem, samples))
        if arrangement.is_cut:
            cut = Candidate.of(problem, arrangement, tuned)
            if cut.makespan_ms < limit_ms:
                best, limit_ms = cut, cut.makespan_ms
    return best


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
