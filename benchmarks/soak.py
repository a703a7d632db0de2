# SPDX-License-Identifier: Apache-2.0
"""Whether a run that is killed, starved and delayed learns what one left alone does.

    python benchmarks/soak.py --json benchmarks/results/soak.json

``--help`` says what is done, and ``soak/`` how.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))  # forked_ranks.py

from soak.command import main

if __name__ == "__main__":
    sys.exit(main())
