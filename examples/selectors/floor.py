# SPDX-License-Identifier: Apache-2.0
"""A budget policy: every sample gets the least budget that the coverage threshold allows."""

from sparsebalance_megatron.plan.budgets.allowed import feasible_range
from sparsebalance_megatron.plan.step_problem import BudgetPolicy


class FloorPolicy(BudgetPolicy):
    def allowed(self, costs, coverage, plan_settings):
        return feasible_range(costs, coverage, plan_settings)

    def tuned_LS(self, problem, where):
        return problem.allowed.floor_LS


FLOOR = FloorPolicy()
