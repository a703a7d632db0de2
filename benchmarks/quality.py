# SPDX-License-Identifier: Apache-2.0
"""How well models learn under budgets that change, against dense attention and fixed budgets.

    python benchmarks/quality.py --json RESULT.json

``--help`` says what is trained, and ``quality/`` how.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))  # forked_ranks.py

from quality.command import main

if __name__ == "__main__":
    sys.exit(main())
