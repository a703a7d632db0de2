# SPDX-License-Identifier: Apache-2.0
"""Templates filled with a report's numbers and charts; the result needs no other file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsebalance_megatron.view.report.chart import COLOURS, Chart
from sparsebalance_megatron.view.report.coverage_frames import FRAME_HEIGHT, FRAME_WIDTH
from sparsebalance_megatron.view.report.run_data import ReportError

if TYPE_CHECKING:
    from sparsebalance_megatron.view.report.run_report import Report


def render_page(report: Report, refresh_s: float | None = None) -> str:
    """The HTML page of a report.

    Args:
        refresh_s: seconds after which a browser loads the page again; None: it does not.

    Raises:
        ReportError: jinja2 is not installed.
    """
    return _render("report.html.j2", report=report, refresh_s=refresh_s)


def render_step(chart: Chart) -> str:
    """An SVG file of one chart.

    Raises:
        ReportError: jinja2 is not installed.
    """
    return _render("step.svg.j2", chart=chart)


def _render(template: str, **values: Any) -> str:
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
