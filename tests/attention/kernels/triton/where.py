# SPDX-License-Identifier: Apache-2.0
"""Where kernels of Triton run: interpreted on the CPU, or compiled on a GPU.

With ``TRITON_INTERPRET=1`` in the environment (see ../test_triton_interpreted.py) tests of kernels
run on the CPU; without it they need a CUDA device.
"""

import pytest

triton = pytest.importorskip("triton")
INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
