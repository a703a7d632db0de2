# SPDX-License-Identifier: Apache-2.0
"""A budget policy: every sample gets the least budget that the coverage threshold allows."""

from sparsebalance_megatron.plan.budgets.policy import BudgetPolicy
from sparsebalance_megatron.plan.budgets.problem import feasible_range


class FloorPolicy(BudgetPolicy):
    def allowed(self, costs, coverage, plan_settings):
        return feasible_range(costs, coverage, plan_settings)

    def tuned_LS(self, problem, where):
        return problem.allowed.floor_LS


FLOOR = FloorPolicy()
