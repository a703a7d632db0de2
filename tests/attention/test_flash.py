# SPDX-License-Identifier: Apache-2.0
"""Attention composed of torch's flash operations, which a stand-in computes on the CPU."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import flash_on_cpu as stand_in
import pytest
import torch
from attention.cases import SCALE, Case, assert_exact, every_other_place, make_case, with_lists
from torch import Tensor

from sparsebalance_megatron.attention.api import block_sparse_attention, dense_attention
from sparsebalance_megatron.attention.kernels import dense, flash, varlen
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.self_check import CheckedCase, check_case

GRANULARITIES = ["previous-block", "token-kv-head", "token-query-head"]


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with stand_in.flash_on_cpu():
        yield


def _random_case(seed: int) -> Case:
    draw = random.Random(seed)
    kv_heads, block = draw.choice((1, 2, 3)), draw.choice((1, 4, 16))
    lengths = [
        draw.choice((1, draw.randrange(1, 7 * block + 1))) for _ in range(draw.randint(1, 4))
    ]
    head_dim = draw.choice((8, 12, 16))
    case = make_case(
        [0, *accumulate(lengths)],
        [draw.randint(1, 8) for _ in lengths],
        block=block,
        head_dim=head_dim,
        value_dim=draw.choice((head_dim, 5, 24)),
        granularity=draw.choice(GRANULARITIES),
        heads=kv_heads * draw.choice((1, 2, 4)),
        kv_heads=kv_heads,
    )
    if draw.random() < 0.3:
        part = draw.choice(every_other_place(case.selection))
        case = with_lists(case, part.indices_QCK, part.counts_QC)
    return case


@pytest.mark.parametrize("some", range(10))
def test_random_ragged_cases_are_exact(some: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where lists lack own blocks, in many rounds, and with many segments of a block."""
    for seed in range(30 * some, 30 * (some + 1)):
        draw = random.Random(-seed)
        monkeypatch.setattr(flash, "_ROWS_AT_ONCE", draw.choice((1, 50, 1000, 10000)))
        monkeypatch.setattr(flash, "_ENTRIES_AT_ONCE", draw.choice((1, 300, 1 << 20)))
        monkeypatch.setattr(flash, "_SEGMENT_ROWS", draw.choice((1, 7, 64)))
        case = _random_case(seed)
        ours, exact = (case.ours(name, torch.float64) for name in ("flash", "reference"))
        assert_exact(ours, exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("selection", GRANULARITIES)
@pytest.mark.parametrize("value_dim", [32, 24])
def test_it_passes_the_self_check(selection: str, dtype: str, value_dim: int) -> None:
    verdict = check_case(_checked(selection, dtype, value_dim), torch.device("cpu"))
    assert verdict.kernel == "flash"
    assert verdict.problems() == []


def _checked(selection: str, dtype: str = "bfloat16", value_dim: int = 32) -> CheckedCase:
    return CheckedCase(
        selection=selection,
        implementation="flash",
        router="torch",
        query_heads=8,
        kv_heads=2,
        head_dim=32,
        value_dim=value_dim,
        block_size=32,
        dtype=dtype,
    )


MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "a scale": ("forward", lambda right, *a, scale, **k: right(*a, scale=1.05 * scale, **k)),
    "a mask": ("forward", lambda right, *a, is_causal, **k: right(*a, is_causal=False, **k)),
    "the last segment": (
        "forward",
        lambda right, *a, cum_seq_q, **k: right(*a, cum_seq_q=_without_last(cum_seq_q), **k),
    ),
    "the last segment's gradients": (
        "backward",
        lambda right, *a, cum_seq_q, **k: right(*a, cum_seq_q=_without_last(cum_seq_q), **k),
    ),
    "outputs behind gradients": (
        "backward",
        lambda right, *a, out, **k: right(*a, out=torch.zeros_like(out), **k),
    ),
}


