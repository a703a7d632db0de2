# SPDX-License-Identifier: Apache-2.0
"""The picture of docs/QUALITY.md: coverage against attention mass, and against loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quality.arms import DENSE, FIXED
from quality.correlation import covered_losses
from sparsebalance_megatron.report.charts.figure import BASELINE, FAINT, RUN, draw, standalone

_INCHES = 2.1
_MOST_POINTS = 400
_COLOURS = {DENSE: BASELINE, FIXED: RUN}


def proxy_picture(tasks: Mapping[str, Any]) -> str:
    """An SVG: a row per task, a point per document, layer and budget of the first seed."""
    probed = {
        task: {name: arms[name]["probe"][0] for name in _COLOURS if arms.get(name, {}).get("probe")}
        for task, arms in tasks.items()
    }
    shown = {task: probes for task, probes in probed.items() if probes}

    def paint(figure: Any) -> None:
        rows = figure.subplots(len(shown), 2, squeeze=False)
        for (task, probes), (mass_axis, loss_axis) in zip(shown.items(), rows, strict=True):
            mass_axis.plot((0, 1), (0, 1), color=FAINT, linewidth=1.0)
            for name, probe in probes.items():
                _, _, _, coverage, mass = np.array(probe["points"]).T
                style = {"color": _COLOURS[name], "s": 5.0, "linewidths": 0, "alpha": 0.5}
                some = thinned(len(coverage))
                mass_axis.scatter(coverage[some], mass[some], label=f"{name} ({task})", **style)
                pairs = covered_losses(probe)[thinned(len(probe["losses"]))]
                loss_axis.scatter(pairs[:, 1], pairs[:, 2], **style)
            mass_axis.set(xlabel="router coverage", ylabel="attention mass kept", title=task)
            loss_axis.set(xlabel="router coverage", ylabel="loss at that budget, nats")
            mass_axis.legend(frameon=False, fontsize=7.0)

    return standalone(draw("quality-proxy", paint, height=_INCHES * max(1, len(shown))))


def thinned(points: int) -> np.ndarray:
    """Indices of points spread evenly, at most so many as a picture can show."""
    return np.unique(np.linspace(0, points - 1, min(points, _MOST_POINTS)).astype(np.int64))
