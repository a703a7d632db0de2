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


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """Pearson's r where a budget leaves something out, means over seeds.

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


def proxy_of(probes: Sequence[Probe]) -> Proxy:
    """Of the probes of an arm's seeds."""
    found = [_of_seed(probe) for probe in probes]
    return Proxy(**{name: float(np.mean([each[name] for each in found])) for name in found[0]})


def _of_seed(probe: Probe) -> dict[str, float]:
    points = np.array(probe["points"])
    _, layer, budget, coverage, mass = points[points[:, 3] < _ALL].T
    pairs = covered_losses(probe)
    pairs = pairs[pairs[:, 1] < _ALL]
    return {
        "mass": correlation(coverage, mass),
        "mass_within": _within(coverage, mass, [*zip(layer, budget, strict=True)]),
        "excess": float((mass - coverage).mean()),
        "loss": correlation(pairs[:, 1], pairs[:, 2]),
        "loss_within": _within(pairs[:, 1], pairs[:, 2], pairs[:, 0].tolist()),
    }


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


def by_budget(probes: Sequence[Probe], *, accuracy: bool) -> dict[int, float]:
    """Mean accuracy or loss of documents at every budget."""
    rows = np.concatenate([np.array(probe["losses"]) for probe in probes])
    column = 3 if accuracy else 2
    return {
        int(budget): float(rows[rows[:, 1] == budget, column].mean())
        for budget in np.unique(rows[:, 1])
    }


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
