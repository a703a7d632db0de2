# SPDX-License-Identifier: Apache-2.0
"""How evenly sparse attention falls on the ranks and steps of a ring, by layout and by mask.

    python benchmarks/ring_balance.py --json results.json
    python benchmarks/ring_balance.py --runs DIRECTORY   # and masks of trained models
    python benchmarks/ring_balance.py --quick

Generated masks are those of 512K tokens in blocks of 128 on 32 ranks: diagonals (near ones often,
far ones seldom), columns, and lists of blocks that every block chooses by itself. Masks of trained
models are what ``benchmarks/quality.py --directory DIRECTORY`` left there. *worker*: the greatest
total of a rank over the mean. *step*: what ranks take that wait for the slowest at every step, over
the mean. Times are simulated forward passes at the link speeds that MTraining (arXiv:2510.18830)
reports for four nodes of eight, where perfect balance takes 16.32 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ring_times import (
    LAYOUTS,
    Links,
    columns_work,
    diagonals_work,
    flat_ring_ms,
    gathered_ms,
    hierarchical_ring_ms,
    step_imbalance,
    work_of_ranks,
    worker_imbalance,
)

BLOCKS, RANKS, SEEDS = 4096, 32, 5
QUICK_BLOCKS, QUICK_RANKS, QUICK_SEEDS = 256, 8, 2
COLUMN_TOKENS = 8
"""Single columns of a block that has any, of its 128."""
MODEL_RANKS = (4, 8)
LINKS = Links(inner_ms=0.13, outer_ms=0.98, node_ranks=8)
STEP_MS = 0.51
"""Mean computation of a rank at a step, as reported."""
KV_HEADS = 2


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Work that goes round a ring, and work on keys that every rank has gathered before."""

    ring_NN: np.ndarray
    gathered_NN: np.ndarray | None = None


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    blocks, ranks, seeds = (
        (QUICK_BLOCKS, QUICK_RANKS, QUICK_SEEDS) if options.quick else (BLOCKS, RANKS, SEEDS)
    )
    generated: dict[str, list[Mask]] = {}
    for seed in range(seeds):
        for name, mask in _generated(blocks, np.random.default_rng(seed)):
            generated.setdefault(name, []).append(mask)
    results = {
        "benchmark": "ring_balance",
        "blocks": blocks,
        "ranks": ranks,
        "seeds": seeds,
        "links": vars(LINKS),
        "step_ms": STEP_MS,
        "generated": {name: _by_layout(masks, ranks) for name, masks in generated.items()},
        "trained": {
            f"{name}, {ranks} ranks": _by_layout(masks, ranks)
            for name, masks in _trained(options.runs)
            for ranks in MODEL_RANKS
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
    parser.add_argument("--runs", type=Path, help="directory of benchmarks/quality.py")
    parser.add_argument("--quick", action="store_true", help="smaller masks; seconds")
    options = parser.parse_args(arguments)
    if options.runs is not None and not options.runs.is_dir():
        parser.error(f"--runs {options.runs}: must be a directory that quality.py --directory left")
    return options


def _generated(blocks: int, generator: np.random.Generator) -> Iterator[tuple[str, Mask]]:
    far = (generator.pareto(0.7, blocks // 40) * 4).astype(np.int64) % blocks
    diagonals_NN = diagonals_work(blocks, {0, 1, *far.tolist()})
    chosen = {0, *generator.choice(blocks, blocks // 64, replace=False).tolist()}
    columns_NN = columns_work(blocks, chosen) * (diagonals_NN == 0)
    single_NN = columns_NN * COLUMN_TOKENS / 128
    yield "every block reads every block", Mask(ring_NN=np.ones((blocks, blocks)))
    yield "diagonals", Mask(ring_NN=diagonals_NN)
    yield "diagonals, columns as whole blocks", Mask(ring_NN=diagonals_NN + columns_NN)
    yield "diagonals, single columns", Mask(ring_NN=diagonals_NN + single_NN)
    yield (
        "diagonals, single columns gathered",
        Mask(ring_NN=diagonals_NN, gathered_NN=single_NN),
    )
    yield "lists of blocks, half near", Mask(ring_NN=_lists(blocks, 32, generator))


def _lists(blocks: int, budget: int, generator: np.random.Generator) -> np.ndarray:
    """Every block reads itself, the blocks before it and the first one, else any."""
    back_NN = np.arange(blocks)[:, None] - np.arange(blocks)
    score_NN = generator.random((blocks, blocks))
    score_NN[(back_NN >= 0) & (back_NN <= budget // 2)] = 2.0
    score_NN[:, 0] = 2.0
    score_NN[back_NN < 0] = -1.0
    least_N1 = np.partition(score_NN, -budget, axis=1)[:, -budget, None]
    return ((score_NN >= least_N1) & (back_NN >= 0)).astype(np.float64)


def _trained(runs: Path | None) -> Iterator[tuple[str, list[Mask]]]:
    """Masks of every run that left some, by the run's name."""
    if runs is None:
        return
    for folder in sorted({path.parent for path in runs.glob("*/work_*.npz")}):
        ring, apart = [], []
        for path in sorted(folder.glob("work_*.npz")):
            arrays = np.load(path)
            for place in range(len(arrays.files) // 2):
                blocks_NN, columns_NN = arrays[f"blocks{place}"], arrays[f"columns{place}"]
                ring.append(Mask(ring_NN=blocks_NN + columns_NN))
                apart.append(Mask(ring_NN=blocks_NN, gathered_NN=columns_NN))
        if ring:
            yield folder.name, ring
            if any(mask.gathered_NN is not None and mask.gathered_NN.any() for mask in apart):
                yield f"{folder.name}, columns gathered", apart


def _by_layout(masks: list[Mask], ranks: int) -> dict[str, dict[str, float]]:
    return {
        name: _means([_figures(mask, name, ranks) for mask in masks]) | {"masks": len(masks)}
        for name in LAYOUTS
    }


def _figures(mask: Mask, layout: str, ranks: int) -> dict[str, float]:
    owner_N = LAYOUTS[layout](len(mask.ring_NN), ranks)
    ring_WW = work_of_ranks(mask.ring_NN, owner_N, ranks)
    apart_W = np.zeros(ranks)
    if mask.gathered_NN is not None:
        apart_W = work_of_ranks(mask.gathered_NN, owner_N, ranks).sum(1)
    mean = (ring_WW.sum(1) + apart_W).mean()
    ring_mean = ring_WW.sum(1).mean()
    # What is gathered is computed before the ring begins, so its slowest rank adds to all.
    before = apart_W.max() / mean
    figures = {
        "worker": float((ring_WW.sum(1) + apart_W).max() / mean),
        "step": step_imbalance(ring_WW) * float(ring_mean / mean) + float(before),
        "ring_worker": worker_imbalance(ring_WW),
    }
    if ranks % LINKS.node_ranks == 0:
        ms = ranks * STEP_MS / mean
        figures |= {
            "flat_ring_ms": flat_ring_ms(ring_WW * ms, LINKS) + float(apart_W.max() * ms),
            "hierarchical_ring_ms": hierarchical_ring_ms(ring_WW * ms, LINKS)
            + float(apart_W.max() * ms),
            "gathered_ms": gathered_ms((ring_WW + np.diag(apart_W)) * ms, LINKS, KV_HEADS),
        }
    return figures


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    """Means, and the greatest of the two imbalances."""
    found = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    return found | {f"{name}_max": max(row[name] for row in rows) for name in ("worker", "step")}


if __name__ == "__main__":
    sys.exit(main())
