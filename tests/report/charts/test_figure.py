# SPDX-License-Identifier: Apache-2.0
"""SVG elements as they stand in a page."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from sparsebalance_megatron.report.charts.figure import (
    INK,
    RUN,
    ReportError,
    absent,
    draw,
)


def paint(figure: Any) -> None:
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], color=RUN, marker="o")
    axis.set_title("a < b & c 1.23456", color=INK)


def test_an_element_with_text_and_colours_of_the_page() -> None:
    pytest.importorskip("matplotlib")
    svg = draw("one", paint, height=2.0)
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "width" not in root.attrib and root.attrib["viewBox"] == "0 0 331.2 144"
    assert "a < b & c 1.23456" in "".join(root.itertext())
    assert re.findall(r'="[^"]*\d\.\d{3}', svg.partition(">")[2]) == []
    assert "var(--run)" in svg and "var(--ink)" in svg
    assert re.findall(r"#0[0-9a-f]{5}\b", svg) == [], "a stand-in colour is left"
    assert "font-family" not in svg


def test_ids_repeat_from_run_to_run_and_differ_between_pictures() -> None:
    pytest.importorskip("matplotlib")
    one, again, other = (draw(key, paint, height=2.0) for key in ("one", "one", "two"))
    assert one == again
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (one, other)]
    assert ids[0] and not ids[0] & ids[1]
    for svg in (one, other):
        used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
        assert used <= set(re.findall(r'\bid="([^"]+)"', svg))


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ReportError, match=r"\[tools\]"):
        draw("one", paint, height=2.0)


def test_an_absent_picture_says_why() -> None:
    picture = absent("key", "Title", "Nothing was logged.")
    assert (picture.svg, picture.caption) == (None, "Nothing was logged.")
