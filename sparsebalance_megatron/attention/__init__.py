# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention with budgets. Knows nothing of Megatron or plans; ranks, in one folder.

Letters of shapes in all its files: Q rows (tokens or blocks of queries) and C heads that select.
"""
