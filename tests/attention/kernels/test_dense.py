# SPDX-License-Identifier: Apache-2.0
"""Dense attention within documents, as it is computed on the CPU and on CUDA."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from attention.cases import SCALE, assert_exact, inputs_of, make_case, saved
from attention.sequence.slices import slices_of
from oracles import flash_attention_4
from torch import Tensor

from sparsebalance_megatron.attention.api import dense_attention
from sparsebalance_megatron.attention.kernels import dense
from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.sequence.pieces import DensePieces


def _forward(
    *, query: Tensor, key: Tensor, value: Tensor, return_debug_mask: bool, **given: Any
) -> tuple[Tensor, ...]:
    """``aten::_flash_attention_forward``."""
    assert all(map(flash_attention_4.is_aligned, (query, key, value)))
    wide = [x.double() for x in (query, key, value)]
    out, lse_HT, *_ = flash_attention_4._flash_attn_fwd(*wide, return_lse=True, **_given(given))
    nothing = torch.empty(0)
    seed = torch.empty(2, dtype=torch.uint64)
    return out.to(query.dtype), lse_HT.to(query.dtype), seed, nothing, nothing


def _backward(
    *,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    rng_state: Tensor,
    unused: Tensor,
    **given: Any,
) -> tuple[Tensor, ...]:
    """``aten::_flash_attention_backward``."""
    assert all(map(flash_attention_4.is_aligned, (query, key, value, out, grad_out)))
    assert logsumexp.is_contiguous()
    wide = [x.double() for x in (query, key, value, out, grad_out, logsumexp)]
    gradients = flash_attention_4._flash_attn_bwd(*wide, deterministic=True, **_given(given))
    return tuple(x.to(query.dtype) for x in gradients)


def _given(given: dict[str, Any]) -> dict[str, Any]:
    """What FlashAttention-4 is given."""
    assert given["dropout_p"] == 0.0
    return {
        "softmax_scale": given["scale"],
        "causal": given["is_causal"],
        **{f"cu_seqlens_{of}": given[f"cum_seq_{of}"] for of in "qk"},
        **{f"max_seqlen_{of}": given[f"max_{of}"] for of in "qk"},
    }


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU takes the way of CUDA, in any dtype: stand-ins for torch's operations are dense, in
    float64 inside, and refuse what the kernels on CUDA do not take."""
    with torch.library._scoped_library("aten", "IMPL") as operations:
        for name, function in (("forward", _forward), ("backward", _backward)):
            operations.impl(f"_flash_attention_{name}", _by_name(name, function), "CPU")
        monkeypatch.setattr(dense, "obstacle", lambda *_: None)
        monkeypatch.setattr(dense, "takes_flash", lambda _: False)
        yield


def _by_name(name: str, function: Any) -> Any:
    """An operation gives arguments by place; the function takes them by name."""
    operation = getattr(torch.ops.aten, f"_flash_attention_{name}").default
    names = [argument.name for argument in operation._schema.arguments]
    return lambda *given, **rest: function(**dict(zip(names, given, strict=False)), **rest)


def _attended(layout: PackedLayout, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return dense_attention(q, k, v, layout, softmax_scale=SCALE)


@pytest.mark.parametrize("as_on", ["CPU", "CUDA"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (8, 12), (20, 5)])
def test_documents_by_torchs_kernels_are_those_of_the_reference(
    head_dim: int, value_dim: int, as_on: str, request: pytest.FixtureRequest
) -> None:
    if as_on == "CUDA":
        request.getfixturevalue("stand_ins")
    case = make_case([0, 30, 31, 100], [99] * 3, block=16, head_dim=head_dim, value_dim=value_dim)
    layout = case.selection.query_layout
    ours = case.run(lambda q, k, v: _attended(layout, q, k, v), torch.float64)
    assert_exact(ours, case.ours("reference", torch.float64))


def test_pieces_of_a_slice_are_alike_on_cuda(request: pytest.FixtureRequest) -> None:
    case = make_case([0, 60, 90], [9, 9], block=10, head_dim=8, value_dim=12)
    held = slices_of((0, 60, 90), np.array([0, 1, 1, 0, 0, 1, 1, 1, 0]), 2, block=10)[0]
    pieces = DensePieces(sequence=held, documents=2, dense=dense)
    lists = Selection.of_documents(held.local_layout, held.whole_layout)
    q, k, v, dout = (x.double() for x in (case.q_THD, case.k_TGD, case.v_TGF, case.dout_THF))
    q, dout = q[held.tokens_T], dout[held.tokens_T]
    found = []
    for fixture in (None, "stand_ins"):
        if fixture:
            request.getfixturevalue(fixture)
        results = pieces.forward(inputs_of(q, k, v, lists))
        gradients = pieces.backward(dout, saved(q, k, v, *results, lists))
        found.append((*results, *gradients))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("stand_ins")
def test_a_view_that_begins_off_the_grid_is_copied() -> None:
    """Kernels read 16 bytes at a time; a slice of a fused tensor may begin anywhere."""
    case = make_case([0, 40], [9], block=8, head_dim=8)
    layout, inputs = case.selection.query_layout, (case.q_THD, case.k_TGD, case.v_TGF)
    expected = _attended(layout, *inputs)
    moved = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in inputs]
    for ours, each in zip(_attended(layout, *moved), expected, strict=True):
        assert torch.equal(ours, each)


def test_installed_torch_has_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are given by name; another torch is refused with what it lacks, and the remedy."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    missing = dense.missing_in_torch.__wrapped__
    assert missing() is None
    given = dense._ARGUMENTS["_flash_attention_backward"] | {"window"}
    monkeypatch.setitem(dense._ARGUMENTS, "_flash_attention_backward", given)
    assert "aten::_flash_attention_backward to take window" in missing()
    assert "install torch 2.8 to 2.14" in missing()
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert "needs a torch built with FlashAttention" in missing()
    monkeypatch.setattr(dense, "missing_in_torch", missing)
    monkeypatch.setattr(dense, "takes_flash", lambda _: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    case = make_case([0, 40], [9], block=8, head_dim=8, dtype=torch.bfloat16)
    assert dense.obstacle(case.q_THD, case.v_TGF, case.selection.query_layout) == missing()


@pytest.mark.gpu
def test_documents_on_the_gpu_are_those_of_the_cpu() -> None:
    case = make_case([0, 300, 301, 1000], [99] * 3, block=128, head_dim=64, dtype=torch.bfloat16)
    layouts = [packed_layout([0, 300, 301, 1000], 128, device) for device in ("cuda", "cpu")]
    ours, expected = (
        case.run(
            lambda q, k, v, layout=layout: _attended(layout, q, k, v),
            torch.bfloat16,
            str(layout.block_T.device),
        )
        for layout in layouts
    )
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2 * float(b.abs().max()), rtol=2e-2)
