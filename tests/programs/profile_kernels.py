# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance profile`` where FlashAttention-4 serves, emulated, and torch's kernels of whole
documents and of lists are slow. The arguments are the command's."""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import pytest
from oracles import flash_attention_4

from sparsebalance_megatron import cli
from sparsebalance_megatron.attention.kernels import blocks, dense, fa4


def slow_down(kernel: Any) -> None:
    forward = kernel.forward

    def slow(*tensors: Any, **named: Any) -> Any:
        time.sleep(0.4)
        return forward(*tensors, **named)

    kernel.forward = slow


flash_attention_4.emulate(pytest.MonkeyPatch())
fa4.obstacle = lambda *_: None
slow_down(dense)
slow_down(blocks)
sys.exit(cli.main(["profile", *sys.argv[1:]]))
