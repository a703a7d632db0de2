# SPDX-License-Identifier: Apache-2.0
"""Attention kernels on a CUDA device against dense SDPA and FlexAttention, in the same run.

    python benchmarks/kernels.py --json results.json
    python benchmarks/kernels.py --tokens 65536 --tune

Per case: forward, backward and both, as median and spread in ms, and TFLOP/s counted on the query,
key pairs that the selection lets be read (4 D operations a pair forward, 10 D backward); router and
index times; how far the kernels' output lies from FlexAttention's. Free memory is filled with NaN
before a contender runs, and its results must be finite. The second-level cache is overwritten
before every timed call. ``--tune`` instead times tile shapes around the table's, one kernel's at a
time. Exits with status 2 where no CUDA device is visible.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout
from sparsebalance_megatron.attention.router import RouterScores, router_scores, select_blocks
from sparsebalance_megatron.attention.selection import Selection

# The attention of Qwen2.5-3B.
QUERY_HEADS, KV_HEADS, HEAD_DIM = 16, 2, 128
SCALE = HEAD_DIM**-0.5
DENSE_BACKENDS = {
    "dense cudnn": SDPBackend.CUDNN_ATTENTION,
    "dense flash": SDPBackend.FLASH_ATTENTION,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """``documents`` equal parts of the row; the second half of them has a quarter of the budget
    where budgets are skewed."""

    tokens: int
    block_size: int
    budget: int
    skewed: bool

    @property
    def name(self) -> str:
        kind = "skewed" if self.skewed else "uniform"
        return f"{self.tokens} tokens, block {self.block_size}, budget {self.budget}, {kind}"


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if not torch.cuda.is_available():
        print("benchmarks/kernels.py: no CUDA device is visible; nothing measured", file=sys.stderr)
        return 2
    measure = _tuned if options.tune else _measured
    results = {
        "machine": {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": _triton_version(),
        },
        "shape": {"query_heads": QUERY_HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM},
        "dtype": "bfloat16",
        "rounds": options.rounds,
        "cases": {},
    }
    for case in _cases(options.tokens, options.block_sizes):
        results["cases"][case.name] = measure(case, options.rounds)
        torch.cuda.empty_cache()
        _write(results, options.json)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write; default: standard output")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds, after two untimed")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072, 262144]
    )
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--tune", action="store_true", help="time other tile shapes")
    return parser.parse_args(arguments)


def _cases(tokens: list[int], block_sizes: list[int]) -> Iterator[Case]:
    """Densities of 6 to 75 %, and the default budget of 32 blocks of 256."""
    for row in tokens:
        for block_size in block_sizes:
            budgets = {max(1, round(row / block_size * share)) for share in (0.03, 0.13, 0.5)}
            budgets.add(8192 // block_size)
            for budget in sorted(budgets):
                yield Case(tokens=row, block_size=block_size, budget=budget, skewed=False)
            yield Case(tokens=row, block_size=block_size, budget=8192 // block_size, skewed=True)


def _selection(case: Case) -> Selection:
    """The own block and random past ones."""
    ends = [case.tokens // 2, case.tokens] if case.skewed else [case.tokens]
    layout = packed_layout([0, *ends], case.block_size, "cuda")
    budgets = [case.budget, max(1, case.budget // 4)] if case.skewed else [case.budget]
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (layout.blocks, KV_HEADS, layout.max_blocks)
    later_NJ = torch.arange(layout.max_blocks, device="cuda") > layout.index_N[:, None]
    scores_NGJ = torch.randn(shape, generator=generator, device="cuda")
    scores = RouterScores(
        granularity="query-block",
        scores_RCJ=scores_NGJ.masked_fill_(later_NJ[:, None], -torch.inf),
        softmax_scale=SCALE,
        layout=layout,
    )
    return select_blocks(scores, torch.tensor(budgets, device="cuda"), max_budget=max(budgets))


def _inputs(tokens: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [
        torch.randn(
            tokens, heads, HEAD_DIM, generator=generator, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
    ]


def _measured(case: Case, rounds: int) -> dict[str, Any]:
    selection = _selection(case)
    inputs = _inputs(case.tokens)
    pairs = QUERY_HEADS // KV_HEADS * _pairs(selection)
    boundaries = selection.layout.cu_seqlens
    dense_pairs = QUERY_HEADS * sum(
        (b - a) * (b - a + 1) // 2 for a, b in itertools.pairwise(boundaries)
    )
    contenders = {
        name: (_sparse(selection, implementation), pairs)
        for name, implementation in (("triton", "triton"), ("flex", "flex"))
    } | {
        name: (_dense(selection.layout, backend), dense_pairs)
        for name, backend in DENSE_BACKENDS.items()
    }
    if importlib.util.find_spec("flash_attn") is not None:
        contenders["dense flash-attn"] = (_flash_attn(selection.layout), dense_pairs)
    results: dict[str, Any] = {
        "density": pairs / dense_pairs,
        "router": _router_ms(inputs, selection.layout, case.budget, rounds),
        "index": _index_ms(selection, rounds),
    }
    outputs = {}
    for name, (contender, counted) in contenders.items():
        try:
            results[name], out_THD = _contender(contender, inputs, counted, rounds)
            outputs[name] = out_THD.detach().cpu()
        except (RuntimeError, ValueError) as error:
            # A missing backend or too little memory is a result, and no reason to lose the others.
            results[name] = {"error": str(error).splitlines()[0]}
    if {"triton", "flex"} <= outputs.keys():
        difference_THD = outputs["triton"].float() - outputs["flex"].float()
        results["largest difference, triton and flex"] = float(difference_THD.abs().max())
    return results


def _sparse(selection: Selection, implementation: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: block_sparse_attention(
        q, k, v, selection, softmax_scale=SCALE, implementation=implementation
    )[0]


def _dense(layout: PackedLayout, backend: SDPBackend) -> Callable[..., Tensor]:
    """Causal attention of every document of its own."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        ends = layout.cu_seqlens
        with sdpa_kernel(backend):
            for begin, end in itertools.pairwise(ends):
                rows = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
                out = scaled_dot_product_attention(
                    *rows, is_causal=True, scale=SCALE, enable_gqa=True
                )
                parts.append(out[0].transpose(0, 1))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    return attend


