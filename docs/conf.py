# SPDX-License-Identifier: Apache-2.0
"""The documentation site. It imports nothing of the package: it builds without torch, Megatron."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

project = "SparseBalance for Megatron"
author = "The sparsebalance_megatron contributors"
copyright = author
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

PUBLIC_MODULES = {
    "integration": "integration.py",
    "config": "config.py",
    "evaluate": "evaluate/__init__.py",
    "attention.api": "attention/api.py",
    "attention.select": "attention/select/__init__.py",
    "plan.planner": "plan/planner.py",
    "plan.step_plan": "plan/step_plan.py",
}
"""Those that docs/PYTHON.md lists, and their files."""

autodoc2_packages = [
    {"module": f"sparsebalance_megatron.{name}", "path": f"sparsebalance_megatron/{path}"}
    for name, path in PUBLIC_MODULES.items()
]
autodoc2_output_dir = "docs/apidocs"
autodoc2_docstring_parser_regexes = [(r".*", "google_docstrings")]
autodoc2_render_plugin = "myst"
autodoc2_hidden_objects = ["private", "undoc", "inherited"]

html_theme = "furo"
html_title = f"{project} {release}"
