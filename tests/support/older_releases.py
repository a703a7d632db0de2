# SPDX-License-Identifier: Apache-2.0
"""Marks of tests that need newer releases of PyTorch and Triton than the package does."""

from importlib import metadata

import pytest


def _release(package: str) -> tuple[int, int]:
    """Major and minor version; (0, 0) of what is not installed."""
    try:
        major, minor = metadata.version(package).split(".")[:2]
    except metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


needs_interpreter = pytest.mark.skipif(
    _release("triton") < (3, 7) and _release("numpy") >= (2, 4),
    reason="Triton before 3.7 interprets no loop under numpy 2.4 and newer",
)
needs_grouped_flash = pytest.mark.skipif(
    _release("torch") < (2, 11),
    reason="PyTorch 2.8 has no fused attention on a CPU for groups of query heads; 2.11 has",
)
