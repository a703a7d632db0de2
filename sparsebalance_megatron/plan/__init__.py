# SPDX-License-Identifier: Apache-2.0
"""Plans steps: which rank runs which samples, in what order and pieces, under which budgets.

::

    planner                      starts -> search -> budgets -> what is expected
      candidates                 starts, and the shortest of what searches make of them
        search.annealing         places, orders, how many ranks share
        search.segments          orders, cuts
      budgets.policy             who would wait reads more
      bounds                     what no plan ends before
    step_costs, segments         ms of samples, micro-batches and pieces on ranks that share or wait
    arrangement, groups          where samples are, who shares, who waits: a rank alone is a group
    pipeline                     orders of operations, and when they end

Letters of shapes in all its files, beside those of the package: E groups of ranks, which wait for
one another or may share, and W ranks of one; U segments, or micro-batches in one piece; O
operations; Q price levels; Z sizes (samples of as many blocks); X columns, places or candidates, as
a file says.
"""
