# SPDX-License-Identifier: Apache-2.0
"""A budget policy, compared with fixed budgets by predictions of 4 ranks of 4 pipeline stages."""

import numpy as np

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.integration import HostJob, Job, ModelShape
from sparsebalance_megatron.plan.budgets.policy import BudgetPolicy
from sparsebalance_megatron.plan.budgets.problem import feasible_range
from sparsebalance_megatron.predict.comparison import Row
from sparsebalance_megatron.predict.outcome import predict
from sparsebalance_megatron.predict.workload import Workload


class FloorPolicy(BudgetPolicy):
    """Every sample gets the least budget that the coverage threshold allows."""

    def allowed(self, costs, coverage, plan_settings):
        return feasible_range(costs, coverage, plan_settings)

    def tuned_LS(self, problem, where):
        return problem.allowed.floor_LS


shape = ModelShape(
    **{"hidden_size": 2048, "ffn_hidden_size": 11008, "vocab_size": 151936},
    **{"num_attention_heads": 16, "num_query_groups": 2, "head_dim": 128},
    **{"gated_linear_unit": True, "tensor_parallel_size": 2},
)
job = HostJob(
    layout=Job.even(layers=36, ranks=4, stages=4, micro_batches=4),
    shape=shape,
    max_sample_tokens=65536,
    global_batch_size=16,
)
config = SparseBalanceConfig(selection="previous-block", base_budget=16)
lengths = np.random.default_rng(0).integers(8192, 65536, (4, 16))  # of 4 steps of 16 samples
workload = Workload.of(job, config, lengths.tolist())
fixed = predict(Row({"tuning": "off"}, "").of(workload))
floor = predict(Row({}, "", policy=FloorPolicy()).of(workload))
print(f"fixed budgets: coverage {fixed.coverage_mean:.3f}")
speedup = fixed.makespan_ms / floor.makespan_ms
print(f"floor: {speedup:.2f} times as fast, coverage {floor.coverage_mean:.3f}")
