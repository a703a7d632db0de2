# SPDX-License-Identifier: Apache-2.0
"""Naive planning: loops over events, assignments and budgets. Slow on purpose.

Shape legend: P stages, V chunks per stage, M micro-batches, L layers, S samples.
"""

import itertools
import math


def pairs(tokens, budget, block_size):
    """Block pairs of one document, block by block."""
    total, left, j = 0.0, tokens, 1
    while left > 0:
        here = min(left, block_size) / block_size
        total += here * (min(j, budget) - 1 + here)
        left, j = left - block_size, j + 1
    return total


def chunk_and_micro_batch(k, group_size, chunks, forward):
    """What the k-th forward or backward of any stage of an interleaved pipeline is."""
    group, inside = divmod(k, group_size * chunks)
    chunk = inside // group_size
    return (chunk if forward else chunks - 1 - chunk), group * group_size + inside % group_size


def stage_program(stages, micro_batches, schedule, chunks, stage, group_size=None):
    """("F" or "B", chunk, micro-batch) of one stage, step by step; groups are full."""
    group_size = group_size or stages
    if schedule == "no_pipeline":
        program = []
        for m in range(micro_batches):
            program += [("F", c, m) for c in range(chunks)]
            program += [("B", c, m) for c in range(chunks - 1, -1, -1)]
        return program
    total = micro_batches * chunks
    warm = stages - 1 - stage
    if schedule == "interleaved":
        warm = 2 * warm + (chunks - 1) * group_size
    done_forward = done_backward = 0
    program = []
    while done_backward < total:
        ahead = done_forward - done_backward
        if done_forward < total and ahead <= warm:
            kind, count = "F", done_forward
            done_forward += 1
        else:
            kind, count = "B", done_backward
            done_backward += 1
        chunk, m = (
            (0, count)
            if schedule == "1f1b"
            else chunk_and_micro_batch(count, group_size, chunks, kind == "F")
        )
        program.append((kind, chunk, m))
    return program


def run_pipeline(forward, backward, schedule, group_size=None):
    """{(stage, kind, chunk, micro-batch): (start, end)} of nested lists [P][V][M]."""
    alone = [[1] * len(forward[0][0])]
    times = waiting_pipelines([forward], [backward], alone, schedule, group_size=group_size)
    return {key[1:]: span for key, span in times.items()}


def input_of(stages, chunks, p, kind, c, m):
    """The operation that another one needs the output of; None for the first forward."""
    if kind == "F":
        if p > 0:
            return (p - 1, "F", c, m)
        return (stages - 1, "F", c - 1, m) if c > 0 else None
    if p < stages - 1:
        return (p + 1, "B", c, m)
    return (0, "B", c + 1, m) if c < chunks - 1 else (p, "F", c, m)


def makespan(forward, backward, schedule, group_size=None):
    times = run_pipeline(forward, backward, schedule, group_size)
    return max(end for _, end in times.values())


def interpolate(grid, values, budget, blocks):
    """Coverage of a document at a budget, from the values at the grid's budgets."""
    if budget >= blocks:
        return 1.0
    for left in range(len(grid) - 1):
        if grid[left] <= budget < grid[left + 1]:
            share = (budget - grid[left]) / (grid[left + 1] - grid[left])
            return values[left] + share * (values[left + 1] - values[left])
    return values[-1]


def least_budget(grid, values, blocks, base, threshold):
    """Least feasible budget, by trying one after the other."""
    base = min(base, blocks)
    target = interpolate(grid, values, base, blocks) - threshold
    for budget in range(1, base + 1):
        if interpolate(grid, values, budget, blocks) >= target:
            return budget
    raise AssertionError("the base budget is always feasible")


def most_coverage(chains, limit):
    """Best total gain of choosing one (ms, gain) per chain with at most ``limit`` ms in all."""
    best = -math.inf
    for choice in itertools.product(*chains):
        if sum(ms for ms, _ in choice) <= limit:
            best = max(best, sum(gain for _, gain in choice))
    return best


def waiting_pipelines(forward, backward, cp_sizes, schedule="1f1b", lockstep=1, group_size=None):
    """{(rank, stage, kind, chunk, micro-batch): (start, end)} of ranks that wait for one another.

    An operation begins when all ranks that share its micro-batch, and all that are in lockstep with
    any of these, are ready for it. It ends when the slowest rank in lockstep has done it.

    Args:
        forward: of rank r, stage p, chunk v, micro-batch m: forward[r][p][v][m]. backward alike.
        cp_sizes: of the micro-batch that rank r takes part in at position m: cp_sizes[r][m].
        lockstep: neighbours that wait for one another.
    """
    ranks, stages, chunks = len(forward), len(forward[0]), len(forward[0][0])
    positions = len(forward[0][0][0])
    programs = [
        stage_program(stages, positions, schedule, chunks, p, group_size) for p in range(stages)
    ]
    times = {}
    while len(times) < ranks * sum(map(len, programs)):
        before = len(times)
        for p, program in enumerate(programs):
            for r in range(ranks):
                done = sum((r, p, *operation) in times for operation in program)
                if done == len(program):
                    continue
                kind, c, m = program[done]
                party = _waiting_together(r, [row[m] for row in cp_sizes], lockstep)
                needed = [(each, p, *program[done - 1]) for each in party if done]
                source = input_of(stages, chunks, p, kind, c, m)
                needed += [(each, *source) for each in party if source]
                if any(key not in times for key in needed):
                    continue
                start = max((times[key][1] for key in needed), default=0.0)
                for each in party:
                    first = each // lockstep * lockstep
                    slowest = max(
                        (forward if kind == "F" else backward)[other][p][c][m]
                        for other in range(first, first + lockstep)
                    )
                    times[each, p, kind, c, m] = (start, start + slowest)
        assert len(times) > before, "deadlock"
    return times


def _waiting_together(rank, cp_sizes, lockstep):
    party, grown = set(), {rank}
    while grown != party:
        party = grown
        grown = {
            other
            for each in party
            for size in (cp_sizes[each], lockstep)
            for other in range(each // size * size, each // size * size + size)
        }
    return sorted(party)


def waiting_makespans(*arguments):
    """End of every rank of :func:`waiting_pipelines`."""
    times = waiting_pipelines(*arguments)
    ranks = 1 + max(key[0] for key in times)
    return [max(end for key, (_, end) in times.items() if key[0] == r) for r in range(ranks)]
