# SPDX-License-Identifier: Apache-2.0
"""Attention kernels on a CUDA device against dense SDPA and FlexAttention, in the same run.

    python benchmarks/kernels.py --json results.json
    python benchmarks/kernels.py --json tiles.json --tokens 65536 --tune

Per case: forward, backward and both, as median and spread in ms, and TFLOP/s counted on the query,
key pairs that the selection lets be read (4 D operations a pair forward, 10 D backward); the router
(scores, coverage, selection), as chosen and in torch, and the index of the backward pass;
how far the kernels' output lies from FlexAttention's. flash-attn and FlashMoBA take part where they
are installed. Memory is filled with NaN before a contender runs, and its results must be
finite. The second-level cache is overwritten before every timed call. ``--tune`` instead times the
tile shapes that ``kernel_resources.py --candidates`` finds promising, one kernel's at a time; for
selections by token also the size of the buffer for partial results.

``--device cpu`` runs all of it but the GPU contenders, with TRITON_INTERPRET=1 in the environment:
it checks the benchmark, and its times say nothing. Without it, exits with status 2 where no CUDA
device is visible.
"""

import argparse
import contextlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import triton
from kernel_contenders import (
    OPTIONAL,
    Attend,
    Case,
    Shape,
    cases,
    causal_pairs,
    dense,
    inputs_of,
    on_cpu,
    ours,
    selected_pairs,
    selection_of,
    sparse,
)
from torch import Tensor

from sparsebalance_megatron.attention.kernels.triton import (
    key_block_kernel,
    query_block_kernel,
    token_kernels,
)
from sparsebalance_megatron.attention.kernels.triton.index import inverse_lists
from sparsebalance_megatron.attention.kernels.triton.tiles import (
    Tile,
    capability_of,
    tiles_for,
)
from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.attention.select.block_topk import BlockTopK
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.config import DEFAULT_SELECTION, Router
from sparsebalance_megatron.selector_registry import BUILT_IN

