# SPDX-License-Identifier: Apache-2.0
"""What the attention kernels take of a Hopper GPU, read from their machine code. Needs no GPU.

    python benchmarks/kernel_resources.py --json results.json
    python benchmarks/kernel_resources.py --candidates --json results.json

Triton brings the compiler, the assembler and the disassembler for sm_90a. Per kernel: registers,
spilled bytes and shared memory; and of its hot loop, the one over past blocks, over gathered
columns or, for selections by token, over tiles of the tokens that chose a block: instructions of a
warp by kind, copies of later tiles that stay in flight, and the cycles of one turn that the tensor
cores need for its products and the schedulers to issue its instructions. Cycles rank versions
before a GPU is at hand; they are no times. ``--candidates`` takes other tile shapes than the
table's too.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsebalance_megatron.attention.kernels.triton import (
    key_block_kernel,
    query_block_kernel,
    token_kernels,
)
from sparsebalance_megatron.attention.kernels.triton.tiles import (
    HOPPER,
    SHARED_BYTES,
    Capability,
    Tile,
    tiles_for,
)

MATRIX_OPERATIONS_PER_CYCLE = 4096
"""Rate of one multiprocessor, dense bf16: the datasheet's 989 TFLOP/s over 132 of them at 1.83
GHz."""
SCHEDULERS = 4
"""Schedulers of one multiprocessor; each issues one instruction a cycle."""

KERNELS = {
    "forward": query_block_kernel._query_block_kernel,
    "query_gradient": query_block_kernel._query_block_kernel,
    "key_gradient": key_block_kernel._key_block_kernel,
    "column_forward": query_block_kernel._query_block_kernel,
    "column_query_gradient": query_block_kernel._query_block_kernel,
    "column_key_gradient": key_block_kernel._column_gradient_kernel,
    "token_forward": token_kernels._reader_kernel,
    "token_query_gradient": token_kernels._reader_kernel,
    "token_key_gradient": token_kernels._token_key_kernel,
}
PRODUCTS = {"forward": 2, "query_gradient": 3, "key_gradient": 4}
BY_TOKEN, WITH_COLUMNS = "token_", "column_"
"""What the names of kernels for selections by token, and for those with columns, begin with; the
rest is their field's name."""

_OF_GRADIENTS = ("dout", "dout_stride_T", "dout_stride_H")
_ABSENT = {
    "forward": (*_OF_GRADIENTS, "dq", "statistics"),
    "token_forward": (*_OF_GRADIENTS, "delta"),
}
"""Arguments that a kernel's other pass has."""
_POINTERS = {
    "*i64": {"own_blocks", "token_blocks", "query_starts", "query_ends", "kv_starts", "kv_ends"}
    | {"kv_firsts"},
    "*i16": {"indices"},
    "*i32": {"counts", "item_list", "item_part", "item_slot", "entries", "bounds"}
    | {"columns", "column_counts"},
    "*fp32": {"lse", "statistics", "parts", "delta", "rows", "peaks", "totals"},
    "element": {"q", "k", "v", "out", "dout", "dq", "dk", "dv"},
}
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);")
_KINDS = {
    "products": r"HGMMA",
    "exponentials": r"MUFU",
    "floating point": r"F(?!ENCE)|HADD|HMUL|HFMA",
    "copies": r"LDGSTS|UTMALDG",
    "shared memory": r"LDS|STS|LDSM|STSM",
    "spills": r"LDL|STL",
    "uniform": r"U|R2UR",
    "integer": r"IMAD|IADD|LEA|ISETP|LOP3|SHF|SEL|VIADD|PRMT|MOV|IABS|PLOP|SGXT|CS2R",
}


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of one kernel. ``loop_*``: of a warp, in one turn of the hot loop.

    ``loop_groups_in_flight``: groups of copies that the loop does not wait for at its head; 0 where
    it waits for all, hence for those it started last.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    loop_instructions: int
    loop_kinds: dict[str, int]
    loop_groups_in_flight: int
    loop_matrix_cycles: int
    loop_issue_cycles: int

    @property
    def matrix_share(self) -> float:
        """Share of the tensor cores' peak if products overlapped with no other instruction."""
        return self.loop_matrix_cycles / (self.loop_matrix_cycles + self.loop_issue_cycles)


