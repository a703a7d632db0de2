# SPDX-License-Identifier: Apache-2.0
"""The block mask given to FlexAttention; FlexAttention itself is compiled for CUDA only."""

from __future__ import annotations

import pytest
import torch
from attention.cases import SCALE, assert_as_good_as_plain, make_case, on_device, with_lists
from flex_attention import attention, block_mask


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("empty_row", [None, 2])
def test_the_mask_is_the_selection(group: int, empty_row: int | None) -> None:
    case = make_case([0, 1, 50, 130], [1, 3, 4], block=16, head_dim=8, heads=2 * group, kv_heads=2)
    if empty_row is not None:
        indices_NGK = case.selection.indices_QCK.clone()
        counts_NG = case.selection.counts_QC.clone()
        indices_NGK[empty_row], counts_NG[empty_row] = -1, 0
        case = with_lists(case, indices_NGK, counts_NG)
    selection = case.selection
    dense_HNN = block_mask(selection, group).to_dense()[0].bool()
    blocks = selection.query_layout.blocks
    expected_HNN = torch.zeros(2 * group, blocks, blocks, dtype=torch.bool)
    for head in range(2 * group):
        for row in range(blocks):
            count = int(selection.counts_QC[row, head // group])
            expected_HNN[head, row, selection.indices_QCK[row, head // group, :count].long()] = True
    assert torch.equal(dense_HNN, expected_HNN)
    mask = block_mask(selection, group)
    # Only own blocks need the causal mask.
    assert torch.equal(mask.kv_num_blocks[0], expected_HNN.diagonal(dim1=1, dim2=2).int())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_is_as_good_as_plain_torch(dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(False)
    case = make_case([0, 100, 1000], [1, 3], block=128, head_dim=64, dtype=dtype, device="cuda")
    selection = on_device(case.selection, "cuda")
    ours = case.run(
        lambda q, k, v: attention(q, k, v, selection, softmax_scale=SCALE), dtype, "cuda"
    )
    assert_as_good_as_plain(case, ours, dtype, case.plain(torch.float64))