OPERATIONS_PER_PAIR = {"forward": 4, "backward": 10, "both": 14}
POISONED_BYTES = 16 << 30
PROMISING_TILES = {
    "forward": [
        Tile(rows=128, columns=128, warps=8, stages=2),
        Tile(rows=128, columns=64, warps=8, stages=3),
        Tile(rows=128, columns=64, warps=8, stages=4),
        Tile(rows=64, columns=128, warps=4, stages=3),
        Tile(rows=64, columns=64, warps=4, stages=2),
        Tile(rows=64, columns=64, warps=4, stages=3),
    ],
    "query_gradient": [
        Tile(rows=128, columns=128, warps=8, stages=2),
        Tile(rows=128, columns=64, warps=8, stages=2),
        Tile(rows=128, columns=64, warps=8, stages=4),
        Tile(rows=64, columns=64, warps=4, stages=2),
        Tile(rows=64, columns=64, warps=4, stages=3),
    ],
    "key_gradient": [
        Tile(rows=64, columns=128, warps=8, stages=2),
        Tile(rows=64, columns=128, warps=8, stages=4),
        Tile(rows=64, columns=64, warps=4, stages=2),
        Tile(rows=64, columns=64, warps=8, stages=3),
    ],
}
PROMISING_TOKEN_TILES = {
    "forward": [
        Tile(rows=128, columns=64, warps=8, stages=3),
        Tile(rows=64, columns=128, warps=4, stages=3),
        Tile(rows=64, columns=64, warps=4, stages=3),
    ],
    "query_gradient": [
        Tile(rows=128, columns=32, warps=8, stages=3),
        Tile(rows=64, columns=64, warps=4, stages=3),
    ],
    "key_gradient": [
        Tile(rows=64, columns=128, warps=8, stages=2),
        Tile(rows=64, columns=64, warps=4, stages=3),
        Tile(rows=64, columns=64, warps=8, stages=3),
    ],
}
PARTIAL_BYTES = [32 << 20, 64 << 20, 1 << 30]
"""The first may stay in the second-level cache of an H100, which has 50 MB."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where and how often."""

    device: torch.device
    dtype: torch.dtype
    shape: Shape
    rounds: int

    def times_ms(self, steps: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
        """Milliseconds of each step per round; steps run in order, each on a cold cache."""
        flush = torch.empty(256 << 20 if self._on_gpu else 1, dtype=torch.int8, device=self.device)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for timed in [False] * 2 + [True] * self.rounds:
            for name, step in steps.items():
                flush.zero_()
                spent_ms = self._time_ms(step)
                if timed:
                    times[name].append(spent_ms)
        return times

    def poison(self) -> None:
        """What the allocator hands out next holds NaN, so reading it unwritten shows.

        Memory is left to the driver, which loads kernels into it.
        """
        if self._on_gpu:
            free_bytes, _ = torch.cuda.mem_get_info()
            elements = min(free_bytes // 2, POISONED_BYTES) // 2
            torch.full((elements,), torch.nan, dtype=torch.bfloat16, device=self.device)

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _time_ms(self, step: Callable[[], None]) -> float:
        if not self._on_gpu:
            begin_ns = time.perf_counter_ns()
            step()
            return (time.perf_counter_ns() - begin_ns) / 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/kernels.py: no CUDA device is visible; nothing measured", file=sys.stderr)
        return 2
    on_gpu = options.device == "cuda"
    bench = Bench(
        device=torch.device(options.device),
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        shape=Shape(
            query_heads=options.query_heads, kv_heads=options.kv_heads, head_dim=options.head_dim
        ),
        rounds=options.rounds,
    )
    results: dict[str, Any] = {
        "machine": {
            "device": torch.cuda.get_device_name() if on_gpu else "cpu: times say nothing",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        },
        "shape": asdict(bench.shape),
        "dtype": str(bench.dtype).removeprefix("torch."),
        "rounds": bench.rounds,
        "not_installed": [name for name in OPTIONAL if importlib.util.find_spec(name) is None],
        "cases": {},
        "left_out": [],
    }
    if options.resume:
        results["cases"] = _measured_before(results, options.json)
    deadline_s = time.monotonic() + 60 * options.minutes
    dense_results: dict[tuple[int, ...], dict[str, Any]] = {}
    for case in cases(options.tokens, options.block_sizes, options.selections):
        if case.name in results["cases"]:
            continue
        if time.monotonic() > deadline_s:
            results["left_out"].append(case.name)
            continue
        if options.tune:
            found = _tuned(case, bench, deadline_s)
        else:
            found = _measured(case, bench, dense_results)
        results["cases"][case.name] = found
        print("\n".join(_lines(case, found)), flush=True)
        if on_gpu:
            torch.cuda.empty_cache()
        _write(results, options.json)
    _write(results, options.json)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write; default: none")
    parser.add_argument(
        "--resume", action="store_true", help="keep the cases that --json has of this machine"
    )
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds, after two untimed")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[65536, 8192, 16384, 32768, 131072, 262144]
    )
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[256, 128])
    parser.add_argument(
        "--selections",
        nargs="+",
        choices=list(BUILT_IN),
        default=["previous-block", DEFAULT_SELECTION],
        help=f"who selects; default: previous-block {DEFAULT_SELECTION}",
    )
    parser.add_argument("--query-heads", type=int, default=Shape.query_heads)
    parser.add_argument("--kv-heads", type=int, default=Shape.kv_heads)
    parser.add_argument("--head-dim", type=int, default=Shape.head_dim)
    parser.add_argument("--tune", action="store_true", help="time other tile shapes")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="begin nothing after that time; what is left out is listed. Default: no limit",
    )
    options = parser.parse_args(arguments)
    if options.resume and options.json is None:
        parser.error("--resume: name the file with --json")
    return options


