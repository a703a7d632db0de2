# SPDX-License-Identifier: Apache-2.0
"""The page's frame: escaping, folds, wide pictures."""

from __future__ import annotations

from typing import Any

from sparsebalance_megatron.report.charts.figure import Picture, absent
from sparsebalance_megatron.report.page import Page, Table, render

HOSTILE = '<script>"&'


def page(**changes: Any) -> Page:
    values: dict[str, Any] = {
        "title": "run",
        "subtitle": "",
        "headline": "",
        "reasons": (),
        "findings": (),
        "worst_steps": Table(headings=("",), rows=(), style="steps"),
        "numbers": Table(headings=("",), rows=(), style="names"),
        "timeline": absent("timeline", "One step", "nothing"),
        "step_table": Table(headings=("",), rows=(), style="steps"),
        "pictures": (),
        "notes": (),
    }
    return Page(**(values | changes))


def test_texts_are_no_markup() -> None:
    table = Table(headings=(HOSTILE,), rows=((HOSTILE,),), style="names")
    picture = Picture(
        key="k", title=HOSTILE, caption=HOSTILE, alt=HOSTILE, svg='<svg viewBox="0 0 1 1"></svg>'
    )
    text = render(
        page(
            title=HOSTILE,
            subtitle=HOSTILE,
            headline=HOSTILE,
            reasons=(picture,),
            worst_steps=table,
            findings=(HOSTILE,),
            numbers=table,
            timeline=picture,
            step_table=table,
            pictures=(picture, absent("a", HOSTILE, HOSTILE)),
            notes=(HOSTILE,),
        )
    )
    assert HOSTILE not in text and "<script" not in text
    assert text.count("&lt;script&gt;&quot;&amp;") == 23


def test_what_is_empty_is_not_there() -> None:
    text = render(page())
    assert "<details>" not in text and "What the logs lack" not in text
    assert "<li>" not in text and "The worst steps" not in text


def test_a_wide_timeline_takes_the_whole_width_and_scrolls() -> None:
    wide = Picture(key="k", title="", caption="", svg="<svg></svg>", wide=True)
    text = render(page(timeline=wide))
    assert '<div class="all-columns">' in text and '<div class="scroll wide">' in text