def _without_last(bounds_A1: Tensor) -> Tensor:
    return bounds_A1.clamp(max=int(bounds_A1.unique()[-2]))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_self_check_finds_a_wrong_kernel(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = MUTANTS[mutant]
    operation = getattr(torch.ops.aten, f"_flash_attention_{name}")

    class Mutated:
        def __getattr__(self, found: str) -> Any:
            if found == f"_flash_attention_{name}":
                return lambda *a, **k: wrong(operation, *a, **k)
            return getattr(torch.ops.aten, found)

    aten = Mutated()
    monkeypatch.setattr(varlen, "_aten", lambda: aten)
    assert check_case(_checked("token-query-head"), torch.device("cpu")).problems()


def test_sinks_and_reads_of_nothing() -> None:
    case = make_case([0, 40, 70], [3, 2], block=8, head_dim=8, granularity="token-kv-head")
    counts_QC = case.selection.counts_QC.clone()
    counts_QC[5:9] = 0
    case = with_lists(case, case.selection.indices_QCK, counts_QC)
    sinks = [torch.randn(4, dtype=torch.float64).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        sinks[1].copy_(sinks[0])
    results = [
        case.run(
            lambda q, k, v, name=name, sink=sink: block_sparse_attention(
                q, k, v, case.selection, softmax_scale=SCALE, implementation=name, sink_H=sink
            ),
            torch.float64,
        )
        for name, sink in zip(("flash", "reference"), sinks, strict=True)
    ]
    assert_exact(*results)
    torch.testing.assert_close(sinks[0].grad, sinks[1].grad, atol=1e-12, rtol=1e-12)
    assert not case.ours("flash", torch.float64)[0][5:9].any()


def test_a_view_that_begins_off_the_grid_is_copied() -> None:
    """Kernels read 16 bytes at a time; a slice of a fused tensor may begin anywhere."""
    case = make_case([0, 40], [3], block=8, head_dim=8, dtype=torch.bfloat16)
    expected = case.ours("flash", torch.bfloat16)

    def off_the_grid(x: Tensor) -> Tensor:
        wide = x.new_zeros(*x.shape[:2], x.shape[2] + 3)
        return wide.copy_(torch.nn.functional.pad(x, (1, 2)))[..., 1:-2]

    moved = [off_the_grid(x.bfloat16()) for x in (case.q_THD, case.k_TGD, case.v_TGF)]
    out, lse = flash.forward(*moved, case.selection, softmax_scale=SCALE)
    assert out.equal(expected[0])
    assert lse.equal(expected[1])


def test_what_it_does_not_serve_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([0, 80], [5], block=8, head_dim=8, granularity="vertical-slash")
    with pytest.raises(ValueError, match='"flash" reads blocks, and this selection has columns'):
        case.ours("flash", torch.float32)
    case = make_case([0, 40], [2], block=8, head_dim=8)
    monkeypatch.setattr(varlen, "MOST_SEGMENTS", 4 + (1 << 10))
    with pytest.raises(ValueError, match="serves 4 blocks, not 5: use larger blocks"):
        case.ours("flash", torch.float32)


def test_installed_torch_has_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are given by name; another torch is refused with what it lacks, and the remedy."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    missing = varlen.missing_in_torch.__wrapped__
    assert missing() is None
    given = varlen._ARGUMENTS["_flash_attention_backward"] | {"window"}
    monkeypatch.setitem(varlen._ARGUMENTS, "_flash_attention_backward", given)
    assert "aten::_flash_attention_backward to take window" in missing()
    assert "install torch 2.8 to 2.14" in missing()
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert "needs a torch built with FlashAttention" in missing()


@pytest.mark.gpu
@pytest.mark.parametrize("value_dim", [128, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gpu_passes_the_self_check(dtype: str, value_dim: int) -> None:
    for selection in GRANULARITIES:
        case = dataclasses.replace(_checked(selection, dtype), head_dim=128, value_dim=value_dim)
        assert check_case(case, torch.device("cuda")).problems() == []


@pytest.mark.gpu
def test_documents_on_the_gpu_are_those_of_the_cpu() -> None:
    case = make_case([0, 300, 301, 1000], [99] * 3, block=128, head_dim=64, dtype=torch.bfloat16)
    layouts = [packed_layout([0, 300, 301, 1000], 128, device) for device in ("cuda", "cpu")]
    ours, expected = (
        case.run(
            lambda q, k, v, layout=layout: dense_attention(q, k, v, layout, softmax_scale=SCALE),
            torch.bfloat16,
            str(layout.block_T.device),
        )
        for layout in layouts
    )
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2 * float(b.abs().max()), rtol=2e-2)


def test_documents_by_torchs_kernels_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([0, 30, 31, 100], [99] * 3, block=16, head_dim=8, value_dim=12)
    layout = case.selection.query_layout

    def attend() -> tuple[Tensor, ...]:
        return case.run(
            lambda q, k, v: dense_attention(q, k, v, layout, softmax_scale=SCALE), torch.float64
        )

    expected = attend()
    monkeypatch.setattr(dense, "host_may_read", lambda _: False)
    assert_exact(attend(), expected)
    assert_exact(expected, case.ours("reference", torch.float64))


def test_every_query_reads_one_block_and_no_launch_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in refuses a segment that is longer than its maximum says."""
    monkeypatch.setattr(flash, "_SEGMENT_ROWS", 64)
    case = make_case([0, 400], [2], block=8, head_dim=8, granularity="token-query-head")
    lists_QCK = case.selection.indices_QCK.clone()
    lists_QCK[8:, :, 1] = 0
    case = with_lists(case, lists_QCK, case.selection.counts_QC)
    assert_exact(case.ours("flash", torch.float64), case.ours("reference", torch.float64))
