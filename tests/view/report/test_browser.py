# SPDX-License-Identifier: Apache-2.0
"""The page in headless Chromium, as wide as a screen and as a phone, light and dark.

Skipped, and said so, where no Chromium is installed.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from view.report.sample_run import SampleRun

from sparsebalance_megatron import cli

CHROMIUMS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
RUN = SampleRun(ranks=4, stages=2, micro_batches=8, steps=12)
LEAST_CONTRAST = 4.5
"""WCAG 2.1, level AA, of text against its background."""

MEASURE = """
<script>
addEventListener("load", () => {
  const frame = document.querySelector("iframe");
  const page = frame.contentDocument, view = frame.contentWindow;
  const inside = (element) => element.closest(".scroll") !== null;
  const outside = [...page.querySelectorAll("body *")].filter(
    (element) => !inside(element) && element.getBoundingClientRect().right > view.innerWidth + 1);
  const pictures = [...page.querySelectorAll("figure svg")].map(
    (element) => element.getBoundingClientRect());
  const style = (selector) => view.getComputedStyle(page.querySelector(selector));
  const found = {
    viewport: view.innerWidth,
    scroll: page.documentElement.scrollWidth,
    outside: outside.map((element) => element.outerHTML.slice(0, 80)),
    pictures: pictures.length,
    flat: pictures.filter((box) => box.width < 100 || box.height < 40).length,
    paper: style("body").backgroundColor,
    ink: style("body").color,
    quiet: style(".quiet").color,
    bars: page.querySelectorAll("svg title").length,
  };
  document.body.innerHTML = "<pre>" + JSON.stringify(found).replace(/</g, "&lt;") + "</pre>";
});
</script>
"""


@pytest.fixture(scope="module")
def chromium() -> str:
    found = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(CHROMIUMS)} is installed")
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with a baseline, as `sparse-balance report` writes it."""
    folder = tmp_path_factory.mktemp("browser")
    run = RUN.write(folder / "run")
    baseline = replace(RUN, batching="arrival", tuning="off").write(folder / "baseline")
    output = folder / "report.html"
    assert cli.main(["report", str(run), "--baseline", str(baseline), "-o", str(output)]) == 0
    return output.read_text("utf-8")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_and_is_readable(
    chromium: str, report: str, tmp_path: Path, width: int, dark: bool
) -> None:
    document = html.escape(report, quote=True)
    frame = f'<iframe srcdoc="{document}" width="{width}" height="800" style="border: 0"></iframe>'
    path = tmp_path / "frame.html"
    # A frame takes its colour scheme from the page around it.
    scheme = '<meta name="color-scheme" content="light dark">'
    path.write_text(f"<!doctype html>{scheme}<body>{frame}{MEASURE}</body>", encoding="utf-8")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={int(not dark)}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    measured = re.search(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    assert measured is not None, done.stderr
    found = json.loads(html.unescape(measured[1]))
    assert found["viewport"] == width
    assert found["scroll"] <= width, "the page itself scrolls sideways"
    assert found["outside"] == []
    assert found["pictures"] >= 4 and found["flat"] == 0
    assert found["bars"] > 50, "bars say what they are when pointed at"
    is_dark = luminance(found["paper"]) < 0.2
    assert is_dark == dark
    for text in ("ink", "quiet"):
        assert contrast(found[text], found["paper"]) >= LEAST_CONTRAST, text


def luminance(colour: str) -> float:
    """Relative luminance of ``rgb(...)``, as WCAG 2.1 defines it."""
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)
