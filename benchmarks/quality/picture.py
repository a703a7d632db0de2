# SPDX-License-Identifier: Apache-2.0
"""The picture of research/quality.md: coverage against attention mass, and against loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quality.arms import DENSE, FIXED
from sparsebalance_megatron.report.charts.figure import BASELINE, FAINT, RUN, draw, standalone

_INCHES = 2.1
_COLOURS = {DENSE: BASELINE, FIXED: RUN}


def proxy_picture(tasks: Mapping[str, Any]) -> str:
    """An SVG: a row per task, a point per document, layer and budget of the first seed."""
    shown = {
        task: {
            name: arms[name]["scatter"][0] for name in _COLOURS if arms.get(name, {}).get("scatter")
        }
        for task, arms in tasks.items()
    }
    shown = {task: found for task, found in shown.items() if found}

    def paint(figure: Any) -> None:
        rows = figure.subplots(len(shown), 2, squeeze=False)
        for (task, found), (mass_axis, loss_axis) in zip(shown.items(), rows, strict=True):
            mass_axis.plot((0, 1), (0, 1), color=FAINT, linewidth=1.0)
            for name, points in found.items():
                style = {"color": _COLOURS[name], "s": 5.0, "linewidths": 0, "alpha": 0.5}
                mass_axis.scatter(*np.transpose(points["mass"]), label=name, **style)
                loss_axis.scatter(*np.transpose(points["loss"]), **style)
            mass_axis.set(xlabel="router coverage", ylabel="attention mass kept", title=task)
            loss_axis.set(xlabel="router coverage", ylabel="loss at that budget, nats")
            mass_axis.legend(frameon=False, fontsize=7.0)

    return standalone(draw("quality-proxy", paint, height=_INCHES * max(1, len(shown))))
