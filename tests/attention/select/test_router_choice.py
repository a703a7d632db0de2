# SPDX-License-Identifier: Apache-2.0
"""Who computes the router, and how a user goes back to torch.

A device of type "cuda" is a name: none of these tests needs one.
"""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch

from sparsebalance_megatron.attention.layout import LayoutPair, packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.attention.select.block_topk import BlockTopK
from sparsebalance_megatron.attention.select.summaries import (
    MOST_BLOCKS,
    means_in_triton,
    ranks_in_triton,
)
from sparsebalance_megatron.config import ConfigError, Router
from sparsebalance_megatron.selector_registry import BUILT_IN

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None
ON_CUDA = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def _rows(blocks: int) -> LayoutPair:
    return LayoutPair.within(packed_layout([0, blocks, blocks + 1], 1, "cpu"))


@ON_CUDA
def test_auto_takes_the_kernels_on_cuda_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert means_in_triton("auto", CUDA)
        assert ranks_in_triton("auto", CUDA, _rows(MOST_BLOCKS), softmax_scale=0.1)
        assert not ranks_in_triton("torch", CUDA, _rows(MOST_BLOCKS), softmax_scale=0.1)
        assert not ranks_in_triton("auto", CPU, _rows(MOST_BLOCKS + 1), softmax_scale=-1.0)


@ON_CUDA
@pytest.mark.parametrize(
    ("blocks", "scale", "what"),
    [(MOST_BLOCKS + 1, 0.1, "up to 1024 blocks, not 1025"), (3, 0.0, "positive softmax scale")],
)
def test_what_the_kernels_do_not_serve_is_said(blocks: int, scale: float, what: str) -> None:
    with pytest.warns(UserWarning, match=f'"auto" takes "torch" on CUDA: .*{what}'):
        assert not ranks_in_triton("auto", CUDA, _rows(blocks), softmax_scale=scale)
    with pytest.raises(ValueError, match=f'router "triton" .*{what}.*use "torch" or "auto"'):
        ranks_in_triton("triton", CUDA, _rows(blocks), softmax_scale=scale)


def test_without_triton_cuda_ranks_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="package triton, which is not installed"):
        assert not means_in_triton("auto", CUDA)
    with pytest.raises(ValueError, match="not installed"):
        means_in_triton("triton", CPU)


@ON_CUDA
@pytest.mark.parametrize("selection", ["token-query-head", "previous-block"])
def test_an_explicit_choice_never_falls_back(selection: str) -> None:
    layout = packed_layout([0, 9], 4, "cpu")
    q_THD = torch.ones(9, 2, 4)
    with pytest.raises(ValueError, match=r'router "triton" needs CUDA, and the keys lie on cpu'):
        rank_sequence(
            selector_named(selection, "triton"),
            *(q_THD, q_THD, layout),
            softmax_scale=1.0,
            max_budget=1,
            observe=False,
        )


@pytest.mark.parametrize("router", ["triton", "torch"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_selectors_are_told_who_computes(name: str, router: Router) -> None:
    assert selector_named(name) is selector_named(name, "auto") is selector_named(name)
    if isinstance(selector_named(name), BlockTopK):
        found = selector_named(name, router)
        assert found.router == router and found.with_router("auto") == selector_named(name)
        return
    with pytest.raises(
        ConfigError, match=f"--sparse-balance-config router {router}: selection {name}"
    ):
        selector_named(name, router)
