# SPDX-License-Identifier: Apache-2.0
"""A soak as one picture: which steps every attempt ran, and what its largest rank held."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLOURS = {"none": "#666666", "delays": "#1f77b4", "full disk": "#d62728", "slow disk": "#9467bd"}
_MARKS = {"finished": "o", "killed": "x", "failed": "v", "hung": "s"}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture, if matplotlib is installed; say so if not."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path} is not drawn: matplotlib is not installed")
        return
    figure = Figure(figsize=(9, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for number, attempt in enumerate(result["attempts"]):
        colour = _COLOURS[attempt["disturbance"]]
        steps = [attempt["first_step"], attempt["last_step"]]
        above.plot(steps, [number, number], color=colour, linewidth=2)
        above.plot(steps[1], number, _MARKS[attempt["ended"]], color=colour)
        usage = attempt["usage"]
        below.plot(
            [each["step"] for each in usage],
            [each["resident_megabytes"] for each in usage],
            *(".",),
            color=colour,
            markersize=2,
        )
    above.set_ylabel("attempt (0: left alone)")
    above.yaxis.get_major_locator().set_params(integer=True)
    for name, colour in _COLOURS.items():
        above.plot([], [], color=colour, label=name)
    for name, mark in _MARKS.items():
        above.plot([], [], mark, color="black", label=name)
    above.legend(loc="upper left", fontsize=7, ncols=2)
    below.set_ylabel("largest rank, MB resident")
    below.set_xlabel("step")
    below.set_ylim(bottom=0)
    figure.savefig(path)
