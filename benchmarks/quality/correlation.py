# SPDX-License-Identifier: Apache-2.0
"""How well router coverage tells what a budget costs: in attention mass, and in loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Probe = Mapping[str, Sequence[Sequence[float]]]
"""``points``: [document, layer, budget, coverage, mass]; ``losses``: [document, budget, loss,
accuracy]."""
_ALL = 1.0 - 1e-6
"""Coverage of budgets that read whole documents, of which there is nothing to predict."""
_MOST_POINTS = 120
_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """Pearson's r of one model, where a budget leaves something out; NaN if nothing varies.

    Attributes:
        mass: coverage and mass, over documents, layers and budgets.
        mass_within: the mean of those of every layer and budget by itself.
        excess: mean of mass less coverage.
        loss: coverage, a mean over layers, and loss, over documents and budgets.
        loss_within: the mean of those of every budget by itself.
    """

    mass: float
    mass_within: float
    excess: float
    loss: float
    loss_within: float


def proxy_of(probe: Probe) -> Proxy:
    """Correlations of one model."""
    points = np.array(probe["points"])
    _, layer, budget, coverage, mass = points[points[:, 3] < _ALL].T
    pairs = covered_losses(probe)
    pairs = pairs[pairs[:, 1] < _ALL]
    return Proxy(
        mass=correlation(coverage, mass),
        mass_within=_within(coverage, mass, [*zip(layer, budget, strict=True)]),
        excess=float((mass - coverage).mean()),
        loss=correlation(pairs[:, 1], pairs[:, 2]),
        loss_within=_within(pairs[:, 1], pairs[:, 2], pairs[:, 0].tolist()),
    )


def covered_losses(probe: Probe) -> np.ndarray:
    """[., 3]: budget, coverage as a mean over layers, and loss, of every document and budget."""
    document, _, budget, coverage, _ = np.array(probe["points"]).T
    sums: dict[tuple[float, float], list[float]] = {}
    for key, value in zip(zip(document, budget, strict=True), coverage, strict=True):
        sums.setdefault(key, []).append(value)
    return np.array(
        [
            [each_budget, np.mean(sums[number, each_budget]), loss]
            for number, each_budget, loss, _ in probe["losses"]
        ]
    )


def by_budget(probe: Probe) -> dict[str, list[float]]:
    """``budgets``, and the mean ``loss`` and ``accuracy`` of documents at each."""
    rows = np.array(probe["losses"])
    budgets = np.unique(rows[:, 1])
    loss, accuracy = np.transpose([rows[rows[:, 1] == each, 2:].mean(axis=0) for each in budgets])
    return {
        "budgets": budgets.astype(int).tolist(),
        "loss": loss.tolist(),
        "accuracy": accuracy.tolist(),
    }


def scatter(probe: Probe) -> dict[str, list[list[float]]]:
    """As many points as a picture can show: [coverage, mass], and [coverage, loss]."""
    points, pairs = np.array(probe["points"])[:, 3:], covered_losses(probe)[:, 1:]
    return {
        "mass": _thinned(points).round(_DIGITS).tolist(),
        "loss": _thinned(pairs).round(_DIGITS).tolist(),
    }


def _thinned(points: np.ndarray) -> np.ndarray:
    """Every so many of them."""
    kept = np.linspace(0, len(points) - 1, min(len(points), _MOST_POINTS)).astype(np.int64)
    return np.asarray(points[kept])


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's r; NaN where either does not vary."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def _within(x: np.ndarray, y: np.ndarray, groups: Sequence[Any]) -> float:
    """The mean correlation of groups in which both vary."""
    members: dict[Any, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    found = [correlation(x[places], y[places]) for places in members.values()]
    known = [value for value in found if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")
