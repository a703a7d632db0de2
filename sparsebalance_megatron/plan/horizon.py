# SPDX-License-Identifier: Apache-2.0
"""Coverage over several steps: what a step may give up because later ones regain it cheaper.

A step of long samples pays more for coverage than one of short samples. One price for all samples
of a horizon holds their mean coverage with the least work; each step aims at what its own samples
take at that price. Large global batches are a horizon by themselves.

Shape legend: S samples of the horizon, this step's first; L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsebalance_megatron.cost.calibrate import StageScales
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.plan.budgets import least_work_budgets
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.feasible import feasible_range
from sparsebalance_megatron.plan.latency import step_costs
from sparsebalance_megatron.plan.step_plan import JobShape, PlanPolicy

HORIZON_SAMPLES = 128
"""At least; longer horizons gain little and take longer to plan."""


def horizon_steps(global_batch_size: int) -> int:
    """Steps of a horizon, the one that is planned included."""
    return -(-HORIZON_SAMPLES // global_batch_size)


def coverage_aim(
    *,
    lengths_tokens: Sequence[int],
    later_lengths_tokens: Sequence[int],
    job: JobShape,
    policy: PlanPolicy,
    cost: CostModel,
    scales: StageScales,
    coverage: CoverageCurves,
    owed_coverage: float,
) -> float:
    """By how much a step's mean coverage should exceed that of base budgets; may be negative.

    Args:
        lengths_tokens: of the step's samples.
        later_lengths_tokens: of the samples of the steps after it, as far as the horizon goes.
        owed_coverage: by how much the horizon should exceed base budgets, summed over its samples.

    Raises:
        PlanError: the job, the calibration and the lengths contradict one another.
    """
    samples = len(lengths_tokens) + len(later_lengths_tokens)
    if len(later_lengths_tokens) == 0:
        return owed_coverage / samples
    costs = step_costs((*lengths_tokens, *later_lengths_tokens), job, cost, scales)
    allowed = feasible_range(costs, coverage, policy)
    base_LS = coverage.coverage_LS(costs.blocks_S, allowed.base_LS)
    known_LS = np.isfinite(base_LS)
    less_LS, more_LS = (
        np.where(known_LS, coverage.coverage_LS(costs.blocks_S, budgets_LS) - base_LS, 0.0)
        for budgets_LS in least_work_budgets(costs, coverage, allowed, owed_coverage / samples)
    )
    # Where many steps of budgets have one price, its level takes all of them: go there in part.
    short = owed_coverage / samples * known_LS.sum() - less_LS.sum()
    gap = more_LS.sum() - less_LS.sum()
    share = min(max(short / gap, 0.0), 1.0) if gap > 0.0 else 1.0
    own = slice(len(lengths_tokens))
    surplus = (1.0 - share) * less_LS[:, own].sum() + share * more_LS[:, own].sum()
    return float(surplus / max(1, known_LS[:, own].sum()))
