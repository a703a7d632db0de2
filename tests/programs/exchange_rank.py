# SPDX-License-Identifier: Apache-2.0
"""One member of a context group runs the exchange on every case, and reports how it went.

    exchange_rank.py DIRECTORY

leaves ``rank0.json`` and so on.
"""

import dataclasses
import hashlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from attention.cases import NAMES, SCALE, Case, make_case
from attention.sequence import segmented
from attention.sequence.slices import BLOCK, local_selection, random_owners, slices_of
from torch import Tensor

from sparsebalance_megatron.attention.sequence.between_ranks import AllGatherExchange
from sparsebalance_megatron.attention.sequence.exchange import sequence_attention
from sparsebalance_megatron.attention.sequence.slice import (
    SequenceExchange,
    SequenceGroup,
    SequenceSlice,
)

RANK, MEMBERS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CU_SEQLENS, BUDGETS, BLOCKS = [0, 1, 2, 30, 51, 111], [1, 3, 2, 3, 5], 17
HEAD_DIMS = {"head_dim": 8, "value_dim": 12}
BROKEN = slice(2, 30)
"""Tokens of the document that is NaN in the case "broken"."""
TIMEOUT_S = 60

CASES = {
    "dealt": ("previous-block", "blocks", None),
    "random": ("previous-block", "blocks", 0),
    "token": ("token-kv-head", "tokens", None),
    "token-random": ("token-query-head", "tokens", 1),
    "reference": ("token-kv-head", "reference", 2),
    "columns": ("vertical-slash", "blocks", 4),
    "broken": ("previous-block", "blocks", 3),
    "dense": ("previous-block", "blocks", 6),
    "dense-first": ("token-kv-head", "tokens", 7),
    "dense-first-columns": ("vertical-slash", "blocks", 8),
    "dense-broken": ("previous-block", "blocks", 9),
}
"""Kind, implementation, and the seed of random owners."""
DENSE = {"dense": 5, "dense-broken": 5, "dense-first": 3, "dense-first-columns": 4}
"""So many first documents are attended to densely."""


class Traffic:
    """Which collectives this rank calls, and the bytes it receives."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        names = [
            *("all_gather_into_tensor", "reduce_scatter_tensor", "batch_isend_irecv"),
            *("all_reduce", "all_gather", "all_to_all_single", "broadcast", "barrier"),
            *("reduce_scatter", "all_to_all", "reduce", "scatter", "gather", "send", "recv"),
            *("all_gather_object", "broadcast_object_list", "monitored_barrier"),
        ]
        plain = {name: getattr(dist, name) for name in names}
        for name, function in plain.items():
            setattr(dist, name, self._counted(name, function))
        try:
            yield
        finally:
            for name, function in plain.items():
                setattr(dist, name, function)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.calls[name] += 1
            first = arguments[0]
            if name == "all_gather_into_tensor":
                self.bytes += first.nbytes * (MEMBERS - 1) // MEMBERS
            else:
                # A reduce-scatter by rings: every other member's part passes once.
                self.bytes += first.nbytes * (MEMBERS - 1)
            return function(*arguments, **keywords)

        return counted


def slice_of(seed: int | None) -> SequenceSlice:
    owner_N = np.arange(1, BLOCKS + 1) % MEMBERS
    if seed is not None:
        owner_N = random_owners(BLOCKS, MEMBERS, seed)
    return slices_of(CU_SEQLENS, owner_N, MEMBERS)[RANK]


def on_members(
    case: Case,
    implementation: str,
    held: SequenceSlice,
    exchange: SequenceExchange,
    dense_documents: int,
) -> tuple[list[Tensor], list[Traffic]]:
    """out, lse, dq, dk, dv of this member's tokens, and the traffic forward and backward."""
    forward, backward = Traffic(), Traffic()
    leaves = [
        x[held.tokens_T].double().requires_grad_() for x in (case.q_THD, case.k_TGD, case.v_TGF)
    ]
    with forward.watched():
        out, lse = sequence_attention(
            *leaves,
            local_selection(case.selection, held),
            held,
            exchange=exchange,
            softmax_scale=SCALE,
            implementation=implementation,
            dense_documents=dense_documents,
        )
    assert not lse.requires_grad
    with backward.watched():
        out.backward(case.dout_THF[held.tokens_T].double())
    return [out.detach(), lse, *(x.grad for x in leaves)], [forward, backward]


