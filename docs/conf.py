# SPDX-License-Identifier: Apache-2.0
"""The documentation site. Nothing of the package is imported: it builds without torch or Megatron."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

project = "SparseBalance for Megatron"
author = "The sparsebalance_megatron contributors"
copyright = author  # noqa: A001  Sphinx reads this name.
release = re.search(
    r'__version__ = "(.+?)"', (ROOT / "sparsebalance_megatron/__init__.py").read_text("utf-8")
)[1]

extensions = ["myst_parser", "autodoc2"]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "research/*.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "patches/README.md",
]
exclude_patterns = ["docs/README.md"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc2_packages = [{"path": "../sparsebalance_megatron", "auto_mode": True}]
autodoc2_output_dir = "docs/apidocs"
autodoc2_render_plugin = "myst"
autodoc2_hidden_objects = ["private", "undoc", "inherited"]

html_theme = "furo"
html_title = f"{project} {release}"
