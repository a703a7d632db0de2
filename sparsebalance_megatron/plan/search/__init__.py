# SPDX-License-Identifier: Apache-2.0
"""Searches of a step's arrangement at the expected budgets, and what they start from.

::

               annealing                            segments
    ---------  -----------------------------------  -------------------------------------------
    state      the place of every sample, the       of every group an order of its rows, and a
               cp_size of every micro-batch         number of segments for each
    start      of every rank group the best of a    of every group the best of its rows in one
               few orders of its positions          piece, and of a few orders in a few numbers
                                                    of segments, by work
    moves      drawn in pairs of rank groups:       all of the slowest group: a segment more or
               samples change places or move,       less, two rows change places, or samples of
               two positions change places,         ranks alone
               micro-batches merge or halve
    objective  of a pair: its largest makespan,     when the slowest group ends, with no more
               and a little of its mean one         tokens on its first stage than the limit
    accepts    the best move of a pair, if hardly   the best move, if it makes the step shorter
               longer; less so towards the end
    stops      without effort or gain, after        without effort or gain
               enough moves, at a short step

Both count effort in simulated operations (:mod:`..search_effort`), so that all ranks find the same,
and return the shortest step that they have simulated. A candidate in segments has operations of its
own, so that it costs many times as much; one search with the moves of both finds longer steps.
"""
