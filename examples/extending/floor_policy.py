# SPDX-License-Identifier: Apache-2.0
"""A budget policy, compared with fixed budgets on the paper's setup by predictions."""

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.plan.budgets.policy import BUDGET_POLICIES, BudgetPolicy
from sparsebalance_megatron.plan.budgets.problem import feasible_range
from sparsebalance_megatron.predict.outcome import predict_rows
from sparsebalance_megatron.predict.rows import Variant
from sparsebalance_megatron.predict.scenario import SETUPS


class FloorPolicy(BudgetPolicy):
    """Every sample gets the least budget that the coverage threshold allows."""

    def allowed(self, costs, coverage, plan_settings):
        return feasible_range(costs, coverage, plan_settings)

    def tuned_LS(self, problem, where):
        floor_LS = problem.allowed.floor_LS
        return floor_LS, floor_LS.min(axis=0) < 0  # every sample could follow


BUDGET_POLICIES["floor"] = FloorPolicy()
workload = SETUPS["paper-main"].workload("longalign", steps=4, seed=0, config=SparseBalanceConfig())
rows = {"fixed": Variant("makespan", "off"), "floor": Variant("makespan", "floor")}
outcomes = predict_rows(workload, rows)
print(outcomes["floor"].speedup, outcomes["floor"].coverage_mean)