def _measured(
    case: Case, bench: Bench, dense_results: dict[tuple[int, ...], dict[str, Any]]
) -> dict[str, Any]:
    """``dense_results``: of rows measured before; they depend on no block size and budget."""
    shape = bench.shape
    selection = selection_of(case, shape, bench.device)
    inputs = inputs_of(case, shape, bench.device, bench.dtype)
    pairs, all_pairs = selected_pairs(selection, shape), causal_pairs(case, shape)
    results: dict[str, Any] = {
        "density": pairs / all_pairs,
        "router": _router(case, inputs, selection.query_layout, bench, "auto"),
        "index": _summary(
            bench.times_ms({"index": lambda: _index(selection, bench.shape.kv_heads)})["index"]
        ),
    }
    outputs: dict[str, Tensor] = {}
    if bench.device.type == "cuda":
        if isinstance(selector_named(case.selection), BlockTopK):
            in_torch = _router(case, inputs, selection.query_layout, bench, "torch")
            results["router in torch"] = in_torch
        for name, attend in sparse(case, shape, selection).items():
            results[name] = measured_contender(name, attend, inputs, pairs, bench, outputs)
        row = tuple(case.boundaries)
        if row not in dense_results:
            dense_results[row] = {
                name: measured_contender(name, attend, inputs, all_pairs, bench, {})
                for name, attend in dense(case, shape).items()
            }
        results |= dense_results[row]
    else:
        for name, attend in on_cpu(selection, case, shape).items():
            counted = all_pairs if name.startswith("dense") else pairs
            results[name] = measured_contender(name, attend, inputs, counted, bench, outputs)
    if {"triton", "flex"} <= outputs.keys():
        difference_THD = outputs["triton"].float() - outputs["flex"].float()
        results["largest difference, triton and flex"] = float(difference_THD.abs().max())
    return results


def measured_contender(
    name: str,
    attend: Attend,
    inputs: list[Tensor],
    pairs: int,
    bench: Bench,
    outputs: dict[str, Tensor],
) -> dict[str, Any]:
    """A contender's results; a missing backend or too little memory is one of them."""
    try:
        results, out_THD = timed_contender(attend, inputs, pairs, bench)
    except (RuntimeError, ValueError, AssertionError, TypeError, ImportError) as error:
        return {"error": f"{type(error).__name__}: {str(error).strip().partition('\n')[0]}"}
    outputs[name] = out_THD.detach().cpu()
    return results


def timed_contender(
    attend: Attend, inputs: list[Tensor], pairs: int, bench: Bench
) -> tuple[dict[str, Any], Tensor]:
    bench.poison()
    dout = torch.randn_like(inputs[0])
    state: dict[str, Any] = {}

    def run_forward() -> None:
        state["out"] = attend(*inputs)

    def run_backward() -> None:
        state["gradients"] = torch.autograd.grad(state["out"], inputs, dout)

    times_ms = bench.times_ms({"forward": run_forward, "backward": run_backward})
    if not all(bool(x.isfinite().all()) for x in (state["out"], *state["gradients"])):
        raise RuntimeError("results are not finite")
    pairs_ms = zip(times_ms["forward"], times_ms["backward"], strict=True)
    times_ms["both"] = [a + b for a, b in pairs_ms]
    results = {}
    for name, spent_ms in times_ms.items():
        operations = OPERATIONS_PER_PAIR[name] * bench.shape.head_dim * pairs
        results[name] = _summary(spent_ms)
        results[name]["tflops"] = operations / results[name]["median_ms"] / 1e9
    return results, state["out"]


def _router(
    case: Case, inputs: list[Tensor], layout: PackedLayout, bench: Bench, router: Router
) -> dict[str, float]:
    """What a layer does before its attention: scores, coverage, selection."""
    budgets_S = torch.tensor(case.budgets, device=bench.device)
    selector = selector_named(case.selection, router)

    def route() -> None:
        ranking = rank_sequence(
            selector,
            *(inputs[0], inputs[1], layout),
            softmax_scale=bench.shape.softmax_scale,
            max_budget=case.budget,
            observe=True,
        )
        selector.coverage(ranking)
        selector.select(ranking, budgets_S)

    return _summary(bench.times_ms({"router": route})["router"])


