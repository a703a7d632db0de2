# SPDX-License-Identifier: Apache-2.0
"""``python -m sparsebalance_megatron.cli``."""

import sys

from sparsebalance_megatron.cli import main

sys.exit(main())