def _flash_attn(layout: PackedLayout) -> Callable[..., Tensor]:
    from flash_attn import flash_attn_varlen_func

    ends = torch.tensor(layout.cu_seqlens, dtype=torch.int32, device="cuda")
    longest = max(b - a for a, b in itertools.pairwise(layout.cu_seqlens))
    return lambda q, k, v: flash_attn_varlen_func(
        q, k, v, ends, ends, longest, longest, softmax_scale=SCALE, causal=True
    )


def _contender(
    attend: Callable[..., Tensor], inputs: list[Tensor], pairs: int, rounds: int
) -> tuple[dict[str, Any], Tensor]:
    """Results, and the last output."""
    _poison_free_memory()
    dout = torch.randn_like(inputs[0])
    state: dict[str, Tensor] = {}

    def forward() -> None:
        state["out"] = attend(*inputs)

    def backward() -> None:
        state["gradients"] = torch.autograd.grad(state["out"], inputs, dout)

    times = _times({"forward": forward, "backward": backward}, rounds)
    if not all(bool(x.isfinite().all()) for x in (state["out"], *state["gradients"])):
        raise RuntimeError("results are not finite")
    both = [a + b for a, b in zip(times["forward"], times["backward"], strict=True)]
    operations = {"forward": 4, "backward": 10, "both": 14}
    results = {
        name: _summary(spent)
        | {"tflops": operations[name] * HEAD_DIM * pairs / statistics.median(spent) / 1e9}
        for name, spent in (times | {"both": both}).items()
    }
    return results, state["out"]


def _poison_free_memory() -> None:
    """What the allocator hands out next holds NaN, so reading it unwritten shows."""
    free_bytes, _ = torch.cuda.mem_get_info()
    torch.full((free_bytes // 4,), torch.nan, dtype=torch.bfloat16, device="cuda")


def _router_ms(
    inputs: list[Tensor], layout: PackedLayout, budget: int, rounds: int
) -> dict[str, float]:
    budgets_S = torch.full((layout.documents,), budget, device="cuda")

    def route() -> None:
        scores = router_scores(
            inputs[0], inputs[1], layout, granularity="query-block", softmax_scale=SCALE
        )
        select_blocks(scores, budgets_S, max_budget=budget)

    return _summary(_times({"router": route}, rounds)["router"])


def _index_ms(selection: Selection, rounds: int) -> dict[str, float]:
    from sparsebalance_megatron.attention.impl.triton.index import inverse_lists

    def build() -> None:
        inverse_lists(selection, wanted_items=256)

    return _summary(_times({"index": build}, rounds)["index"])


def _tuned(case: Case, rounds: int) -> dict[str, Any]:
    """Forward and backward of the kernels at other tile shapes."""
    from sparsebalance_megatron.attention.impl.triton import backward, forward
    from sparsebalance_megatron.attention.impl.triton.tiles import tiles_for

    selection, inputs = _selection(case), _inputs(case.tokens)
    pairs = QUERY_HEADS // KV_HEADS * _pairs(selection)
    table = tiles_for(HEAD_DIM, 2)
    results = {}
    for kernel in ("forward", "query_gradient", "key_gradient"):
        own = getattr(table, kernel)
        for rows in (64, 128):
            for columns in (64, 128):
                for warps in (4, 8):
                    for stages in (2, 3, 4):
                        tile = replace(own, rows=rows, columns=columns, warps=warps, stages=stages)
                        tiles = replace(table, **{kernel: tile})
                        forward.tiles_for = backward.tiles_for = lambda *_, tiles=tiles: tiles
                        name = f"{kernel} {rows}x{columns} warps {warps} stages {stages}"
                        try:
                            results[name], _ = _contender(
                                _sparse(selection, "triton"), inputs, pairs, rounds
                            )
                        except Exception as error:
                            # Most often more shared memory than there is.
                            results[name] = {"error": str(error).splitlines()[0]}
    forward.tiles_for = backward.tiles_for = tiles_for
    return results


def _times(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each step per round; steps run in order, each on a cold cache."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in steps}
    for timed in [False] * 2 + [True] * rounds:
        for name, step in steps.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            end.synchronize()
            if timed:
                times[name].append(begin.elapsed_time(end))
    return times


def _summary(times_ms: list[float]) -> dict[str, float]:
    return {
        "median_ms": statistics.median(times_ms),
        "min_ms": min(times_ms),
        "max_ms": max(times_ms),
    }


def _pairs(selection: Selection) -> int:
    """Query, key pairs read, summed over KV heads."""
    layout = selection.layout
    length_N1 = layout.length_N[:, None]
    past_NG = (selection.counts_RC - 1) * length_N1 * layout.block_size
    own_NG = length_N1 * (length_N1 + 1) // 2
    return int((past_NG + own_NG).sum())


def _triton_version() -> str:
    import triton

    return triton.__version__


def _write(results: dict[str, Any], path: Path | None) -> None:
    text = json.dumps(results, indent=2)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
