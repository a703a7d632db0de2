# SPDX-License-Identifier: Apache-2.0
"""Templates filled with a report's numbers and charts; the result needs no other file."""

from __future__ import annotations

from typing import Any

from sparsebalance_megatron.view.report.chart import COLOURS, Chart
from sparsebalance_megatron.view.report.coverage_frames import FRAME_HEIGHT, FRAME_WIDTH
from sparsebalance_megatron.view.report.run_data import ReportError


def render_step(chart: Chart) -> str:
    """An SVG file of one chart.

    Raises:
        ReportError: jinja2 is not installed.
    """
    return render("step.svg.j2", chart=chart)


def render(template: str, **values: Any) -> str:
    """A template of this package filled with values.

    Raises:
        ReportError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ReportError(
            "the report needs jinja2: pip install 'sparsebalance-megatron[tools]'"
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sizes = {"frame_width": FRAME_WIDTH, "frame_height": FRAME_HEIGHT}
    return environment.get_template(template).render(colours=COLOURS, **sizes, **values).lstrip()