def broken(case: Case) -> Case:
    inputs = {}
    for name in ("q_THD", "k_TGD", "v_TGF", "dout_THF"):
        inputs[name] = getattr(case, name).clone()
        inputs[name][BROKEN] = math.nan
    return dataclasses.replace(case, **inputs)


def report_of(name: str, exchange: SequenceExchange) -> dict[str, Any]:
    (kind, implementation, seed), dense = CASES[name], DENSE.get(name, 0)
    budgets = [99] * dense + BUDGETS[dense:]
    case = make_case(CU_SEQLENS, budgets, block=BLOCK, **HEAD_DIMS, kind=kind)
    held = slice_of(seed)
    token_T = torch.from_numpy(held.tokens_T)
    expected = [x[token_T] for x in case.ours("reference", torch.float64)]
    kept = torch.ones(len(token_T), dtype=torch.bool)
    if name.endswith("broken"):
        case = broken(case)
        kept = (token_T < BROKEN.start) | (token_T >= BROKEN.stop)
    found, traffic = on_members(case, implementation, held, exchange, dense)
    again, _ = on_members(case, implementation, held, exchange, dense)
    return {
        "errors": {
            result: float((a - b)[kept].abs().max()) if kept.any() else 0.0
            for result, a, b in zip(NAMES, found, expected, strict=True)
        },
        "repeats": all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, again, strict=True)
        ),
        "calls": [dict(one.calls) for one in traffic],
        "bytes": [one.bytes for one in traffic],
        "tokens": held.tokens_per_member,
    }


def segments_report(exchange: SequenceExchange, name: str) -> dict[str, Any]:
    """A layer that runs in segments, each shared by all members."""
    ranks = SequenceGroup(member=RANK, members=MEMBERS, exchange=exchange)
    segment_starts_blocks = list(range(0, segmented.BLOCKS - MEMBERS + 1, MEMBERS + 1))
    case, selector = segmented.case_of(), segmented.EVERY_SELECTOR[name]
    whole, curves_SK = segmented.whole_of(case, selector, torch.float64)
    run = segmented.Segmented(
        case, selector, segment_starts_blocks, ranks=ranks, recompute=name == "vertical-slash"
    )
    found = run.run()
    expected = [x[run.tokens_T] for x in whole.ours("reference", torch.float64)]
    selections = run.selections.values()
    rows = torch.cat([each.own_block_N for each in selections])
    rows = run.tokens_T if whole.selection.by_token else rows
    lists = segmented.read(whole.selection)
    return {
        "segments": len(segment_starts_blocks),
        "lists": [row for each in selections for row in segmented.read(each)]
        == [lists[row] for row in rows.tolist()],
        "coverage": float((run.curves[len(segment_starts_blocks) - 1] - curves_SK).abs().max()),
        "kept": [len(x) for x in vars(run.segments).values() if isinstance(x, list)],
        "errors": {
            result: float((a - b).abs().max())
            for result, a, b in zip(NAMES, found, expected, strict=True)
        },
    }


def summaries_report() -> dict[str, Any]:
    held, exchange = slice_of(5), AllGatherExchange(dist.new_group())
    generator = torch.Generator().manual_seed(1)
    shapes = {(2, 7): torch.bfloat16, (4, 8): torch.float32, (): torch.float64}
    whole = [
        torch.randn(BLOCKS, *shape, generator=generator).to(dtype)
        for shape, dtype in shapes.items()
    ]
    traffic = Traffic()
    with traffic.watched():
        gathered = exchange.summaries([x[held.layouts.own_block_N] for x in whole], held)
    masses = torch.rand(MEMBERS, 5, 3, generator=generator, dtype=torch.float64)
    with traffic.watched():
        total = exchange.total_mass(masses[RANK], held)
    return {
        "equal": all(a.equal(b) for a, b in zip(gathered, whole, strict=True)),
        "calls": dict(traffic.calls),
        "digest": hashlib.sha256(total.numpy().tobytes()).hexdigest(),
        "error": float((total - masses.sum(0)).abs().max()),
    }


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all(), "uninitialised memory is to be NaN"
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    exchange = AllGatherExchange(dist.new_group())
    report = {
        "cases": {name: report_of(name, exchange) for name in CASES},
        "segments": {name: segments_report(exchange, name) for name in segmented.EVERY_SELECTOR},
        "summaries": summaries_report(),
    }
    (directory / f"rank{RANK}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
