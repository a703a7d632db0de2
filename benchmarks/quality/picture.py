# SPDX-License-Identifier: Apache-2.0
"""The picture of research/quality.md: coverage against attention mass, and against loss."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from quality.arms import DENSE, FIXED

_WIDTH_INCHES, _ROW_INCHES = 4.6, 2.1
_COLOURS = {DENSE: "#90959c", FIXED: "#1f6fb2"}
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "quality-proxy", "font.size": 8.5}


def proxy_picture(tasks: Mapping[str, Any]) -> str:
    """An SVG: a row per task, a point per document, layer and budget of the first seed."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = {
        task: {
            name: arms[name]["scatter"][0] for name in _COLOURS if arms.get(name, {}).get("scatter")
        }
        for task, arms in tasks.items()
    }
    shown = {task: found for task, found in shown.items() if found}
    stream = io.StringIO()
    with rc_context(_STYLE):
        size = (_WIDTH_INCHES, _ROW_INCHES * max(1, len(shown)))
        figure = Figure(figsize=size, layout="constrained")
        rows = figure.subplots(len(shown), 2, squeeze=False)
        for (task, found), (mass_axis, loss_axis) in zip(shown.items(), rows, strict=True):
            mass_axis.plot((0, 1), (0, 1), color="#e7e9ec", linewidth=1.0)
            for name, points in found.items():
                style = {"color": _COLOURS[name], "s": 5.0, "linewidths": 0, "alpha": 0.5}
                mass_axis.scatter(*np.transpose(points["mass"]), label=name, **style)
                loss_axis.scatter(*np.transpose(points["loss"]), **style)
            mass_axis.set(xlabel="router coverage", ylabel="attention mass kept", title=task)
            loss_axis.set(xlabel="router coverage", ylabel="loss at that budget, nats")
            mass_axis.legend(frameon=False, fontsize=7.0)
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()