def _tuned(case: Case, bench: Bench, deadline_s: float) -> dict[str, Any]:
    """Forward and backward with other tile shapes of one kernel, the others from the table."""
    selection = selection_of(case, bench.shape, bench.device)
    inputs = inputs_of(case, bench.shape, bench.device, bench.dtype)
    pairs = selected_pairs(selection, bench.shape)
    attend = ours(selection, bench.shape, "triton")
    results = {"table": measured_contender("table", attend, inputs, pairs, bench, {})}
    for name, change in _changes(selection.by_token, bench):
        if time.monotonic() > deadline_s:
            results[name] = {"error": "left out: no time left"}
            continue
        with contextlib.ExitStack() as changed:
            for module, attribute, value in change:
                changed.enter_context(patch.object(module, attribute, value))
            results[name] = measured_contender(name, attend, inputs, pairs, bench, {})
    return results


def _changes(
    by_token: bool, bench: Bench
) -> Iterator[tuple[str, list[tuple[ModuleType, str, object]]]]:
    """Names of versions to time, and which attribute of which module has which value in them."""
    modules = (query_block_kernel, key_block_kernel)
    if by_token:
        modules = (token_kernels, token_kernels)
    table = tiles_for(bench.shape.head_dim, bench.dtype.itemsize, capability_of(bench.device))
    for kernel, tiles in (PROMISING_TOKEN_TILES if by_token else PROMISING_TILES).items():
        for tile in tiles:
            version = f"{kernel} {tile.rows} x {tile.columns}, {tile.warps} warps, "
            version += f"{tile.stages} stages"
            changed = table._replace(**{kernel: tile})
            yield version, [(module, "tiles_of", lambda *_, it=changed: it) for module in modules]
    if by_token:
        for size in PARTIAL_BYTES:
            yield (
                f"{size >> 20} MiB of partial results",
                [(token_kernels, "PARTIAL_BYTES", size)],
            )


def _index(selection: Selection, kv_heads: int) -> None:
    """Inverts the lists, as the backward pass does."""
    inverse_lists(selection, kv_heads, wanted_items=256, most_cut_items=1 << 20)


def _summary(times_ms: list[float]) -> dict[str, float]:
    return {
        "median_ms": statistics.median(times_ms),
        "min_ms": min(times_ms),
        "max_ms": max(times_ms),
    }


def _lines(case: Case, found: dict[str, Any]) -> list[str]:
    """A case as text: milliseconds, and TFLOP/s where pairs are counted."""
    density = f", density {100 * found['density']:.0f} %" if "density" in found else ""
    lines = [case.name + density]
    for name, result in found.items():
        if isinstance(result, float):
            continue
        if "error" in result:
            text = result["error"]
        elif "median_ms" in result:
            text = f"{result['median_ms']:.3f} ms"
        else:
            text = ", ".join(
                f"{part} {x['median_ms']:.2f} ms ({x['min_ms']:.2f} to {x['max_ms']:.2f}) "
                f"{x['tflops']:.0f} TFLOP/s"
                for part, x in result.items()
            )
        lines.append(f"  {name}: {text}")
    return lines


def _measured_before(results: dict[str, Any], path: Path) -> dict[str, Any]:
    """The cases in a file, if it is of the same machine, shape, data type and rounds."""
    if not path.exists():
        return {}
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    described = ("machine", "shape", "dtype", "rounds", "not_installed")
    if any(before.get(name) != results[name] for name in described):
        print(f"{path}: measured otherwise; begun anew", file=sys.stderr)
        return {}
    cases_before: dict[str, Any] = before["cases"]
    return cases_before


def _write(results: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
