# SPDX-License-Identifier: Apache-2.0
"""Decides in a few minutes on a GPU which attention kernels are right, and which are worth it.

    python benchmarks/attention_rates.py --json attention_rates.json

In this order, each result a line of JSON at once: kernels of dense documents, and FlashAttention-4
over lists of all blocks, against the reference in float64, with an LSE merged from outside, in 200
repeats, and beside a document of NaN; dense attention of all tokens in 1, 16 and 64 documents by
every kernel; lists of 8, 32 and 128 blocks; 50 packed layouts of varying documents, first call and
steady state. Then verdicts: whether FlashAttention-4 takes at most 0.77 of torch's time for dense
documents, and at most 0.8 of Triton's for lists.

``--device cpu`` runs all of it on few tokens, to check the benchmark.
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from kernel_contenders import Attend, Case, Shape, inputs_of, ours, selected_pairs, selection_of
from kernel_contenders import dense as torchs_contenders
from kernels import Bench, measured_contender
from torch import Tensor

from sparsebalance_megatron.attention.api import (
    DENSE_KERNELS,
    KERNELS,
    block_sparse_attention,
    dense_attention,
    dense_kernel,
)
from sparsebalance_megatron.attention.layout import LayoutPair, PackedLayout, packed_layout
from sparsebalance_megatron.attention.selection import Selection

MOST_OF_TORCH, MOST_OF_TRITON = 0.77, 0.8
BLOCK_SIZE = 256
REPEATS = 200
LISTS = "fa4 lists"
"""Lists of all blocks, as a kernel of whole documents."""
Found = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write; default: none")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=6, help="timed rounds, after two untimed")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing then")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("attention_rates.py: no CUDA device is visible; nothing measured", file=sys.stderr)
        return 2
    on_gpu = options.device == "cuda"
    bench = Bench(
        device=torch.device(options.device),
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        shape=Shape() if on_gpu else Shape(query_heads=2, kv_heads=1, head_dim=16),
        rounds=options.rounds,
    )
    device = torch.cuda.get_device_name() if on_gpu else "cpu: times say nothing"
    machine = {"device": device, "torch": torch.__version__, "tokens": options.tokens}
    results: Found = {"machine": machine, "cases": [], "verdicts": {}}
    deadline_s = time.monotonic() + 60 * options.minutes
    steps = [*right_steps(bench), *dense_steps(options.tokens, bench)]
    steps += [*list_steps(options.tokens, bench), *varied_steps(options.tokens, bench)]
    for step in steps:
        if time.monotonic() > deadline_s:
            break
        try:
            found = step()
        # Kernels fail in the compilers' own ways, and every one of them is an answer here.
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        results["cases"].append(found)
        print(json.dumps(found), flush=True)
        _write(results, options.json)
    results["verdicts"] = verdicts(results["cases"])
    print(json.dumps(results["verdicts"]), flush=True)
    _write(results, options.json)
    return 0


def right_steps(bench: Bench) -> Iterator[Callable[[], Found]]:
    for name, boundaries in itertools.product(
        (*DENSE_KERNELS, LISTS), ((0, 1000, 1003, 3000, 4096), (0, 128, 129, 700))
    ):
        yield lambda name=name, cut=boundaries: right(name, cut, bench)


def right(kernel: str, boundaries: tuple[int, ...], bench: Bench) -> Found:
    """Largest errors of out, lse, dq, dk, dv over each tensor's largest entry, those of repeats
    against the first run, and how many runs and neighbours of a document of NaN had NaN."""
    layout = packed_layout(boundaries, BLOCK_SIZE, bench.device)
    case = Case(tokens=boundaries[-1], block_size=BLOCK_SIZE, budget=1, skewed=False)
    inputs = inputs_of(case, bench.shape, bench.device, bench.dtype)
    found: Found = {"case": "right", "kernel": kernel, "boundaries": boundaries}
    everything = Selection.of_everything(LayoutPair.within(layout), bench.shape.kv_heads)
    obstacle = (
        KERNELS["fa4"].obstacle(inputs[0], inputs[2], everything)
        if kernel == LISTS
        else _obstacle(kernel, inputs, layout)
    )
    if obstacle:
        return found | {"left out": obstacle}
    # A sink merges another part's LSE into what backward is given.
    sink_H = torch.linspace(-1.0, 3.0, bench.shape.query_heads, device=bench.device)
    how = {"softmax_scale": bench.shape.softmax_scale, "sink_H": sink_H}
    dout = torch.randn_like(inputs[0])

    def run(attend: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        outputs = attend(*leaves)
        gradients = torch.autograd.grad(outputs[0], leaves, dout.to(dtype))
        return [x.detach().double() for x in (*outputs, *gradients)]

    def ask(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if kernel == LISTS:
            return block_sparse_attention(q, k, v, everything, implementation="fa4", **how)
        return dense_attention(q, k, v, layout, kernel=kernel, **how)

    exact = run(
        lambda q, k, v: block_sparse_attention(
            q, k, v, everything, implementation="reference", **how
        ),
        torch.float64,
    )
    first = run(ask, bench.dtype)
    runs = REPEATS if bench.device.type == "cuda" else 2
    apart, with_nan = 0.0, 0
    for _ in range(runs):
        again = run(ask, bench.dtype)
        with_nan += any(bool(x.isnan().any()) for x in again)
        apart = max(apart, *_off(again, first))
    lost = slice(boundaries[-2], boundaries[-1])
    with torch.no_grad():
        for x in inputs:
            x[lost] = torch.nan
    spread = [bool(x[: lost.start].isnan().any()) for x in run(ask, bench.dtype)]
    return found | {
        "errors": _off(first, exact),
        "repeats_apart": apart,
        "runs": runs,
        "runs_with_nan": with_nan,
        "nan_reaches_others": spread,
    }


def dense_steps(tokens: int, bench: Bench) -> Iterator[Callable[[], Found]]:
    for documents in (1, 16, 64):
        boundaries = [tokens * i // documents for i in range(documents + 1)]
        for name, attend in _contenders(boundaries, bench).items():
            yield lambda cut=boundaries, of=(name, attend): _timed("dense", *of, cut, bench)


def list_steps(tokens: int, bench: Bench) -> Iterator[Callable[[], Found]]:
    names = [name for name in ("triton", "fa4") if name in KERNELS]
    if bench.device.type == "cpu":
        names = ["blocks"]
    for budget, name in itertools.product((8, 32, 128), names):
        yield lambda budget=budget, name=name: lists(tokens, budget, name, bench)


def lists(tokens: int, budget: int, name: str, bench: Bench) -> Found:
    block_size = min(BLOCK_SIZE, tokens // 4)
    case = Case(tokens=tokens, block_size=block_size, budget=budget, skewed=False)
    selection = selection_of(case, bench.shape, bench.device)
    inputs = inputs_of(case, bench.shape, bench.device, bench.dtype)
    pairs = selected_pairs(selection, bench.shape)
    found = measured_contender(name, ours(selection, bench.shape, name), inputs, pairs, bench, {})
    return {"case": "lists", "kernel": name, "budget": budget, **found}


def varied_steps(tokens: int, bench: Bench) -> Iterator[Callable[[], Found]]:
    for name in _contenders([0, tokens], bench):
        yield lambda name=name: varied(name, tokens, bench)


def varied(name: str, tokens: int, bench: Bench) -> Found:
    """ms of forward and backward, the host's included, of layouts never seen before, then again."""
    drawn = random.Random(0)
    layouts = []
    for _ in range(50 if bench.device.type == "cuda" else 2):
        cuts = drawn.sample(range(1, tokens), drawn.randint(0, min(40, tokens - 1)))
        layouts.append([0, *sorted(cuts), tokens])
    case = Case(tokens=tokens, block_size=BLOCK_SIZE, budget=1, skewed=False)
    inputs = inputs_of(case, bench.shape, bench.device, bench.dtype)
    dout = torch.randn_like(inputs[0])
    times_ms: list[list[float]] = []
    for _ in range(2):
        times_ms.append([])
        for boundaries in layouts:
            begin_s = time.perf_counter()
            out = _contenders(boundaries, bench)[name](*inputs)
            torch.autograd.grad(out, inputs, dout)
            if bench.device.type == "cuda":
                torch.cuda.synchronize()
            times_ms[-1].append((time.perf_counter() - begin_s) * 1e3)
    first, steady = ({"mean_ms": sum(x) / len(x), "max_ms": max(x)} for x in times_ms)
    return {"case": "varied", "kernel": name, "first": first, "steady": steady}


