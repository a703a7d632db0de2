# SPDX-License-Identifier: Apache-2.0
"""The documentation site builds without a warning, such as a link that leads nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "megatron", "triton")))
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""


def test_site_builds_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-c", str(ROOT / "docs")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *options, str(ROOT), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "docs" / "PYTHON.html").read_text("utf-8")
    assert "sparsebalance_megatron.integration" in page
