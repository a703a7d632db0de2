# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention on one CPU thread against dense SDPA, in the same run.

    python benchmarks/cpu_attention.py --json results.json
    python benchmarks/cpu_attention.py --quick    # seconds; its times say little

Every round times each contender once, so that what disturbs the machine disturbs all; time is this
process's processor time, so turns that other processes take do not count. Per case:
median and spread of forward + backward, the speedup over dense, and how the time compares with what
the selected block pairs would take at dense SDPA's rate (1.0 is that rate). Selections by token
also with the time of as many pairs selected by block (``time_per_pair_over_blocks``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from end_to_end.command import cpu_name
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.attention.selection import Selection


@dataclass(frozen=True, kw_only=True)
class Shape:
    tokens: int = 8192
    query_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64


@dataclass(frozen=True, kw_only=True)
class SparseCase:
    selection: str
    block_size: int
    budget: int

    @property
    def name(self) -> str:
        return f"{self.selection} block {self.block_size} budget {self.budget}"


CASES = (
    SparseCase(selection="previous-block", block_size=128, budget=8),
    SparseCase(selection="previous-block", block_size=256, budget=8),
    SparseCase(selection="previous-block", block_size=256, budget=32),
    SparseCase(selection="token-kv-head", block_size=128, budget=8),
    SparseCase(selection="token-query-head", block_size=128, budget=8),
)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(1)
    shape = Shape(tokens=options.tokens)
    q, k, v, dout = _inputs(shape)
    selections = [_selection(case, q, k) for case in CASES]
    scale = shape.head_dim**-0.5

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)
        return out[0].transpose(0, 1)

    def sparse(selection: Selection) -> Callable[..., Tensor]:
        return lambda q, k, v: block_sparse_attention(q, k, v, selection, softmax_scale=scale)[0]

    contenders = [dense, *(sparse(selection) for selection in selections)]
    dense_ms, *sparse_ms = _measure(contenders, (q, k, v), dout, options.rounds)
    compared = {
        case: _compared(_summary(times), _summary(dense_ms), selection)
        for case, selection, times in zip(CASES, selections, sparse_ms, strict=True)
    }
    results = {
        "machine": {
            "processor": cpu_name(),
            "torch": torch.__version__,
            "threads": 1,
        },
        "shape": vars(shape),
        "dtype": "float32",
        "rounds": options.rounds,
        "dense": _summary(dense_ms),
        "cases": {
            case.name: found | _against_blocks(case, compared) for case, found in compared.items()
        },
    }
    text = json.dumps(results, indent=2)
    if options.json is None:
        print(text)
    else:
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write; default: standard output")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after one untimed")
    parser.add_argument("--tokens", type=int, default=Shape.tokens)
    parser.add_argument(
        "--quick", action="store_true", help="1,024 tokens, one round, every case: does it run"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.rounds = 1024, 1
    return options


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    heads = (shape.query_heads, shape.kv_heads, shape.kv_heads, shape.query_heads)
    return tuple(torch.randn(shape.tokens, n, shape.head_dim, generator=generator) for n in heads)


def _selection(case: SparseCase, q_THD: Tensor, k_TGD: Tensor) -> Selection:
    layout = packed_layout([0, q_THD.shape[0]], case.block_size, "cpu")
    selector = selector_named(case.selection)
    ranking = rank_sequence(
        selector,
        *(q_THD, k_TGD, layout),
        softmax_scale=1.0,
        max_budget=case.budget,
        observe=False,
    )
    return selector.select(ranking, torch.tensor([case.budget]))


def _measure(
    contenders: list[Callable[..., Tensor]],
    inputs: tuple[Tensor, ...],
    dout_THD: Tensor,
    rounds: int,
) -> list[list[float]]:
    """Processor ms of forward + backward, per contender and round."""
    leaves = [x.requires_grad_() for x in inputs]
    times: list[list[float]] = [[] for _ in contenders]
    for timed in [False] + [True] * rounds:
        for contender, spent in zip(contenders, times, strict=True):
            begin = time.process_time()
            torch.autograd.grad(contender(*leaves), leaves, dout_THD)
            if timed:
                spent.append(1e3 * (time.process_time() - begin))
    return times


def _summary(times_ms: list[float]) -> dict[str, float]:
    return {
        "median_ms": statistics.median(times_ms),
        "min_ms": min(times_ms),
        "max_ms": max(times_ms),
    }


def _compared(
    sparse: dict[str, float], dense: dict[str, float], selection: Selection
) -> dict[str, float]:
    layout, counts_QC = selection.query_layout, selection.counts_QC
    block_Q = layout.block_T if selection.by_token else layout.number_N
    visible_Q1 = layout.index_N[block_Q][:, None] + 1
    density = float(counts_QC.sum()) / float(visible_Q1.expand_as(counts_QC).sum())
    return sparse | {
        "density": density,
        "speedup_over_dense": dense["median_ms"] / sparse["median_ms"],
        "time_over_dense_rate": sparse["median_ms"] / (density * dense["median_ms"]),
    }


def _against_blocks(
    case: SparseCase, compared: dict[SparseCase, dict[str, float]]
) -> dict[str, float]:
    """How a selection by token compares, pair by pair, with one by block of the same budget."""
    by_block = replace(case, selection="previous-block")
    if not selector_named(case.selection).by_token or by_block not in compared:
        return {}
    rate = compared[case]["time_over_dense_rate"] / compared[by_block]["time_over_dense_rate"]
    return {"time_per_pair_over_blocks": rate}


if __name__ == "__main__":
    sys.exit(main())