def tile_of(
    name: str, head_dim: int, element_bytes: int = 2, capability: Capability = HOPPER
) -> Tile:
    """The table's tile shape for a kernel of ``KERNELS``."""
    tile: Tile = getattr(tiles_for(head_dim, element_bytes, capability), _pass(name))
    return tile


def compiled(
    name: str,
    tile: Tile,
    *,
    element: str,
    block_size: int,
    head_dim: int,
    value_dim: int | None = None,
    group: int = 8,
    capability: Capability = HOPPER,
) -> Any:
    """A kernel of ``KERNELS`` compiled for a GPU, with the specialisations of training rows."""
    kernel = KERNELS[name]
    rows, columns = _fitted(name, tile, block_size, group)
    constants: dict[str, Any] = {
        "KV_HEADS": 2,
        "GROUP": group,
        # Every query head has lists of its own.
        "HEADS": 1,
        "WITHIN": True,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "VALUE_DIM": value_dim or head_dim,
        "BLOCK_F": triton.next_power_of_2(value_dim or head_dim),
        "BLOCK_SIZE": block_size,
        "TILE_ROWS": rows,
        "TILE_COLUMNS": columns,
        "PRECISION": "ieee",
    }
    if not name.startswith(WITH_COLUMNS):
        constants |= dict.fromkeys(("columns", "column_counts", "column_width"))
    constants |= dict.fromkeys(_ABSENT.get(name.removeprefix(WITH_COLUMNS), ()))
    names = kernel.arg_names
    types = _types(names, element)
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items() if name in names},
        {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if signature[name].startswith("*") or "_stride_" in name
        },
    )
    options = {
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
    }
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    return triton.compile(source, target=target, options=options)


def resources(
    name: str,
    tile: Tile,
    *,
    element: str = "bf16",
    block_size: int = 256,
    head_dim: int = 128,
    group: int = 8,
) -> Resources:
    """Compile a kernel and read its machine code.

    Raises:
        RuntimeError: no loop of the machine code has products of Hopper's tensor cores.
    """
    kernel = compiled(
        name, tile, element=element, block_size=block_size, head_dim=head_dim, group=group
    )
    registers, spilled_bytes, code = machine_code(kernel)
    loop = _hot_loop(code, name)
    if loop is None:
        raise RuntimeError(f"{name} kernel: no loop with products in {tile}")
    rows, columns = _fitted(name, tile, block_size, group)
    products = PRODUCTS[_pass(name)]
    operations = products * 2 * rows * columns * triton.next_power_of_2(head_dim)
    waits = [int(m[1], 16) for m in re.finditer(r"DEPBAR\.LE SB0, (0x\w+)", "\n".join(loop))]
    return Resources(
        registers=registers,
        spilled_bytes=spilled_bytes,
        shared_bytes=kernel.metadata.shared,
        loop_instructions=len(loop),
        loop_kinds=dict(Counter(_kind(instruction) for instruction in loop)),
        loop_groups_in_flight=min(waits, default=0),
        loop_matrix_cycles=operations // MATRIX_OPERATIONS_PER_CYCLE,
        loop_issue_cycles=len(loop) * tile.warps // SCHEDULERS,
    )


def machine_code(kernel: Any) -> tuple[int, int, str]:
    """Registers and spilled bytes of a thread, and the disassembly, of a compiled kernel.

    Raises:
        RuntimeError: the tool that reads machine code did not name the registers.
    """
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        usage = _output(triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin)
        code = _output(triton.knobs.nvidia.nvdisasm.path, "-c", cubin)
    used = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if used is None:
        raise RuntimeError(f"cuobjdump names no registers: {usage!r}")
    return int(used[1]), int(used[2]), code


def instructions(code: str) -> list[str]:
    """The instructions of a disassembly, without labels and predicates."""
    return [found[1] for found in map(_INSTRUCTION.match, code.splitlines()) if found]


