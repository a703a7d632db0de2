# SPDX-License-Identifier: Apache-2.0
"""What the router's ranking kernel takes of a Hopper GPU, read from its machine code. Needs no GPU.

    python benchmarks/router_resources.py --json results.json

Per blocks of a document and places of a list, with the mass of every place (as in training) and
with the list alone: registers and spilled bytes of a thread, shared memory, instructions of a
program, and those that exchange values between lanes or wait for other warps. Counts rank versions
before a GPU is at hand; they are no times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from kernel_resources import instructions, machine_code
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsebalance_megatron.attention.select import row_ranking_kernel

_TYPES = {
    "queries": "*bf16",
    "keys": "*bf16",
    "lists": "*i16",
    "scores": "*fp32",
    "mass": "*fp64",
    "starts": "*i64",
    "lengths": "*i64",
    "own_blocks": "*i64",
    "document_firsts": "*i64",
    "softmax_scale": "fp32",
}


@dataclass(frozen=True, kw_only=True)
class RankingResources:
    """Resources of one program: ``rows`` rows of ``columns`` keys, of which ``taken`` are
    sorted."""

    rows: int
    columns: int
    taken: int
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: int
    shuffles: int
    barriers: int


def resources(blocks: int, places: int, *, observe: bool) -> RankingResources:
    """Compile the kernel for sm_90a as it is launched, and read its machine code."""
    kernel = row_ranking_kernel._rank_kernel
    shape = row_ranking_kernel.launch_shape(blocks, places, observe=observe)
    warps = shape.pop("num_warps")
    constants = shape | {
        "BY_TOKEN": True,
        "HEADS": 32,
        "KV_HEADS": 8,
        "GROUP": 1,
        "HEAD_DIM": 128,
        "BLOCK_D": 128,
        "OBSERVE": observe,
        "HALF_PRODUCTS": True,
        "SCORE_ROWS": 64,
        "SCORE_COLUMNS": min(64, shape["COLUMNS"]),
    }
    if not observe:
        constants["mass"] = None
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else _TYPES.get(name, "i32") for name in names
    }
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if signature[name].startswith("*") or "_stride_" in name
        },
    )
    options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, spilled_bytes, code = machine_code(compiled)
    found = instructions(code)
    return RankingResources(
        rows=shape["TILE_ROWS"],
        columns=shape["COLUMNS"],
        taken=shape["TAKEN"],
        warps=warps,
        registers=registers,
        spilled_bytes=spilled_bytes,
        shared_bytes=compiled.metadata.shared,
        instructions=len(found),
        shuffles=sum(line.startswith("SHFL") for line in found),
        barriers=sum(line.startswith("BAR") for line in found),
    )


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    rows: list[dict[str, Any]] = []
    for blocks, places, observe in itertools.product(options.blocks, options.places, (True, False)):
        if observe and places != options.places[0]:
            continue  # All places are sorted, whatever the list takes.
        found = resources(blocks, places, observe=observe)
        listed = {"blocks": blocks, "places": places, "observe": observe}
        rows.append(listed | asdict(found))
        what = "all places and mass" if observe else f"{places:>4} places"
        print(
            f"{blocks:>5} blocks, {what:<19}: {found.rows} x {found.columns} keys, "
            f"{found.warps} warps, {found.registers} registers, {found.spilled_bytes} bytes "
            f"spilled, {found.shared_bytes} bytes shared, {found.instructions} instructions, "
            f"{found.shuffles} shuffles, {found.barriers} barriers",
            flush=True,
        )
    if options.json is not None:
        results = {"triton": triton.__version__, "target": "sm_90a", "ranking": rows}
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write too")
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 128, 512, 1024])
    parser.add_argument("--places", type=int, nargs="+", default=[16, 64])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
