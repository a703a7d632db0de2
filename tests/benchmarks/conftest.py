# SPDX-License-Identifier: Apache-2.0
"""Benchmarks import one another as scripts do: their folder is on the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
