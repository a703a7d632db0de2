# SPDX-License-Identifier: Apache-2.0
"""A schedule of pipelines: GPipe, all forwards and then all backwards.

``begin_run(..., order=gpipe)`` trains in it; here it is compared with 1F1B.
"""

from dataclasses import replace

import numpy as np

from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.orders import megatron_order
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms


def gpipe(stages, micro_batches, chunks):
    order = megatron_order(stages, micro_batches, chunks)
    backward_PO = order.on_stage_PO >= order.on_stage_PO.size // 2
    forwards_first_PO = np.argsort(backward_PO, axis=1, kind="stable")
    on_stage_PO = np.take_along_axis(order.on_stage_PO, forwards_first_PO, axis=1)
    return replace(order, on_stage_PO=on_stage_PO, step_O=None)


for schedule in (megatron_order, gpipe):
    # 1 rank, 4 stages of 1 chunk, 8 micro-batches of 1 ms forward and backward, shared with none.
    ms, cp_sizes = np.ones((2, 1, 4, 1, 8)), np.ones((1, 8), dtype=int)
    times = OperationTimes.of_micro_batches(ms, cp_sizes, schedule)
    print(makespans_ms(times))  # both 2 * (8 + 4 - 1) = 22 ms; 1F1B holds fewer activations
