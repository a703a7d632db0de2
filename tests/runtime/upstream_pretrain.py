# SPDX-License-Identifier: Apache-2.0
"""Runs ``pretrain_gpt.py`` of the checkout named by MEGATRON_LM_PATH on a CPU, unmodified."""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

ADAPTER = Path(__file__).parents[2] / "sparsebalance_megatron" / "runtime" / "cpu.py"
specification = importlib.util.spec_from_file_location("cpu_adapter", ADAPTER)
adapter = importlib.util.module_from_spec(specification)
specification.loader.exec_module(adapter)

if __name__ == "__main__":
    adapter.install()
    checkout = Path(os.environ["MEGATRON_LM_PATH"])
    sys.path.append(str(checkout))
    sys.argv += [
        *("--distributed-backend", "gloo", "--transformer-impl", "local", "--num-workers", "0"),
        *("--use-cpu-initialization", "--no-gradient-accumulation-fusion"),
        *("--no-masked-softmax-fusion", "--no-persist-layer-norm", "--no-bias-swiglu-fusion"),
        *("--no-bias-gelu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion"),
    ]
    runpy.run_path(str(checkout / "pretrain_gpt.py"), run_name="__main__")
