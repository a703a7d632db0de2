# SPDX-License-Identifier: Apache-2.0
"""The documentation site. Nothing of the package is imported: it builds without torch or Megatron."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

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

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# The modules that docs/PYTHON.md lists.
autodoc2_packages = [
    {
        "path": f"sparsebalance_megatron/{path}",
        "module": f"sparsebalance_megatron.{path.removesuffix('.py').removesuffix('/__init__')}".replace(
            "/", "."
        ),
    }
    for path in (
        "integration.py",
        "config.py",
        "evaluate/__init__.py",
        "attention/api.py",
        "attention/select/__init__.py",
        "plan/planner.py",
        "plan/step_plan.py",
    )
]
autodoc2_output_dir = "docs/apidocs"
autodoc2_docstring_parser_regexes = [(r".*", "google_docstrings")]
autodoc2_render_plugin = "myst"
autodoc2_hidden_objects = ["private", "undoc", "inherited"]

html_theme = "furo"
html_title = f"{project} {release}"
