# SPDX-License-Identifier: Apache-2.0
"""Row by row: what Megatron's fused matrices hold, written from its documentation of the layout.

Rows are any objects; a matrix is a list of them.
"""


def linear_qkv_rows(q: list, k: list, v: list, *, groups: int, head_dim: int) -> list:
    """For every query group: all its query heads, then its key head, then its value head."""
    heads_per_group = len(q) // head_dim // groups
    rows = []
    for group in range(groups):
        for head in range(heads_per_group):
            for row in range(head_dim):
                rows.append(q[(group * heads_per_group + head) * head_dim + row])
        for matrix in (k, v):
            for row in range(head_dim):
                rows.append(matrix[group * head_dim + row])
    return rows
