# SPDX-License-Identifier: Apache-2.0
"""One member of a context group attends densely by travelling heads, and reports how it went.

    heads_rank.py DIRECTORY

leaves ``rank0.json`` and so on. Sequences are compared with one rank's :func:`dense_attention`.
"""

import json
import os
import sys
from collections import Counter
from datetime import timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from attention.sequence.slices import random_owners
from torch import Tensor

from sparsebalance_megatron.attention.api import dense_attention
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.sequence.heads import TravellingHeads
from sparsebalance_megatron.attention.sequence.slice import SequenceGroup, SequenceSlice

RANK, MEMBERS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CASES: dict[str, tuple[tuple[int, ...], int, int, tuple[int, int, int, int], int | None]] = {
    # Documents, first ones that are dense, tokens of a block, (H, G, D, F), broken document.
    "grouped": ((100, 37, 512, 8, 255), 5, 16, (8, 4, 16, 16), None),
    "one-kv-head": ((700,), 1, 16, (4, 1, 16, 16), None),
    "short": ((5, 3, 1, 40, 2), 5, 4, (8, 8, 8, 12), None),
    "latent": ((129, 300), 2, 16, (8, 8, 24, 16), None),
    "first-documents": ((3, 60, 9, 200), 2, 16, (8, 2, 16, 16), None),
    "fewer-tokens-than-members": ((2, 300), 1, 16, (8, 2, 16, 16), None),
    "broken": ((64, 100, 90), 3, 16, (8, 2, 16, 16), 1),
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def main(directory: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    report: dict[str, Any] = {
        f"{name}-{dtype}": run(name, DTYPES[dtype]) for name in CASES for dtype in DTYPES
    }
    (directory / f"rank{RANK}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def run(name: str, dtype: torch.dtype) -> dict[str, Any]:
    lengths, dense, block, (q_heads, kv_heads, head_dim, value_dim), broken = CASES[name]
    cu_seqlens = (0, *accumulate(lengths))
    tokens, whole = cu_seqlens[dense], cu_seqlens[-1]
    blocks = sum(-(-length // block) for length in lengths)
    sequence = SequenceSlice(
        cu_seqlens=cu_seqlens,
        block_size=block,
        owner_N=random_owners(blocks, MEMBERS, 7),
        group=SequenceGroup(member=RANK, members=MEMBERS, process_group=dist.group.WORLD),
    )
    generator = torch.Generator().manual_seed(11)
    shapes = (q_heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (q_heads, value_dim)
    *qkv, gradient = (
        torch.randn(whole, *shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in shapes
    )
    if broken is not None:
        qkv[0][cu_seqlens[broken] + 1] = torch.nan
    layout = packed_layout(cu_seqlens[: dense + 1], block, "cpu")
    scale = head_dim**-0.5

    def attention(*qkv: Tensor) -> Tensor:
        return dense_attention(*qkv, layout, softmax_scale=scale)[0]

    expected = [x[:tokens].clone().requires_grad_() for x in qkv]
    whole_out = attention(*expected)
    whole_out.backward(gradient[:tokens])
    held = torch.from_numpy(sequence.tokens_T)
    held = held[held < tokens]
    own = [x[held].clone().requires_grad_() for x in qkv]
    calls: Counter[str] = Counter()
    with mock.patch.object(dist, "all_to_all_single", partial(_counted, calls)):
        out = TravellingHeads(sequence, tokens).attend(tuple(own), attention)
        forward = dict(calls)
        out.backward(gradient[held])
    found = {"out": out, "dq": own[0].grad, "dk": own[1].grad, "dv": own[2].grad}
    wanted = [whole_out, *(x.grad for x in expected)]
    fine = torch.ones(tokens, dtype=torch.bool)
    if broken is not None:
        fine[cu_seqlens[broken] : cu_seqlens[broken + 1]] = False
    report: dict[str, Any] = {"forward": forward, "both": dict(calls)}
    for (key, mine), whole_T in zip(found.items(), wanted, strict=True):
        theirs, of_fine = whole_T[held], fine[held]
        largest = float(whole_T[fine].abs().max())
        difference = (mine - theirs)[of_fine].double().abs()
        report[key] = {
            "equal": bool(torch.equal(mine[of_fine], theirs[of_fine])),
            "error": float(difference.max()) / largest if difference.numel() else 0.0,
            "broken": bool(mine[~of_fine].isnan().any()) == bool(theirs[~of_fine].isnan().any()),
        }
    return report


def _counted(calls: Counter[str], received: Tensor, sent: Tensor, *splits: Any, group: Any) -> None:
    calls["calls"] += 1
    own = splits[0][RANK] * received[:1].numel()
    calls["elements"] += received.numel() - own
    _all_to_all_single(received, sent, *splits, group=group)


_all_to_all_single = dist.all_to_all_single

if __name__ == "__main__":
    main(Path(sys.argv[1]))
