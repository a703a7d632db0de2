# SPDX-License-Identifier: Apache-2.0
"""Ways to run a step: starts, what a search makes of each, and what they take.

::

    start                              used where                       searched
    ---------------------------------  -------------------------------  ------------------------
    the placement that is given        a caller gives one               -
    arrival, balanced by tokens,       always, or the one that the      -
    balanced by latency                policy names
    balanced by latency                ranks wait for nobody            places, orders
    rows of equal height, or of        ranks wait in every layer        places, orders
    heights that fall to both ends
    samples shared more or less        cp_sizes are planned             places, orders, cp_sizes
    eagerly
    balanced by latency, or rows       segments are planned             places, orders, segments
    shared, as if on one stage         segments and cp_sizes are        places, orders, segments

All are placed at the expected budgets. The search is :mod:`.search.annealing`; that of segments,
whose candidates differ in their operations, is :mod:`.search.segments`. Micro-batches of the job's
context-parallel size are placed on the job whose ranks are its context-parallel groups.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from sparsebalance_megatron.config import Batching
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.bounds import step_bounds
from sparsebalance_megatron.plan.budgets.policy import tune
from sparsebalance_megatron.plan.pipeline.operation_times import imbalance, rounded_ms
from sparsebalance_megatron.plan.pipeline.orders import most_tokens_in_flight
from sparsebalance_megatron.plan.search.annealing import Annealing
from sparsebalance_megatron.plan.search.balance import arrival, balanced, packed_rows
from sparsebalance_megatron.plan.search.cp_size_start import cp_size_start
from sparsebalance_megatron.plan.search.moves import Rules
from sparsebalance_megatron.plan.search.segments import SegmentSearch
from sparsebalance_megatron.plan.search_effort import SearchEffort
from sparsebalance_megatron.plan.step_problem import StepProblem


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """Samples in their places.

    Attributes:
        problem: of as many ranks and positions as the arrangement has: the job's ranks or their
            context-parallel groups, and its positions or fewer.
        batching: how samples were placed.
        makespan_ms, sum_ms: predicted for the step and summed over its ranks, at the expected
            budgets, which tuning makes no longer, or at those that the paper's tuning chooses;
            rounded, so that equal steps tie.
    """

    problem: StepProblem
    batching: Batching
    arrangement: Arrangement
    makespan_ms: float
    sum_ms: float

    @classmethod
    def of(
        cls, problem: StepProblem, arrangement: Arrangement, batching: Batching = "makespan"
    ) -> "Candidate":
        """The candidate of an arrangement."""
        budgets_LS = problem.expected_LS
        if problem.plan_settings.tunes_by_latency:
            budgets_LS = tune(problem, arrangement).budgets_LS
        ms_R = problem.makespans_ms(budgets_LS, arrangement)
        return cls(
            problem=problem,
            batching=batching,
            arrangement=arrangement,
            makespan_ms=rounded_ms(ms_R.max()),
            sum_ms=rounded_ms(ms_R.sum()),
        )

    def __lt__(self, other: "Candidate") -> bool:
        """Whether it is shorter; of equal steps, in the sum of its ranks."""
        return (self.makespan_ms, self.sum_ms) < (other.makespan_ms, other.sum_ms)


LEAST_GAIN = 0.99
"""Segments are used where the step takes less than this share of its time in one piece."""


def best_candidate(problem: StepProblem) -> Candidate:
    """The shortest step of all; in segments where those gain enough.

    Raises:
        PlanError: no placement exists, or the one given is not of this job.
    """
    placed, plan_settings = problem.inputs.placement, problem.plan_settings
    if isinstance(placed, Arrangement):
        return Candidate.of(problem.with_positions(placed.cp_sizes_RM.shape[1]), placed, "arrival")
    if placed is not None:
        return _as_placed(problem.of_groups, placed)
    try:
        equal = min(_of_equal_cp_size(problem.of_groups))
    except PlanError:
        if not plan_settings.plans_cp_sizes:
            raise
        # The cap may ask for micro-batches that more ranks share.
        equal = None
    whole = _with_cp_sizes(problem, equal) if plan_settings.plans_cp_sizes else equal
    assert whole is not None, "cp_sizes are planned where no equal ones are found"
    cut = []
    if plan_settings.plans_segments(problem.job):
        cut = _in_segments(problem, equal, whole)
    limit_ms = rounded_ms(LEAST_GAIN * whole.makespan_ms)
    shorter = [each for each in cut if each.makespan_ms < limit_ms]
    return min(shorter or [whole])


def _if_possible(make: Callable[..., Candidate], *arguments: object) -> list[Candidate]:
    """The candidate that this makes; none where no placement exists."""
    try:
        return [make(*arguments)]
    except PlanError:
        return []


def _as_placed(problem: StepProblem, placement: Placement) -> Candidate:
    """A placement that the caller has made, with budgets for it.

    Raises:
        PlanError: it is not one of this job, or does not hold every sample once.
    """
    job, samples = problem.job, len(problem.lengths_tokens)
    shape = [len(rank) for rank in placement]
    if shape != [job.micro_batches] * job.data_parallel_size:
        raise PlanError(
            f"placement: ranks have {shape} micro-batches, the job {job.data_parallel_size} "
            f"ranks of {job.micro_batches}; context-parallel ranks are not counted"
        )
    placed = sorted(sample for rank in placement for micro_batch in rank for sample in micro_batch)
    if placed != list(range(samples)):
        raise PlanError(f"placement: must hold each of the {samples} samples exactly once")
    return Candidate.of(problem, Arrangement.of_placement(placement), "arrival")


def _of_equal_cp_size(problem: StepProblem) -> list[Candidate]:
    """Candidates of ranks that share no micro-batch, the simplest first.

    Raises:
        PlanError: none of the policy's placements exists.
    """
    batching = problem.plan_settings.config.batching
    names: tuple[Batching, ...] = (batching,)
    if batching == "makespan":
        names = ("arrival", "length", "latency")
    found = [each for name in names for each in _if_possible(_placed, problem, name)]
    found = found or _if_possible(_placed, problem, "arrival") or [_placed(problem, names[-1])]
    if batching == "makespan":
        starts, effort = found[-1:], 1.0
        if problem.job.lockstep_ranks > 1:
            starts = _best_rows(problem) or starts
            if problem.job.pipeline_stages > 1:
                effort = 1.0 / len(starts)
        found += [each for start in starts for each in (start, _searched(start, effort=effort))]
    return found


def _placed(problem: StepProblem, batching: Batching) -> Candidate:
    lengths, job, cap_tokens = problem.lengths_tokens, problem.job, problem.cap_tokens
    match batching:
        case "arrival":
            placement = arrival(lengths, job, cap_tokens)
        case "length":
            placement = balanced(problem.costs.lengths_tokens_S, lengths, job, cap_tokens)
        case _:
            placement = problem.balanced_by(problem.expected_2SX)
    return Candidate.of(problem, Arrangement.of_placement(placement), batching)


_SHARE_OF_STEP, _SHARE_PACKED, _SHARE_WITH_CP_SIZES = 0.02, 0.06, 0.10
"""What a search may take of the step's time, during the step before: with one sample a micro-batch;
with several, where there are more placements to tell apart; and where ranks that wait for one
another are simulated together, few candidates at a time."""
_RATIO_TO_BOUND, _RATIO_TO_BOUND_WITH_CP_SIZES = 1.001, 1.005
"""Within which ratio of the lower bound a search ends."""


def _searched(start: Candidate, max_cp_size: int = 1, effort: float = 1.0) -> Candidate:
    """What the search makes of a start, with a part of the effort that one search may take."""
    problem = start.problem
    job = problem.job
    share, ratio = _SHARE_OF_STEP, _RATIO_TO_BOUND
    if max_cp_size > 1:
        share, ratio = _SHARE_WITH_CP_SIZES, _RATIO_TO_BOUND_WITH_CP_SIZES
    elif len(problem.lengths_tokens) > job.places:
        share = _SHARE_PACKED
    rules = Rules(
        cap_tokens=problem.cap_tokens, max_cp_size=max_cp_size, lockstep_ranks=job.lockstep_ranks
    )
    plan_ms = effort * problem.search_ms(start.makespan_ms, share)
    search = Annealing(
        start.arrangement, problem.costs, problem.expected_2SX, rules, SearchEffort(plan_ms)
    )
    enough_ms = ratio * _bound_ms(problem, max_cp_size)
    spends_all = problem.plan_settings.config.plan_ms is not None
    return Candidate.of(problem, search.best(enough_ms, spends_all))


def _bound_ms(problem: StepProblem, max_cp_size: int) -> float:
    """Lower bound of a step in one piece at the expected budgets."""
    bounds = step_bounds(problem.expected_2SX, problem.costs, max_cp_size)
    return bounds.bound_ms * float(problem.costs.slowness_RP.min())


def _best_rows(problem: StepProblem) -> list[Candidate]:
    """The best rows on lockstep groups: of equal height in as many positions as the job has, and
    in fewer or of heights that fall to both ends.

    Without a pipeline, samples may be packed into rows of fewer positions; fewer, fuller positions
    have more equal heights, and average errors of prediction. In a pipeline, low rows at both ends
    fill and empty it faster.
    """
    job, own, other = problem.job, _rows(problem), []
    if problem.plans_positions:
        numbers = range(1, job.micro_batches)
        other = [each for number in numbers for each in _rows(problem.with_positions(number))]
    elif job.pipeline_stages > 1 and len(problem.lengths_tokens) > job.places:
        other = _rows(problem, falls_to_ends=True)
    return [min(each) for each in (own, other) if each]


_FALL_TO_ENDS = 0.85
"""How much lower than a row in the middle of the schedule one at its very end is, as a share."""


def _rows(problem: StepProblem, *, falls_to_ends: bool = False) -> list[Candidate]:
    """Rows of equal height, the highest ones on the group with least work, or of heights that fall
    to both ends of the schedule; none where the samples do not fit so many."""
    job, costs = problem.job, problem.costs
    members, groups = job.lockstep_ranks, job.data_parallel_size // job.lockstep_ranks
    of_groups = replace(job, data_parallel_size=groups, lockstep_ranks=1)
    weights_S = problem.expected_2SX[..., : costs.own].sum(axis=(0, 2))
    order_M, floors_X = np.arange(job.micro_batches), None
    if falls_to_ends:
        middle_M = (2 * order_M + 1) / job.micro_batches - 1.0
        profile_M = 1.0 - _FALL_TO_ENDS * np.abs(middle_M)
        order_M = np.argsort(np.argsort(-profile_M, kind="stable"))
        mean_weight = weights_S.sum() / job.places
        floors_X = np.sort(np.repeat(profile_M * mean_weight / profile_M.mean(), groups))[::-1]
    packings = packed_rows(
        weights_S,
        costs.lengths_tokens_S,
        rows=groups * job.micro_batches,
        members=members,
        cap_tokens=problem.cap_tokens,
        floors_X=floors_X,
    )
    found = []
    for rows in packings:
        heights_X = np.array([weights_S[list(row[0])].sum() for row in rows])
        placement = balanced(heights_X, [1] * len(rows), of_groups, len(rows))
        samples: list[tuple[tuple[int, ...], ...]] = []
        for group, positions in enumerate(placement):
            falling = sorted((row for (row,) in positions), key=lambda row: (-heights_X[row], row))
            slowness_W = costs.slowness_R[group * members :][:members]
            # The fullest bins are on the fastest devices.
            place_W = np.argsort(np.argsort(slowness_W, kind="stable"))
            in_order = [falling[height] for height in order_M.tolist()]
            samples += [tuple(rows[row][place] for row in in_order) for place in place_W.tolist()]
        found.append(Candidate.of(problem, Arrangement.of_placement(tuple(samples))))
    return found


_SKIP_RATIO_TO_BOUND = 1.03
"""Other cp_sizes are not searched where equal ones are within this ratio of the lower bound. Large
jobs without very long samples usually are; the search would double their planning time."""
_EFFORT_FROM_BEST = 0.25
"""Effort for a larger largest cp_size from the best step found before, over that from its own
starts."""
_FULL_EFFORT_CP_SIZE = 8
"""Largest cp_size up to which every search for a larger one may take its whole effort."""


def _with_cp_sizes(problem: StepProblem, equal: Candidate | None) -> Candidate:
    """The best of planned cp_sizes and of equal ones, if there are any.

    1. No others are searched where equal ones are near the lower bound of all cp_sizes.
    2. Largest cp_sizes of 2, 4, ... to the limit are searched one after another, from the best
       step found before and from starts of their own. So a higher limit never makes a step longer.
    3. Beyond _FULL_EFFORT_CP_SIZE each search gets less effort, so that all of them take no more.
    4. Where steps may have fewer positions than the job, so do starts, by halves: where there are
       no more samples than positions, all ranks have to share every sample.

    Raises:
        PlanError: no placement of the samples exists.
    """
    limit, best = problem.plan_settings.max_cp_size, equal
    ranks = problem.job.data_parallel_size
    near_ms = rounded_ms(_SKIP_RATIO_TO_BOUND * _bound_ms(problem, limit))
    if best is not None and best.makespan_ms <= near_ms:
        return best
    effort = min(1.0, _FULL_EFFORT_CP_SIZE.bit_length() / limit.bit_length())
    numbers = [problem.job.micro_batches]
    while problem.plans_positions and numbers[-1] > 1:
        numbers.append(numbers[-1] // 2)
    steps = [problem.with_positions(number) for number in numbers]
    largest = 1
    while largest < limit:
        largest *= 2
        starts = [each for step in steps for each in _if_possible(_shared_start, step, largest)]
        found = [] if best is None else [best]
        if best is not None and best.problem.job.data_parallel_size == ranks:
            found.append(_searched(best, largest, effort * _EFFORT_FROM_BEST))
        found += [_searched(start, largest, effort / len(starts)) for start in starts]
        best = min(found, default=None)
    return best or _shared_start(steps[-1], limit)


_MAX_WEIGHTS_OVER_MEAN = (np.inf, 4.0, 2.0, 1.0)
"""Starts that share: the most a sample may weigh per rank, over the mean of all positions."""


def _shared_start(problem: StepProblem, max_cp_size: int) -> Candidate:
    """The shortest of starts that share samples more and less eagerly.

    Where bytes travel more slowly between many ranks than between few, starts with a smaller
    largest cp_size are tried as well.

    Raises:
        PlanError: no placement of the samples exists.
    """
    weights_S = problem.expected_2SX.sum(axis=(0, 2))
    slowness = {factor for _, factor in problem.costs.exchange.cp_size_slowness}
    halvings = max(1, max_cp_size.bit_length() - 1) if len(slowness) > 1 else 1
    widest = (max_cp_size >> halving for halving in range(halvings))

    def start(most_over_mean: float, widest_cp_size: int) -> Candidate:
        rules = Rules(cap_tokens=problem.cap_tokens, max_cp_size=widest_cp_size)
        where = cp_size_start(weights_S, problem.costs, rules, most_over_mean)
        return Candidate.of(problem, where)

    choices = list(product(_MAX_WEIGHTS_OVER_MEAN, widest))
    found = [each for choice in choices for each in _if_possible(start, *choice)]
    return min(found or [start(*choices[-1])])


_EQUAL_RANKS = 1.05
"""Largest work of a rank over the mean at which ranks alone are as good as equal."""


def _in_segments(
    problem: StepProblem, equal: Candidate | None, whole: Candidate
) -> list[Candidate]:
    """Steps in segments: of ranks alone or lockstep groups, and of ranks that share micro-batches.

    The fullest rank holds at most as many tokens on its first stage as without segments.

    Args:
        equal: the step of equal cp_sizes in one piece; None where there is none.
        whole: the shortest step in one piece.
    """
    most_tokens = _most_tokens(problem, (equal or whole).arrangement)
    lockstep = problem.job.lockstep_ranks > 1
    starts = [] if equal is None else [equal.arrangement]
    if lockstep:
        starts += [each.arrangement for each in _rows(problem)]
    elif starts:
        starts = [each.arrangement for each in _if_possible(_placed, problem, "latency")] or starts
    found = _cut(problem, starts, most_tokens)
    if not problem.plan_settings.plans_cp_sizes or lockstep:
        return found
    if found and _imbalance_of_ranks(found[0]) < _EQUAL_RANKS:
        # Sharing can gain little.
        return found
    # Cut finely, a pipeline takes about what its micro-batches take one after another. So cp_sizes
    # are those of a step with all layers on one stage, and the best of every limit; of a start that
    # takes as long there, both, as they may differ in the pipeline.
    one_stage, limit = problem.on_one_stage(), problem.plan_settings.max_cp_size
    starts = []
    # The cap may ask for micro-batches that more ranks share than a limit allows.
    while limit > 1 and (shared := _if_possible(_shared_start, one_stage, limit)):
        searched = _searched(shared[0], limit)
        starts.append(searched.arrangement)
        starts += [each.arrangement for each in shared if each.makespan_ms == searched.makespan_ms]
        limit //= 2
    return found + _cut(problem, starts, most_tokens)


def _cut(problem: StepProblem, starts: Iterable[Arrangement], most_tokens: int) -> list[Candidate]:
    """What the search of segments makes of starts, where a micro-batch is worth cutting and holds
    few enough tokens."""
    found = []
    for start in starts:
        where, ms = SegmentSearch(problem, start, most_tokens).best()
        if where.is_cut and np.isfinite(ms):
            found.append(Candidate.of(problem, where))
    return found


def _imbalance_of_ranks(cut: Candidate) -> float:
    """The largest over the mean of the ranks' work, where they share nothing."""
    rank_S = cut.arrangement.micro_batch_of_S // cut.problem.job.micro_batches
    return imbalance(np.bincount(rank_S, cut.problem.expected_2SX.sum(axis=(0, 2))))


def _most_tokens(problem: StepProblem, where: Arrangement) -> int:
    """Tokens in flight on the first stage of the fullest rank, in one piece; of a lockstep group,
    the fullest member counts at every position."""
    job = problem.job
    tokens_J = np.bincount(where.micro_batch_of_S, problem.lengths_tokens, job.places)
    tokens_RM = tokens_J[where.groups.first_J].reshape(where.cp_sizes_RM.shape)
    tokens_RM = -(-tokens_RM // where.cp_sizes_RM)
    tokens_EM = tokens_RM.reshape(-1, job.lockstep_ranks, job.micro_batches).max(axis=1)
    order = job.schedule(job.pipeline_stages, job.micro_batches, job.virtual_stages)
    return int(most_tokens_in_flight(order, tokens_EM)[:, 0].max())
