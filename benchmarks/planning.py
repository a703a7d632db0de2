# SPDX-License-Identifier: Apache-2.0
"""What planning costs against samples and ranks, and how near to the bound plans come.

    OMP_NUM_THREADS=1 python benchmarks/planning.py --json benchmarks/results/planning.json \
        --plot research/images/planning_cost.png

Plan times are CPU times of one thread, medians over repeats, on Qwen2.5-3B's 36 layers with four
pipeline stages, LongAlign-like lengths, and another coverage curve in every layer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from simulated.lengths import MAX_TOKENS, longalign_like
from simulated.setups import LAYERS, SHAPE

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.planner import plan_step
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.step_plan import StepPlan
from sparsebalance_megatron.plan.step_problem import PlanInputs

STAGES = 4
BLOCK_SIZE = SparseBalanceConfig().block_size
COST = CostModel.analytic(SHAPE, BLOCK_SIZE)
GOALS_MS = {(16, 4, 4): 10.0, (64, 8, 8): 20.0, (16384, 1024, 16): 1000.0}
"""(samples, ranks, micro-batches) to CPU ms."""
SAMPLES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
RANKS = (1, 4, 16, 64, 256, 1024)
WAYS: dict[str, dict[str, Any]] = {
    "arrival": {"batching": "arrival"},
    "length": {"batching": "length"},
    "latency": {"batching": "latency"},
    "makespan, 4 ms": {"batching": "makespan", "plan_ms": 4.0},
    "makespan": {"batching": "makespan"},
}
"""Changes of the default policy; by default search takes a share of the step that it is for."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--plot", type=Path, help="draw plan time against samples and ranks here")
    parser.add_argument("--repeats", type=int, default=20, help="of a plan that takes 100 ms")
    parser.add_argument(
        "--quick", action="store_true", help="the smallest sizes only, once; for tests"
    )
    arguments = parser.parse_args(argv)
    repeats = 1 if arguments.quick else arguments.repeats
    goals, samples, ranks, seeds = list(GOALS_MS), SAMPLES, RANKS, 24
    if arguments.quick:
        goals, samples, ranks, seeds = goals[:1], SAMPLES[:4], RANKS[:2], 1
    coverage = distinct_curves(seed=0)
    found = {
        "machine": machine(),
        "goals": [measure(*sizes, coverage, repeats) for sizes in goals],
        "samples_on_8_ranks": [measure(size, 8, 8, coverage, repeats) for size in samples],
        "16_samples_per_rank": [measure(16 * size, size, 16, coverage, repeats) for size in ranks],
        "bound": list(bound_ratios(coverage, seeds)),
    }
    for row, goal_ms in zip(found["goals"], GOALS_MS.values(), strict=False):
        row["goal_ms"] = goal_ms
    for name in ("samples_on_8_ranks", "16_samples_per_rank"):
        found[f"{name}_growth"] = growth(found[name])
    text = json.dumps(found, indent=2) + "\n"
    print(text)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text, encoding="utf-8")
    if arguments.plot is not None:
        plot(found, arguments.plot)


