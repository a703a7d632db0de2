# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4 behind dense documents: where it serves, and what is asked of it.

Its functions are emulated, in float64.
"""

import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention.cases import SCALE, Case, assert_exact, inputs_of, make_case, saved
from harness import PROGRAMS, python_environment
from oracles import flash_attention_4

from sparsebalance_megatron import flash_attention
from sparsebalance_megatron.attention.api import attends_densely, dense_attention, dense_kernel
from sparsebalance_megatron.attention.kernels import dense, fa4, fa4_lists, reference
from sparsebalance_megatron.attention.kernels.contract import merge_partials
from sparsebalance_megatron.attention.layout import LayoutPair, PackedLayout, packed_layout
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.sequence.slice import SequenceGroup, SequenceSlice
from sparsebalance_megatron.flash_attention import head_obstacle
from sparsebalance_megatron.supported import installed_version


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "interface", lambda: flash_attention_4)
    monkeypatch.setattr(fa4, "obstacle", lambda *_: None)


def _dense(case: Case, kernel: Any = "auto") -> tuple[torch.Tensor, ...]:
    layout = case.selection.query_layout
    return case.run(
        lambda q, k, v: dense_attention(q, k, v, layout, softmax_scale=SCALE, kernel=kernel),
        torch.float64,
    )


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("seed", range(20))
def test_documents_and_rectangles_are_those_of_the_cpu(seed: int) -> None:
    """With keys of the same tokens, or of others that all are read; the backward pass takes an
    output and an LSE from outside."""
    drawn = random.Random(seed)
    queries, keys = (
        packed_layout([0, *accumulate(drawn.choices(range(1, 90), k=1 + seed % 5))], 16, "cpu")
        for _ in range(2)
    )
    keys = keys if seed % 2 else queries
    lists = Selection.of_documents(queries, keys if seed % 2 else None)
    kv_heads, group = drawn.randint(1, 3), drawn.randint(1, 3)
    generator = torch.Generator().manual_seed(seed)

    def randn(layout: PackedLayout, heads: int, *size: int) -> torch.Tensor:
        shape = layout.tokens, heads, *size
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, dout, out = (randn(queries, kv_heads * group, 8) for _ in range(3))
    k, v = (randn(keys, kv_heads, 8) for _ in range(2))
    lse = 5.0 + randn(queries, kv_heads * group)
    of_parts = saved(q, k, v, out, lse, lists)
    ours, expected = (
        (*each.forward(inputs_of(q, k, v, lists)), *each.backward(dout, of_parts))
        for each in (fa4, dense)
    )
    assert_exact(ours, expected)


@pytest.mark.usefixtures("emulated")
def test_deterministic_algorithms_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    right = flash_attention_4._flash_attn_bwd
    monkeypatch.setattr(
        flash_attention_4,
        "_flash_attn_bwd",
        lambda *tensors, **named: given.append(named["deterministic"]) or right(*tensors, **named),
    )
    case = make_case([0, 20], [9], block=16, head_dim=8)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            _dense(case)
    finally:
        torch.use_deterministic_algorithms(before)
    assert given == [False, True]


def test_torchs_kernel_where_it_is_named_or_nothing_else_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case([0, 40], [9], block=8, head_dim=8)
    asked = case.q_THD, case.v_TGF, case.selection.query_layout
    assert dense_kernel(*asked, "auto") == ("torch", None)
    with pytest.raises(ValueError, match='kernel "fa4", needs CUDA, and q lies on cpu'):
        _dense(case, "fa4")
    assert attends_densely(*asked, "auto", "fa4"), "never replaced by lists in silence"
    monkeypatch.setattr(fa4, "obstacle", lambda *_: None)
    assert dense_kernel(*asked, "auto") == ("fa4", None)
    assert dense_kernel(*asked, "torch") == ("torch", None)


@pytest.mark.parametrize(
    ("capability", "heads", "dims", "problem"),
    [
        ((9, 0), (16, 2), (128, 128), None),
        ((10, 3), (16, 2), (256, 256), None),
        ((9, 0), (16, 16), (192, 128), None),
        ((9, 0), (16, 2), (192, 128), "not 192 with 128"),
        ((9, 0), (4, 4), (64, 128), "not 64 with 128"),
        ((9, 0), (4, 4), (20, 20), "multiple of 8"),
        ((10, 0), (16, 2), (160, 160), "up to 128, or 256"),
        ((8, 0), (16, 2), (128, 128), "9.x or 10.x, not 8.0"),
        ((12, 0), (16, 2), (128, 128), "9.x or 10.x, not 12.0"),
    ],
)
def test_heads_that_devices_serve(
    capability: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int], problem: str | None
) -> None:
    found = head_obstacle(capability, heads, dims)
    assert found is None if problem is None else problem in str(found)


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The versions that are installed, by distribution."""
    installed: dict[str, str] = {}
    monkeypatch.setattr(flash_attention, "installed_version", installed.get)
    flash_attention.not_installed.cache_clear()
    fa4.missing.cache_clear()
    yield installed
    flash_attention.not_installed.cache_clear()
    fa4.missing.cache_clear()