def verdicts(found: list[Found]) -> Found:
    """Ratios of times, and whether they are low enough; where both were measured."""
    both: dict[tuple[Any, ...], dict[str, float]] = {}
    for each in found:
        if "both" in each:
            key = each["case"], each.get("documents", each.get("budget"))
            both.setdefault(key, {})[each["kernel"]] = each["both"]["median_ms"]
    result = {}
    for (kind, size), times_ms in both.items():
        other, most = ("torch", MOST_OF_TORCH) if kind == "dense" else ("triton", MOST_OF_TRITON)
        if {"fa4", other} <= times_ms.keys():
            ratio = times_ms["fa4"] / times_ms[other]
            result[f"{kind} {size}"] = {f"fa4 over {other}": ratio, "worth it": ratio <= most}
    return result


def _contenders(boundaries: list[int], bench: Bench) -> dict[str, Attend]:
    """Kernels of whole documents, and cuDNN's, a document at a time."""
    layout = packed_layout(boundaries, BLOCK_SIZE, bench.device)

    def by(kernel: Any) -> Attend:
        scale = bench.shape.softmax_scale
        return lambda q, k, v: dense_attention(q, k, v, layout, softmax_scale=scale, kernel=kernel)[
            0
        ]

    found = {name: by(name) for name in DENSE_KERNELS}
    if bench.device.type == "cuda":
        others: Any = SimpleNamespace(boundaries=boundaries)
        found["dense cudnn"] = torchs_contenders(others, bench.shape)["dense cudnn"]
    return found


def _timed(kind: str, name: str, attend: Attend, boundaries: list[int], bench: Bench) -> Found:
    case = Case(tokens=boundaries[-1], block_size=BLOCK_SIZE, budget=1, skewed=False)
    inputs = inputs_of(case, bench.shape, bench.device, bench.dtype)
    lengths = [b - a for a, b in itertools.pairwise(boundaries)]
    pairs = bench.shape.query_heads * sum(n * (n + 1) // 2 for n in lengths)
    found = measured_contender(name, attend, inputs, pairs, bench, {})
    return {"case": kind, "kernel": name, "documents": len(lengths), **found}


def _obstacle(kernel: Any, inputs: list[Tensor], layout: PackedLayout) -> str | None:
    return dense_kernel(inputs[0], inputs[2], layout, kernel)[1]


def _off(results: list[Tensor], right: list[Tensor]) -> list[float]:
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(results, right, strict=True)]


def _write(results: Found, path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
