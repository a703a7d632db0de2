# SPDX-License-Identifier: Apache-2.0
"""The check before training finds kernels that differ from ours in one place."""

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebalance_megatron.attention.self_check import check_attention
from sparsebalance_megatron.config import SparseBalanceConfig

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("nothing is compiled for mutants", allow_module_level=True)

from sparsebalance_megatron.attention.kernels.triton import (  # noqa: E402
    index,
    key_block_kernel,
    query_block_kernel,
    token_kernels,
)
from sparsebalance_megatron.attention.select import router_kernels  # noqa: E402

BY_BLOCK, BY_TOKEN, WITH_COLUMNS = "previous-block", "token-query-head", "vertical-slash"
MUTANTS = {
    "the last past tile is left out": (
        *(BY_BLOCK, query_block_kernel, "_query_block_kernel"),
        *("count * COLUMN_TILES)", "count * COLUMN_TILES - 1)"),
    ),
    "sums do not shrink with a new peak": (
        *(BY_TOKEN, query_block_kernel, "take_in", "peak_Y - new_peak_Y", "peak_Y - peak_Y"),
    ),
    "delta is left out of dq": (
        *(BY_BLOCK, query_block_kernel, "take_in", "(dp_YC - total_Y[:, None])", "dp_YC"),
    ),
    "a block's last readers are left out": (
        *(BY_TOKEN, token_kernels, "_reader_kernel"),
        *("row_Y < count * HEADS", "row_Y < count * HEADS - 1"),
    ),
    "a column's gradient is another's": (
        *(WITH_COLUMNS, key_block_kernel, "_column_sum_kernel", "+=", "="),
    ),
    "a reader lies in another's place": (
        *(BY_TOKEN, index, "_place_kernel", "+ left_K, reader", "+ left_K, first_reader"),
    ),
    "the own block has no place of its own": (
        *(BY_TOKEN, router_kernels, "_list_rows"),
        *("(column_J == last)[None, :]", "(column_J < 0)[None, :]"),
    ),
}


def _mutate(
    monkeypatch: pytest.MonkeyPatch, folder: Path, module: Any, name: str, old: str, new: str
) -> None:
    """Put a function with one change in the place of every reference to it."""
    right = getattr(module, name)
    source = inspect.getsource(right.fn)
    assert old in source
    file = folder / f"{name}.py"
    file.write_text(source.replace(old, new))
    scope = vars(module)
    exec(compile(file.read_text(), str(file), "exec"), scope)
    wrong, scope[name] = scope[name], right
    for each in [m for n, m in sys.modules.items() if n.startswith("sparsebalance_megatron")]:
        for attribute, value in list(vars(each).items()):
            if value is right:
                monkeypatch.setattr(each, attribute, wrong)


def _problems(selection: str) -> list[str]:
    config = SparseBalanceConfig(
        selection=selection,
        attention="triton",
        router="auto" if selection == WITH_COLUMNS else "triton",
        block_size=16,
    )
    return check_attention(
        config,
        heads=(4, 2),
        head_dims=(16, 32),
        dtype=torch.float32,
        device=torch.device("cpu"),
    ).problems()


@pytest.mark.parametrize("selection", [BY_BLOCK, BY_TOKEN, WITH_COLUMNS])
def test_our_kernels_pass(selection: str) -> None:
    assert _problems(selection) == []


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_found(
    mutant: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    selection, *change = mutant
    _mutate(monkeypatch, tmp_path, *change)
    assert _problems(selection)
