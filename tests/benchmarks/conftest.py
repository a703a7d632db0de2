# SPDX-License-Identifier: Apache-2.0
"""Makes the modules of benchmarks/ importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
