# SPDX-License-Identifier: Apache-2.0
"""The kernels compile for Hopper on any machine, and their machine code is what was meant."""

import os
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted", allow_module_level=True)

import kernel_resources as resources  # noqa: E402

from sparsebalance_megatron.attention.kernels.triton.tiles import (  # noqa: E402
    AMPERE,
    BLACKWELL,
    HOPPER,
    SHARED_BYTES,
    Capability,
)

TENSOR_MEMORY_COLUMNS = 512
"""Columns of a Blackwell GPU (PTX ISA, "Tensor Memory")."""
COPIES_IN_FLIGHT = 2
BY_TOKEN = [name for name in resources.KERNELS if name.startswith(resources.BY_TOKEN)]
WITH_COLUMNS = [name for name in resources.KERNELS if name.startswith(resources.WITH_COLUMNS)]
QUERY_BLOCK = [name for name in resources.KERNELS if name not in BY_TOKEN + WITH_COLUMNS]


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", os.fspath(tmp_path))


@pytest.fixture
def no_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as far as LLVM: what shared memory a kernel takes is known by then.

    What follows takes half of the time. A Triton without this hook compiles to the end.
    """

    def leave_out(backend: Any = None, stages: dict[str, Any] | None = None, *_: Any) -> Any:
        if stages is None:
            return "no machine code", ""
        stages["ptx"] = lambda _, metadata: metadata.setdefault("name", "")
        stages["cubin"] = lambda *_: b""

    monkeypatch.setattr(
        triton.knobs.runtime, "add_stages_inspection_hook", leave_out, raising=False
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "element", "block_size", "head_dim", "spills"),
    [
        *((name, "bf16", 256, 128, 0.06) for name in QUERY_BLOCK + BY_TOKEN),
        *((name, "bf16", 256, 128, 0.01) for name in WITH_COLUMNS),
        *((name, "fp16", 64, 96, 0.06) for name in QUERY_BLOCK),
        *((name, "bf16", 128, 256, 0.06) for name in QUERY_BLOCK),
    ],
)
def test_kernels_fit_hopper_copy_ahead_and_hardly_spill(
    name: str, element: str, block_size: int, head_dim: int, spills: float
) -> None:
    tile = resources.tile_of(name, head_dim)
    how = {"element": element, "block_size": block_size, "head_dim": head_dim}
    found = resources.resources(name, tile, **how)
    assert found.shared_bytes <= SHARED_BYTES[HOPPER]
    assert found.loop_kinds["products"] > 0
    # Of the next tile, copies of both matrices are under way while this one is worked on.
    assert found.loop_groups_in_flight >= COPIES_IN_FLIGHT
    assert found.loop_kinds.get("spills", 0) <= spills * found.loop_instructions


@pytest.mark.nightly
@pytest.mark.usefixtures("no_machine_code")
@pytest.mark.parametrize(
    ("name", "element", "block_size", "head_dims", "capability"),
    [
        *((name, "bf16", 256, (256, 256), HOPPER) for name in BY_TOKEN),
        *((name, "bf16", 256, (128, 128), AMPERE) for name in (*QUERY_BLOCK, *BY_TOKEN)),
        *((name, "bf16", 256, (128, 128), BLACKWELL) for name in (*QUERY_BLOCK, *BY_TOKEN)),
        *((name, "fp32", 128, (128, 128), HOPPER) for name in resources.KERNELS),
        *((name, "bf16", 128, (192, 128), HOPPER) for name in resources.KERNELS),
        *((name, "bf16", 128, (192, 128), AMPERE) for name in (*QUERY_BLOCK, *BY_TOKEN)),
        *((name, "bf16", 128, (192, 128), BLACKWELL) for name in (*QUERY_BLOCK, *BY_TOKEN)),
        *(
            (name, element, 256, head_dims, capability)
            for name in resources.KERNELS
            for element, head_dims, capability in (
                *(("bf16", (128, 128), capability) for capability in ((8, 9), (12, 0))),
                *((element, (256, 256), (8, 9)) for element in ("bf16", "fp32")),
                *(("bf16", head_dims, (12, 0)) for head_dims in ((64, 64), (192, 128))),
            )
        ),
    ],
)
def test_kernels_fit_other_sizes_and_gpus(
    name: str, element: str, block_size: int, head_dims: tuple[int, int], capability: Capability
) -> None:
    head_dim, value_dim = head_dims
    element_bytes = 4 if element == "fp32" else 2
    kernel = resources.compiled(
        name,
        resources.tile_of(name, head_dim, element_bytes, capability=capability),
        element=element,
        block_size=block_size,
        head_dim=head_dim,
        value_dim=value_dim,
        capability=capability,
    )
    assert 0 < kernel.metadata.shared <= SHARED_BYTES[capability]
    assert (getattr(kernel.metadata, "tmem_size", None) or 0) <= TENSOR_MEMORY_COLUMNS
