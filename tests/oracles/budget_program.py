# SPDX-License-Identifier: Apache-2.0
"""The least time in which placed samples reach a coverage, if budgets were continuous."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog


def least_makespan_ms(forward_ms, backward_ms, coverage, placed, order, wanted):
    """A linear program over convex mixtures of each unit's levels; a chunk of a slot is a unit.

    Args:
        forward_ms, backward_ms: ``[unit][level]`` of (slot, stage), on each of the slot's ranks.
        coverage: ``[unit][level]``.
        placed: ``[rank][position]``, the number of the slot that runs there.
        order: ``[stage]``, (is backward, position) in the order that every rank runs them.
        wanted: sum of coverage.

    Returns:
        None where no mixture reaches what is wanted.
    """
    units, levels, stages = len(coverage), len(coverage[0]), len(order)
    end_of, rows, limits = {}, [], []
    variables = units * levels
    for rank in placed:
        for stage in range(stages):
            for is_backward, position in order[stage]:
                end_of.setdefault((rank[position], stage, is_backward), variables + len(end_of))
    last = variables + len(end_of)

    def at_least(after, before, slot, stage, is_backward):
        """One end comes no sooner than another, or the start, and what the operation takes."""
        row = np.zeros(last + 1)
        unit = slot * stages + stage
        row[unit * levels : (unit + 1) * levels] = (backward_ms if is_backward else forward_ms)[
            unit
        ]
        row[after] -= 1.0
        if before is not None:
            row[before] += 1.0
        rows.append(row)
        limits.append(0.0)

    for rank in placed:
        for stage in range(stages):
            previous = None
            for is_backward, position in order[stage]:
                slot = rank[position]
                own = end_of[slot, stage, is_backward]
                at_least(own, previous, slot, stage, is_backward)
                if not is_backward and stage:
                    at_least(own, end_of[slot, stage - 1, False], slot, stage, False)
                if is_backward:
                    above = (slot, stage + 1, True) if stage + 1 < stages else (slot, stage, False)
                    at_least(own, end_of[above], slot, stage, True)
                previous = own
                row = np.zeros(last + 1)
                row[own], row[last] = 1.0, -1.0
                rows.append(row)
                limits.append(0.0)
    row = np.zeros(last + 1)
    row[:variables] = -np.asarray(coverage).ravel()
    rows.append(row)
    limits.append(-wanted)
    one_each = np.zeros((units, last + 1))
    for unit in range(units):
        one_each[unit, unit * levels : (unit + 1) * levels] = 1.0
    objective = np.zeros(last + 1)
    objective[last] = 1.0
    found = linprog(
        objective,
        A_ub=np.stack(rows),
        b_ub=limits,
        A_eq=one_each,
        b_eq=np.ones(units),
        method="highs",
    )
    return found.fun if found.status == 0 else None
