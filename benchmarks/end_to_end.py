# SPDX-License-Identifier: Apache-2.0
"""Training step times of dense, fixed-budget and balanced attention, in Megatron's own loop.

    python benchmarks/end_to_end.py --layout both --json RESULT.json --plot RESULT.svg

``--help`` says what is measured, and ``end_to_end/`` how.
"""

import sys

from end_to_end.command import main

if __name__ == "__main__":
    sys.exit(main())
