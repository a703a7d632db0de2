# SPDX-License-Identifier: Apache-2.0
"""The entry point, started with another budget on rank 1."""

import os
import sys

from sparsebalance_megatron.pretrain_gpt import main

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        sys.argv += ["--sparse-balance-base-budget", "2"]
    main()
