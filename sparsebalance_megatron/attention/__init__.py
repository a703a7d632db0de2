# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention with budgets. Knows nothing of Megatron or plans; ranks, in one folder.

Letters of shapes in all its files: T tokens of a packed sequence, of queries or of keys, which may
differ; B places of a block; S documents of the keys; Q rows (tokens or blocks of queries) and C
heads that select; H query heads, of all or of one such head; E keys and values side by side; A
tiles, I rows of a tile, W columns (keys or blocks) of a tile or of a chunk of scores.
"""
