# SPDX-License-Identifier: Apache-2.0
"""One member of a context group attends by travelling heads, and reports how it went.

    heads_rank.py DIRECTORY

leaves ``rank0.json`` and so on. Sequences are compared with one rank's :func:`dense_attention`, and
layers with lists with one rank's :class:`BudgetedCoreAttention`.
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
import numpy as np
from attention.sequence.slices import random_owners
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from micro_batches import BLOCK, params_with
from torch import Tensor

from sparsebalance_megatron.attention.api import dense_attention
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.sequence.heads import TravellingHeads
from sparsebalance_megatron.attention.sequence.slice import SequenceGroup, SequenceSlice
from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.megatron.core_attention import AttentionOptions, BudgetedCoreAttention
from sparsebalance_megatron.megatron.packed_seq_params import BudgetedPackedSeqParams

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
LISTS = {
    # Selection, first documents that are dense, broken document.
    "previous-block": (0, None),
    "token-query-head": (1, None),
    "token-kv-head": (1, 2),
    "vertical-slash": (0, 1),
}
LENGTHS, BUDGETS = (100, 37, 212, 8, 150), (7, 2, 5, 1, 3)


def main(directory: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    report: dict[str, Any] = {
        f"{name}-{dtype}": run(name, DTYPES[dtype]) for name in CASES for dtype in DTYPES
    }
    (directory / f"rank{RANK}.json").write_text(json.dumps(report))
    report = {name: lists_report(name) for name in LISTS}
    (directory / f"lists{RANK}.json").write_text(json.dumps(report))
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


def lists_report(selection: str) -> dict[str, Any]:
    """A layer with sinks, whose lists are selected by the heads of this member."""
    dense, broken = LISTS[selection]
    query_heads, kv_heads, head_dim = 8, 4, 16
    layer = BudgetedCoreAttention(
        TransformerConfig(
            num_layers=1,
            hidden_size=query_heads * head_dim,
            num_attention_heads=query_heads,
            num_query_groups=kv_heads,
            use_cpu_initialization=True,
            softmax_type="learnable",
        ),
        *(1, AttnMaskType.causal, "self"),
        options=AttentionOptions(
            SparseBalanceConfig(block_size=BLOCK, base_budget=3, selection=selection), (1, 2, 4)
        ),
    ).double()
    torch.nn.init.normal_(layer.softmax_offset, generator=torch.Generator().manual_seed(5))
    cu_seqlens = (0, *accumulate(LENGTHS))
    group = SequenceGroup(
        member=RANK, members=MEMBERS, process_group=dist.group.WORLD, lists_by_heads=True
    )
    held = SequenceSlice.dealt(cu_seqlens, group, block_size=BLOCK, pad_to_multiple_of=8)
    tokens = torch.from_numpy(held.tokens_T)
    generator = torch.Generator().manual_seed(3)
    shapes = (query_heads, head_dim), (kv_heads, head_dim), (kv_heads, head_dim)
    qkv = [torch.randn(cu_seqlens[-1], *shape, generator=generator).double() for shape in shapes]
    gradient = torch.randn(cu_seqlens[-1], query_heads * head_dim, generator=generator).double()
    fine = torch.ones(cu_seqlens[-1], dtype=torch.bool)
    if broken is not None:
        qkv[0][cu_seqlens[broken] + 1] = torch.nan
        fine[cu_seqlens[broken] : cu_seqlens[broken + 1]] = False

    def attended(params: BudgetedPackedSeqParams, some: Tensor) -> list[Tensor]:
        layer.zero_grad()
        padding = (0, 0, 0, 0, 0, -len(some) % 8 if params.micro_batch.sequence else 0)
        own = [x[some].clone().requires_grad_() for x in qkv]
        given = (torch.nn.functional.pad(x, padding)[:, None] for x in own)
        out = layer(*given, packed_seq_params=params).view(-1, gradient.shape[1])[: len(some)]
        out.backward(gradient[some])
        return [out.detach(), *(x.grad for x in own), layer.softmax_offset.grad.clone()]

    def given(sequence: SequenceSlice | None) -> BudgetedPackedSeqParams:
        budgets_LS = np.array([BUDGETS], dtype=np.int32)
        return params_with(LENGTHS, budgets_LS, dense=(dense,), sequence=sequence, step=0)

    alone, shared = given(None), given(held)
    expected = attended(alone, torch.arange(cu_seqlens[-1]))
    calls: Counter[str] = Counter()
    with mock.patch.object(dist, "all_to_all_single", partial(_counted, calls)):
        found = attended(shared, tokens)
    dist.all_reduce(found[-1])
    shared.micro_batch.join_observations()
    seen, wanted = (x.micro_batch.observations[0] for x in (shared, alone))
    kept = fine[tokens]
    report: dict[str, Any] = {"calls": calls["calls"]}
    for key, mine, whole in zip(("out", "dq", "dk", "dv"), found, expected, strict=False):
        report[key] = float((mine - whole[tokens])[kept].abs().max() / whole[fine].abs().max())
        report[key + " broken"] = bool(mine[~kept].isnan().any()) == bool(
            whole[tokens][~kept].isnan().any()
        )
    if broken is None:
        report["dsink"] = float((found[-1] - expected[-1]).abs().max())
    assert torch.equal(seen.isnan(), wanted.isnan()), selection
    report["coverage_SK"] = float((seen - wanted).nan_to_num().abs().max())
    return report


def _counted(calls: Counter[str], received: Tensor, sent: Tensor, *splits: Any, group: Any) -> None:
    calls["calls"] += 1
    own = splits[0][RANK] * received[:1].numel()
    calls["elements"] += received.numel() - own
    _all_to_all_single(received, sent, *splits, group=group)


_all_to_all_single = dist.all_to_all_single

if __name__ == "__main__":
    main(Path(sys.argv[1]))
