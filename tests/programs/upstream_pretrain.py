# SPDX-License-Identifier: Apache-2.0
"""Runs ``pretrain_gpt.py`` of the Megatron-LM checkout named by MEGATRON_LM_PATH on a CPU.

The script is run as it lies there, with the ``megatron`` that lies beside it. ``-m MODULE`` before
the flags runs an installed module with that ``megatron`` instead.
"""

import importlib.metadata
import importlib.util
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

ADAPTER = Path(__file__).parents[2] / "sparsebalance_megatron" / "megatron" / "cpu.py"
EXTENSION = "megatron.core.datasets.helpers_cpp"
CPU_FLAGS = (
    *("--distributed-backend", "gloo", "--transformer-impl", "local", "--num-workers", "0"),
    *("--use-cpu-initialization", "--no-gradient-accumulation-fusion"),
    *("--no-masked-softmax-fusion", "--no-persist-layer-norm", "--no-bias-swiglu-fusion"),
    *("--no-bias-gelu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion"),
)


def load(name: str, path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def lend_extension(checkout: Path) -> None:
    """A checkout has the data helpers as C++ only; the installed wheel has them built."""
    if not any((checkout / "megatron" / "core" / "datasets").glob("helpers_cpp*.so")):
        files = importlib.metadata.files("megatron-core")
        (built,) = (file.locate() for file in files if file.name.startswith("helpers_cpp."))
        sys.modules[EXTENSION] = load(EXTENSION, Path(built))


if __name__ == "__main__":
    checkout = Path(os.environ["MEGATRON_LM_PATH"])
    sys.path.insert(0, str(checkout))
    lend_extension(checkout)
    load("cpu_adapter", ADAPTER).install()
    module = None
    if sys.argv[1] == "-m":
        module = sys.argv[2]
        del sys.argv[1:3]
    sys.argv += CPU_FLAGS
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(checkout / "pretrain_gpt.py"), run_name="__main__")
