# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks/ring_balance.py`` writes, and the masks that ``quality.py`` leaves for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import ring_balance
import torch
from quality.masked_attention import masked_attention
from quality.ring_work import block_pairs, column_pairs

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.selectors import rank_row, selector_named

FIGURES = {"worker", "step", "ring_worker", "worker_max", "step_max", "masks"}
TIMES = {"flat_ring_ms", "hierarchical_ring_ms", "gathered_ms"}


def _run(tmp_path: Path, *arguments: str) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    path = tmp_path / "results.json"
    assert ring_balance.main(["--quick", "--json", str(path), *arguments]) == 0
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = json.loads(path.read_text("utf-8"))
    return found


def test_generated_masks(tmp_path: Path) -> None:
    generated = _run(tmp_path)["generated"]
    for layouts in generated.values():
        assert set(layouts) == {"contiguous", "zigzag", "striped"}
        for figures in layouts.values():
            assert set(figures) == FIGURES | TIMES
            assert 1.0 <= figures["worker"] <= figures["step"] + 1e-9
    columns = generated["diagonals, columns as whole blocks"]["striped"]
    gathered = generated["diagonals, single columns gathered"]["striped"]
    assert gathered["step"] < 1.1 < columns["step"]


def test_masks_of_runs(tmp_path: Path) -> None:
    folder = tmp_path / "text_arm_0"
    folder.mkdir()
    blocks_NN = np.tril(np.ones((32, 32)))
    columns_NN = np.zeros((32, 32))
    columns_NN[1:, 0] = 4.0
    np.savez(folder / "work_stdlib_0.npz", blocks0=blocks_NN, columns0=columns_NN)
    trained = _run(tmp_path, "--runs", str(tmp_path))["trained"]
    assert set(trained) == {
        f"text_arm_0{what}, {ranks} ranks"
        for what in ("", ", columns gathered")
        for ranks in (4, 8)
    }
    within, apart = (trained[f"text_arm_0{what}, 4 ranks"] for what in ("", ", columns gathered"))
    assert apart["striped"]["step"] < within["striped"]["step"]


def test_no_such_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ring_balance.main(["--runs", str(tmp_path / "absent")])
    assert "must be a directory that quality.py --directory left" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["token-query-head", "previous-block", "vertical-slash"])
def test_pairs_of_a_selection(name: str) -> None:
    """Against the keys to which masked attention gives weight: every value is a unit vector."""
    cu_seqlens, block = [0, 90, 150], 8
    layout = packed_layout(cu_seqlens, block, "cpu")
    generator = torch.Generator().manual_seed(3)
    q_THD, k_TGD = (torch.randn(150, heads, 8, generator=generator) for heads in (4, 2))
    selector = selector_named(name)
    ranking = rank_row(
        selector, q_THD, k_TGD, layout, softmax_scale=0.3, max_budget=5, observe=False
    )
    selection = selector.select(ranking, torch.tensor([5, 3]))
    weight_THT, _ = masked_attention(
        q_THD, k_TGD, torch.eye(150)[:, None].repeat(1, 2, 1), selection, softmax_scale=0.3
    )
    read_TT = (weight_THT > 0).double().mean(1)
    of_block_Tn = torch.nn.functional.one_hot(layout.block_T).double()
    expected_nn = of_block_Tn.T @ read_TT @ of_block_Tn
    pairs_nN, columns_nn = block_pairs(selection), column_pairs(selection)
    found_nn = columns_nn.clone()
    for document in range(2):
        mine = layout.document_N == document
        first, blocks = int(layout.first_block_S[document]), int(mine.sum())
        found_nn[mine, first : first + blocks] += pairs_nN[mine, :blocks]
    torch.testing.assert_close(found_nn, expected_nn)
    assert bool(columns_nn.any()) == (name == "vertical-slash")