def test_what_is_missing_is_named(
    versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    q = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 4, 64))
    imported: list[None] = []
    whole = SimpleNamespace(**vars(flash_attention_4))
    monkeypatch.setattr(fa4, "interface", lambda: imported.append(None) or whole)

    def obstacle() -> str:
        flash_attention.not_installed.cache_clear()
        fa4.missing.cache_clear()
        return str(fa4.obstacle(q, q, None))  # type: ignore[arg-type]

    assert "pip install 'sparsebalance-megatron[fa4]'" in obstacle()
    versions["flash-attn-4"] = "4.0.0b20"
    assert "4.0.0b30 or newer, found 4.0.0b20" in obstacle()
    versions["flash-attn-4"] = "4.0.0b36"
    wide = SimpleNamespace(**vars(q) | {"dtype": torch.float32})
    assert "not in torch.float32" in str(fa4.obstacle(wide, q, None))  # type: ignore[arg-type]
    assert not imported, "nothing is imported before the rest is known to serve"
    lacking = "causal, cu_seqlens_k, cu_seqlens_q, max_seqlen_k, max_seqlen_q: install another"
    assert f"needs _flash_attn_fwd to take {lacking}" in obstacle()
    monkeypatch.setattr(fa4, "interface", lambda: SimpleNamespace())
    assert "needs _flash_attn_fwd to take" in obstacle()
    monkeypatch.setattr(fa4, "interface", lambda: 1 / 0)
    assert "cannot import flash-attn-4 (ZeroDivisionError" in obstacle()


def _random_lists(drawn: random.Random, layouts: LayoutPair, kv_heads: int) -> Selection:
    """Some without the own block, some empty; any number past the end of a list."""
    most, keys = drawn.randint(1, 6), layouts.kv_layout.grid
    lists, counts = [], []
    for own in layouts.own_blocks:
        past = range(int(keys.first_block_S[keys.document_N[own]]), own)
        for _ in range(kv_heads):
            listed = [own] * drawn.randint(0, 1)
            listed += drawn.sample(past, min(len(past), drawn.randint(0, most - len(listed))))
            counts.append(len(listed))
            lists.append(listed + drawn.choices(range(-50, 999), k=most - len(listed)))
    shape = len(layouts.own_blocks), kv_heads
    return Selection(
        indices_QCK=torch.tensor(lists, dtype=torch.int32).view(*shape, most),
        counts_QC=torch.tensor(counts, dtype=torch.int32).view(shape),
        by_token=False,
        query_layout=layouts.query_layout,
        kv_layout=layouts.kv_layout,
        own_block_N=layouts.own_block_N,
    )


@pytest.mark.parametrize("seed", range(16))
def test_random_lists_are_those_of_the_reference(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists are of whole sequences and of slices; statistics of other parts are merged in."""
    drawn, tile = random.Random(seed), 4 << seed % 2
    flash_attention_4.emulate(monkeypatch, tile=tile)
    block = tile * drawn.choice([1, 2, 4])
    lengths = drawn.choices(range(1, 5 * block), k=drawn.randint(1, 4))
    if seed % 4 == 0:
        lengths = [-(-length // tile) * tile for length in lengths]
    cu_seqlens = [0, *accumulate(lengths)]
    layouts = LayoutPair.within(packed_layout(cu_seqlens, block, "cpu"))
    if layouts.kv_layout.blocks > 2 and seed % 3:
        group = SequenceGroup(member=seed % 2, members=2)
        layouts = SequenceSlice.dealt(cu_seqlens, group, block_size=block).layouts
    kv_heads, group_size = drawn.randint(1, 3), drawn.randint(1, 3)
    lists = _random_lists(drawn, layouts, kv_heads)
    generator = torch.Generator().manual_seed(seed)

    def randn(layout: PackedLayout, heads: int, *size: int) -> torch.Tensor:
        shape = layout.tokens, heads, *size
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, dout, other = (randn(layouts.query_layout, kv_heads * group_size, 8) for _ in range(3))
    k, v = (randn(layouts.kv_layout, kv_heads, 8) for _ in range(2))
    forwards = [x.forward(inputs_of(q, k, v, lists)) for x in (fa4_lists, reference)]
    merged = merge_partials(*forwards[1], other, other[..., 0])
    of_parts = saved(q, k, v, *merged, lists)
    backwards = [x.backward(dout, of_parts) for x in (fa4_lists, reference)]
    assert_exact(*((*a, *b) for a, b in zip(forwards, backwards, strict=True)))


def test_lists_that_are_not_served_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "obstacle", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        for problem, how in {
            "a block of queries shares": {"block": 128, "kind": "token-kv-head"},
            "a multiple of 128 tokens here, not 64": {"block": 64},
            "head dims up to 128 with lists, not 256": {"block": 128, "head_dim": 256},
            "None": {"block": 128},
        }.items():
            case = make_case([0, 130], [2], **{"head_dim": 8} | how)
            found = str(fa4_lists.obstacle(case.q_THD, case.v_TGF, case.selection))
            assert problem in found and (problem == "None" or found.endswith('use "triton"'))
        torch.use_deterministic_algorithms(True)
        found = str(fa4_lists.obstacle(case.q_THD, case.v_TGF, case.selection))
        assert "repeats no bits" in found
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.nightly
@pytest.mark.parametrize(("arch", "multiprocessors"), [("sm_90", 132), ("sm_100", 148)])
def test_kernels_compile_without_a_gpu(arch: str, multiprocessors: int) -> None:
    if installed_version("flash-attn-4") is None:
        pytest.skip("the extra fa4 is not installed")
    named = {"FLASH_ATTENTION_ARCH": arch, "CUTE_DSL_ARCH": f"{arch}a"}
    named["FLASH_ATTENTION_NUM_SMS"] = str(multiprocessors)
    # Not forked from where the compiler was imported for another GPU.
    command = [sys.executable, str(PROGRAMS / "compile_flash_attention_4.py")]
    environment = python_environment() | named
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "compiled 8" in done.stdout
