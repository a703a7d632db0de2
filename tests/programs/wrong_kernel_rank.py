# SPDX-License-Identifier: Apache-2.0
"""The entry point, started with kernels whose gradients of values are wrong on rank 1."""

import os

from sparsebalance_megatron.attention.kernels import tokens
from sparsebalance_megatron.pretrain_gpt import main

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        # Not the verdict of rank 0, which has other kernels here.
        os.environ["XDG_CACHE_HOME"] += "/rank1"
        right = tokens.backward
        tokens.backward = lambda dout, saved: (*right(dout, saved)[:2], 1.1 * saved.v_TGF)
    main()
