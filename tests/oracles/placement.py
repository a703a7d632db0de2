# SPDX-License-Identifier: Apache-2.0
"""The best placement by CP-SAT: every sample a position, every operation a start, least makespan.

Shape legend: S samples, D ranks, M micro-batches, P stages.
"""

import itertools

from oracles.plan import input_of, stage_program

UNITS_PER_MS = 1000


def best_makespan_ms(forward_SP, backward_SP, constant_2P, ranks, micro_batches, seconds=20):
    """Least makespan in ms over all placements that leave no position empty; None if unproven.

    ``constant_2P``: forward and backward ms of a position on each stage whatever it holds.
    """
    from ortools.sat.python import cp_model

    stages = len(forward_SP[0])
    schedule = "1f1b" if stages > 1 else "no_pipeline"
    model = cp_model.CpModel()
    horizon = sum(_units(ms) for row in (*forward_SP, *backward_SP) for ms in row)
    horizon += ranks * micro_batches * sum(_units(ms) for row in constant_2P for ms in row)
    makespan = model.new_int_var(0, horizon, "T")
    where = {
        (s, d, m): model.new_bool_var("")
        for s in range(len(forward_SP))
        for d, m in itertools.product(range(ranks), range(micro_batches))
    }
    for s in range(len(forward_SP)):
        model.add_exactly_one(
            where[s, d, m] for d, m in itertools.product(range(ranks), range(micro_batches))
        )
    for d in range(ranks):
        ends = {}
        for m in range(micro_batches):
            model.add_at_least_one(where[s, d, m] for s in range(len(forward_SP)))
        keys = [
            (p, kind, c, m)
            for p in range(stages)
            for kind, c, m in stage_program(stages, micro_batches, schedule, 1, p)
        ]
        for key in keys:
            ends[key] = model.new_int_var(0, horizon, "")
            model.add(makespan >= ends[key])
        before = {}
        for first, second in itertools.pairwise(keys):
            if first[0] == second[0]:
                before[second] = first
        for p, kind, c, m in keys:
            times = forward_SP if kind == "F" else backward_SP
            duration = _units(constant_2P[kind == "B"][p]) + sum(
                _units(times[s][p]) * where[s, d, m] for s in range(len(times))
            )
            for source in (before.get((p, kind, c, m)), input_of(stages, 1, p, kind, c, m)):
                start = 0 if source is None else ends[source]
                model.add(ends[p, kind, c, m] >= start + duration)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    if solver.solve(model) != cp_model.OPTIMAL:
        return None
    return solver.objective_value / UNITS_PER_MS


def _units(ms):
    return round(ms * UNITS_PER_MS)
