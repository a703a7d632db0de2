# SPDX-License-Identifier: Apache-2.0
"""The shortest step that dealing one rank's work to its micro-batches can give, in any parts."""

from __future__ import annotations

import itertools

import numpy as np
from scipy.optimize import linprog

from oracles.plan import input_of, stage_program


def best_dealt_makespan(work, micro_batches):
    """``work``: nested lists [2][P][V] of all micro-batches together. By linear programming.

    Variables: the end of every operation, the share of every micro-batch, the end of the step.
    """
    stages, chunks = len(work[0]), len(work[0][0])
    schedule = "no_pipeline" if stages == 1 else "1f1b" if chunks == 1 else "interleaved"
    operations = [
        (p, kind, c, m)
        for p, kind, c, m in itertools.product(
            range(stages), "FB", range(chunks), range(micro_batches)
        )
    ]
    end_of = {operation: number for number, operation in enumerate(operations)}
    share_of = {m: len(operations) + m for m in range(micro_batches)}
    step = len(operations) + micro_batches
    rows = []

    def after(operation, earlier):
        """end >= end of the earlier one + work x share"""
        p, kind, c, m = operation
        row = np.zeros(step + 1)
        row[end_of[operation]], row[share_of[m]] = -1.0, work["FB".index(kind)][p][c]
        if earlier is not None:
            row[end_of[earlier]] = 1.0
        rows.append(row)

    for p in range(stages):
        program = [(p, *rest) for rest in stage_program(stages, micro_batches, schedule, chunks, p)]
        for earlier, operation in itertools.pairwise([None, *program]):
            after(operation, earlier)
    for operation in operations:
        after(operation, input_of(stages, chunks, *operation))
        row = np.zeros(step + 1)
        row[end_of[operation]], row[step] = 1.0, -1.0
        rows.append(row)
    shares = np.zeros((1, step + 1))
    shares[0, list(share_of.values())] = 1.0
    found = linprog(
        np.eye(step + 1)[step], A_ub=np.array(rows), b_ub=np.zeros(len(rows)), A_eq=shares, b_eq=[1]
    )
    assert found.success, found.message
    return found.fun