def distinct_curves(seed: int) -> CoverageCurves:
    """(k / n)^x with another x in every (layer, length bucket): the dearest case to plan for."""
    curves = CoverageCurves(LAYERS, MAX_TOKENS // BLOCK_SIZE, 0.0)
    exponent_LU1 = np.random.default_rng(seed).uniform(0.2, 0.5, (LAYERS, curves.buckets, 1))
    middle_U = 2.0 ** (np.arange(curves.buckets) + 0.5)
    share_UK = np.minimum(np.asarray(curves.grid) / middle_U[:, None], 1.0)
    curves.observe(share_UK**exponent_LU1, np.ones((LAYERS, curves.buckets)))
    return curves


def measure(
    samples: int, ranks: int, micro_batches: int, coverage: CoverageCurves, repeats: int
) -> dict[str, Any]:
    """CPU ms of a plan with default settings and in other ways, median and quartiles."""
    row: dict[str, Any] = {"samples": samples, "ranks": ranks, "micro_batches": micro_batches}
    job = Job.even(layers=LAYERS, ranks=ranks, stages=STAGES, micro_batches=micro_batches)
    for way, changes in WAYS.items():
        plan_settings = replace(_policy(samples), **changes)
        cpu_ms: list[float] = []
        while len(cpu_ms) < 3 or (sum(cpu_ms) < 100.0 * repeats and len(cpu_ms) < repeats):
            lengths = longalign_like(samples, len(cpu_ms)).tolist()
            started = time.process_time()
            _plan(lengths, job, plan_settings, coverage)
            cpu_ms.append((time.process_time() - started) * 1e3)
        low, middle, high = np.quantile(cpu_ms[1:], (0.25, 0.5, 0.75))
        row[way] = {
            "cpu_ms": round(float(middle), 3),
            "quartiles_ms": [round(float(low), 3), round(float(high), 3)],
            "repeats": len(cpu_ms) - 1,
        }
    return row


def bound_ratios(coverage: CoverageCurves, seeds: int) -> Iterator[dict[str, Any]]:
    """Step time over the lower bound where no sample is unhideable, ``seeds`` lengths each."""
    for ranks, micro_batches, longest in ((4, 16, 16384), (8, 16, 16384), (8, 32, 32768)):
        samples = ranks * micro_batches
        job = Job.even(layers=LAYERS, ranks=ranks, stages=STAGES, micro_batches=micro_batches)
        ratios, largest = [], 0.0
        for seed in range(seeds):
            lengths = np.random.default_rng(seed).integers(2048, longest + 1, samples)
            largest = max(largest, lengths.max() / lengths.mean())
            plan = _plan(lengths.tolist(), job, _policy(samples), coverage)
            ratios.append(plan.expectation.makespan_ms / plan.expectation.lower_bound_ms)
        yield {
            "ranks": ranks,
            "micro_batches": micro_batches,
            "lengths_tokens": [2048, longest],
            "largest_over_mean": round(float(largest), 3),
            "unhideable_limit": (micro_batches + STAGES - 1) / STAGES,
            "bound_ratio_median": round(float(np.median(ratios)), 4),
            "bound_ratio_largest": round(max(ratios), 4),
        }


def _policy(samples: int) -> PlanSettings:
    return PlanSettings.from_config(SparseBalanceConfig(), samples * MAX_TOKENS)


def _plan(
    lengths: list[int],
    job: Job,
    plan_settings: PlanSettings,
    coverage: CoverageCurves,
) -> StepPlan:
    inputs = PlanInputs(
        lengths_tokens=tuple(lengths),
        job=job,
        plan_settings=plan_settings,
        cost=COST,
        scales=StageScales.ones(STAGES),
        coverage=coverage,
    )
    return plan_step(0, inputs)


def growth(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Exponent e of plan time ~ samples^e over the upper half of the sizes."""
    upper = rows[min(len(rows) // 2, len(rows) - 2) :]
    sizes = np.log([row["samples"] for row in upper])
    return {
        way: round(float(np.polyfit(sizes, np.log([row[way]["cpu_ms"] for row in upper]), 1)[0]), 3)
        for way in WAYS
    }


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def plot(found: dict[str, Any], path: Path) -> None:
    """Plan time against samples and against ranks, logarithmic, with n log n for comparison."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    parts = (
        ("samples_on_8_ranks", "samples", "samples, 8 ranks x 8 micro-batches"),
        ("16_samples_per_rank", "ranks", "ranks, 16 samples in 16 micro-batches each"),
    )
    for axis, (name, size, label) in zip(axes, parts, strict=True):
        rows = found[name]
        sizes = np.array([row[size] for row in rows], dtype=float)
        for way in WAYS:
            axis.plot(sizes, [row[way]["cpu_ms"] for row in rows], "o-", label=way)
        total = np.array([row["samples"] for row in rows], dtype=float)
        n_log_n = total * np.log(total)
        last_ms = rows[-1]["makespan, 4 ms"]["cpu_ms"]
        axis.plot(sizes, n_log_n / n_log_n[-1] * last_ms, "k:", label="n log n")
        axis.set(xscale="log", yscale="log", xlabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("CPU ms per plan, one core")
    axes[0].legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
