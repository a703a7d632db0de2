# SPDX-License-Identifier: Apache-2.0
"""Bfloat16 in Triton's interpreter as on a GPU.

NumPy has no bfloat16: the interpreter keeps its bits in integers, multiplies those in ``tl.dot``,
and cuts float32 off where a GPU rounds to the nearest.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from sparsebalance_megatron.attention.kernels import triton as kernels


def compute_in_bfloat16() -> None:
    """Let this process's interpreter widen operands of products, and round to nearest even."""
    convert = interpreter._convert_float

    def dot(self: Any, a: Any, b: Any, sums: Any, *_: Any) -> Any:
        product = np.matmul(_wide(a), _wide(b), dtype=sums.data.dtype)
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    def rounding(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            bits = values.view(np.uint32)
            half_less_one = np.uint32(0x7FFF) + ((bits >> 16) & 1).astype(np.uint32)
            finite = (bits & 0x7F800000) != 0x7F800000
            rounded = np.where(finite, bits + half_less_one, bits).astype(np.uint32)
            values = rounded & np.uint32(0xFFFF0000)
        return convert(values, source, target, mode)

    interpreter.InterpreterBuilder.create_dot = dot
    interpreter._convert_float = rounding
    kernels.interpreter_has_bfloat16 = True


def _wide(operand: Any) -> np.ndarray:
    """Values of an operand as NumPy can multiply them."""
    values: np.ndarray = operand.data
    if operand.dtype.scalar == tl.bfloat16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values