def candidates(head_dim: int) -> Iterator[Tile]:
    """Tile shapes around the table's; most do not fit."""
    sides = (64, 128) if head_dim <= 128 else (32, 64, 128)
    for rows, columns, warps, stages in itertools.product(sides, sides, (4, 8), (2, 3, 4)):
        yield Tile(rows=rows, columns=columns, warps=warps, stages=stages)


def _pass(name: str) -> str:
    """What a kernel computes: a key of ``PRODUCTS``."""
    return name.removeprefix(BY_TOKEN).removeprefix(WITH_COLUMNS)


def _fitted(name: str, tile: Tile, block_size: int, group: int) -> tuple[int, int]:
    """Rows and columns of a tile that fit a block, as the launchers of the kernels choose them."""
    if name in ("key_gradient", "column_key_gradient"):
        rows = min(tile.rows, block_size)
    elif name.startswith(BY_TOKEN):
        rows = tile.rows
    else:
        rows = query_block_kernel.packed_rows(tile, group, block_size)
    return rows, min(tile.columns, block_size)


def _types(names: Iterable[str], element: str) -> dict[str, str]:
    kinds = {name: kind for kind, members in _POINTERS.items() for name in members}
    types = {}
    for name in names:
        if name in kinds:
            types[name] = kinds[name].replace("element", f"*{element}")
        else:
            types[name] = "fp32" if name.endswith("scale") else "i32"
    return types


def _output(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _hot_loop(code: str, name: str) -> list[str] | None:
    """Instructions of the shortest loop with products, for what masks takes more.

    Where columns are read besides, theirs, which is the second of three.
    """
    instructions: list[str] = []
    places: dict[str, int] = {}
    loops = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            instructions.append(instruction[1])
            target = re.search(r"^BRA.*`\((\.L_x_\d+)\)", instruction[1])
            if target and target[1] in places:
                loops.append(instructions[places[target[1]] :])
    with_products = [x for x in loops if any(line.startswith("HGMMA") for line in x)]
    if name in ("column_forward", "column_query_gradient"):
        return with_products[1] if len(with_products) == 3 else None
    return min(with_products, key=len, default=None)


def _kind(instruction: str) -> str:
    return next((k for k, pattern in _KINDS.items() if re.match(pattern, instruction)), "other")


def _tiles(name: str, head_dim: int, every: bool) -> Iterator[Tile]:
    own = tile_of(name, head_dim)
    yield own
    if every:
        yield from (tile for tile in candidates(head_dim) if tile != own)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    rows = []
    for head_dim, block_size, name in itertools.product(
        options.head_dims, options.block_sizes, options.kernels
    ):
        for tile in _tiles(name, head_dim, options.candidates):
            try:
                found = resources(name, tile, block_size=block_size, head_dim=head_dim)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                continue
            rows.append(
                {"kernel": name, "head_dim": head_dim, "block_size": block_size}
                | {"tile": tile._asdict()}
                | {"fits": found.shared_bytes <= SHARED_BYTES[HOPPER]}
                | asdict(found)
                | {"matrix_share": round(found.matrix_share, 3)}
            )
            print(_line(rows[-1]), flush=True)
    if options.json is not None:
        results = {"triton": triton.__version__, "target": "sm_90a", "kernels": rows}
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


def _line(row: dict[str, Any]) -> str:
    tile = "{rows} x {columns}, {warps} warps, {stages} stages".format(**row["tile"])
    return (
        f"{row['kernel']:<20} head dim {row['head_dim']:>3}, block {row['block_size']:>3}, "
        f"tile {tile}: {row['registers']} registers, {row['spilled_bytes']} bytes spilled "
        f"({row['loop_kinds'].get('spills', 0)} in the loop), {row['shared_bytes'] // 1024} KiB "
        f"shared{'' if row['fits'] else ' (too much)'}, {row['loop_instructions']} instructions, "
        f"{row['loop_groups_in_flight']} groups in flight, matrix share {row['matrix_share']:.2f}"
    )


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write too")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128])
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[256])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--candidates", action="store_true", help="other tile shapes too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
