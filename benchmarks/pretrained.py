# SPDX-License-Identifier: Apache-2.0
"""What a pretrained model loses where it reads sparsely, on a CPU.

    python benchmarks/pretrained.py --directory CACHE --json RESULT.json

``--help`` says what is read and how, and ``pretrained/`` does it.
"""

import sys

from pretrained.command import main

if __name__ == "__main__":
    sys.exit(main())
