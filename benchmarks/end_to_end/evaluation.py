# SPDX-License-Identifier: Apache-2.0
"""Paired statistics of measured steps."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from end_to_end.results import StepResult
from end_to_end.variants import DENSE, EXACT, FIXED, OURS, OURS_SEGMENTS, PAPER

RESAMPLES = 10_000
CONFIDENCE = 0.95
FORMULAS = {
    "step_ms": "slowest process, from a common beginning to the end of Megatron's train_step",
    "speedup": "total of the reference's step times over the variant's, same global batches",
    "interval": f"{CONFIDENCE:.0%} percentile bootstrap of that, {RESAMPLES} resamples of batches",
    "median_ratio": "median over global batches of reference step over variant step",
    "imbalance": "max/mean of computation over ranks and stages, mean over steps",
    "waiting": "share of rank time without computation, over all steps",
    "heaviest_over_mean": "computation of the heaviest micro-batch over that of the mean one: "
    "[least, mean] over steps",
    "work_ratio": "predicted work over that of the same samples at base budgets, mean over steps",
    "bound_ms": "step of the fixed budget - makespan of its measured micro-batch times + makespan "
    "with every micro-batch at its stage's mean; without a pipeline: step - slowest rank's "
    "computation + mean of the ranks' computation",
    "over_bound": "total of the variant's step times over total of bound_ms",
}

Batches = Sequence[Mapping[str, StepResult]]


def summarise(
    batches: Batches, *, lockstep: bool, window: int = 1, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Every variant in numbers, over the batches given (warm-up left out by the caller).

    Steps are compared by ``window``: so many together have the same samples in all variants.
    With ``lockstep`` what follows from times of micro-batches is None or left out.
    """
    known = [
        FIXED,
        DENSE,
        EXACT,
        *([OURS] if OURS_SEGMENTS in batches[0] else []),
    ]
    known += [PAPER] if lockstep else []

    def window_ms(name: str) -> np.ndarray:
        return _step_ms(batches, name).reshape(-1, window).sum(axis=1)

    references = {name: window_ms(name) for name in known if name in batches[0]}
    bound_ms = bounds_ms(batches) if FIXED in references and not lockstep else None
    waits = dict.fromkeys(("heaviest_over_mean", "imbalance", "waiting")) if lockstep else {}
    return {
        name: _summary([batch[name] for batch in batches])
        | waits
        | {
            f"versus_{reference}": compare(times_ms, window_ms(name), seed=seed)
            for reference, times_ms in references.items()
        }
        | (
            {}
            if bound_ms is None
            else {"over_bound": float(_step_ms(batches, name).sum() / bound_ms.sum())}
        )
        for name in batches[0]
    }


def bounds_ms(batches: Batches) -> np.ndarray:
    """Per batch: the fixed budget's step, had its work been spread evenly."""
    return np.array([batch[FIXED].balanced_ms for batch in batches])


def _step_ms(batches: Batches, name: str) -> np.ndarray:
    return np.array([batch[name].step_ms for batch in batches])


def _summary(results: Sequence[StepResult]) -> dict[str, Any]:
    step_ms = np.array([result.step_ms for result in results])
    busy_ms = np.array([result.busy_ms for result in results])
    heaviest = [result.heaviest_over_mean for result in results]
    low, middle, high = np.quantile(step_ms, (0.25, 0.5, 0.75)).tolist()
    return {
        "total_ms": float(step_ms.sum()),
        "median_ms": middle,
        "quartiles_ms": [low, high],
        "heaviest_over_mean": [min(heaviest), fmean(heaviest)],
        "imbalance": float((busy_ms.max(axis=1) / busy_ms.mean(axis=1)).mean()),
        "waiting": float(1.0 - busy_ms.sum() / (step_ms.sum() * busy_ms.shape[1])),
        "coverage": _mean_of_known([result.coverage for result in results]),
        "base_coverage": _mean_of_known([result.base_coverage for result in results]),
        "work_ratio": _mean_of_known([result.work_ratio for result in results]),
        "peak_megabytes": [
            max(known) if (known := [peak for peak in peaks if peak is not None]) else None
            for peaks in zip(*(result.peak_megabytes for result in results), strict=True)
        ],
        "plan_ms": fmean(result.plan_ms for result in results),
        "plan_wait_ms": fmean(result.plan_wait_ms for result in results),
        "lm_loss": fmean(result.lm_loss for result in results),
    }


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def compare(reference_ms: np.ndarray, variant_ms: np.ndarray, *, seed: int) -> dict[str, Any]:
    """Paired speedup of a variant over a reference; entry i of both is global batch i."""
    ratio = reference_ms / variant_ms
    picks = np.random.default_rng(seed).integers(len(ratio), size=(RESAMPLES, len(ratio)))
    tail = (1.0 - CONFIDENCE) / 2
    totals = reference_ms[picks].sum(axis=1) / variant_ms[picks].sum(axis=1)
    return {
        "speedup": float(reference_ms.sum() / variant_ms.sum()),
        "interval": np.quantile(totals, (tail, 1.0 - tail)).tolist(),
        "median_ratio": float(np.median(ratio)),
        "least_ratio": float(ratio.min()),
    }
