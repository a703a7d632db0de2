# SPDX-License-Identifier: Apache-2.0
"""The kernels compile for Hopper, on any machine: Triton brings the compiler and the assembler."""

from __future__ import annotations

import os
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from sparsebalance_megatron.attention.impl.triton import backward, forward  # noqa: E402
from sparsebalance_megatron.attention.impl.triton.tiles import Tile, tiles_for  # noqa: E402

SHARED_BYTES = 227 * 1024
"""What one block of threads may have on an H100 or H200."""
POINTERS = {
    "int64": {"starts", "ends"},
    "int32": {"indices", "counts", "offsets", "queries", "item_list", "item_part", "item_parts"},
    "float32": {"lse", "delta", "parts"},
    "element": {"q", "k", "v", "out", "dout", "dq", "dk", "dv"},
}
TYPES = {"int64": "*i64", "int32": "*i32", "float32": "*fp32"}


def _type(name: str, element: str) -> str:
    for kind, names in POINTERS.items():
        if name in names:
            return TYPES.get(kind, f"*{element}")
    if name.isupper():
        return "constexpr"
    return "fp32" if name.endswith("_scale") else "i32"


def _compile(kernel: Any, tile: Tile, rows: int, *, element: str, block: int, head_dim: int) -> Any:
    constants = {
        "KV_HEADS": 2,
        "GROUP": 8,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block,
        "BLOCK_M": rows,
        "BLOCK_N": min(tile.columns, block),
        "PRECISION": "ieee",
    }
    names = kernel.arg_names
    signature = {name: _type(name, element) for name in names}
    divisible = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {
            (place,): divisible
            for place, name in enumerate(names)
            if signature[name].startswith("*") or "_stride_" in name
        },
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(
    ("element", "block", "head_dim"),
    [("bf16", 256, 128), ("bf16", 64, 128), ("fp16", 128, 64), ("bf16", 128, 96)],
)
def test_kernels_compile_for_hopper_and_fit(
    element: str, block: int, head_dim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", os.fspath(tmp_path))
    tiles = tiles_for(head_dim, 2)
    kernels = [
        (forward._forward_kernel, tiles.forward, forward.packed_rows(tiles.forward, 8, block)),
        (
            backward._query_gradient_kernel,
            tiles.query_gradient,
            forward.packed_rows(tiles.query_gradient, 8, block),
        ),
        (backward._key_gradient_kernel, tiles.key_gradient, min(tiles.key_gradient.rows, block)),
    ]
    for kernel, tile, rows in kernels:
        compiled = _compile(kernel, tile, rows, element=element, block=block, head_dim=head_dim)
        assert 0 < compiled.metadata.shared <= SHARED_BYTES
        # Products run on Hopper's tensor cores, and loads of later tiles under them.
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert "cp.async" in compiled.asm["ptx"]
        assert compiled.asm["cubin"]
