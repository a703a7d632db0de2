# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance env``: versions and devices; with --check, which attention is right here."""

import platform
from argparse import ArgumentParser, Namespace
from typing import Any

from sparsebalance_megatron import supported
from sparsebalance_megatron.config import SparseBalanceConfig

_PACKAGES = (
    *("sparsebalance-megatron", "numpy", "triton", "transformer-engine", "flash-attn"),
    "flash-attn-4",
)
_HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
_CHECKS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    **{name: ({"attention": name}, (64, 64)) for name in ("triton", "tokens", "reference")},
    "blocks": ({"attention": "blocks", "selection": "previous-block"}, (64, 64)),
    **{f"router {name}": ({"router": name}, (64, 64)) for name in ("triton", "torch")},
    **{f"head dims {dims}": ({}, dims) for dims in _HEAD_DIMS},
}
"""What is checked, with which settings and at which dims of keys and of values."""


def add_flags(parser: ArgumentParser) -> None:
    parser.description = "Show versions, devices, and whether PyTorch and Megatron are supported."
    parser.add_argument(
        "--check",
        action="store_true",
        help="also compare every attention implementation but fa4, every router and usual head dim "
        "with the reference: a minute on a CPU. Exit status 1 where this device should run one and "
        "cannot",
    )


def run(arguments: Namespace) -> int:
    """Look, print; 1 where attention that this device should run does not."""
    folder, megatron, problem = supported.find_megatron()
    print(f"python {platform.python_version()} on {platform.platform()}")
    for name in _PACKAGES:
        print(name, supported.installed_version(name) or "not installed")
    print(f"megatron {megatron}: {problem or f'supported, in {folder}'}")
    import torch

    is_supported = supported.is_within(torch.__version__, supported.RANGES["torch"])
    verdict = "supported" if is_supported else "NOT supported"
    print(f"torch {torch.__version__}: {verdict}, for CUDA {torch.version.cuda}")
    for index in range(torch.cuda.device_count()):
        print(f"cuda:{index} {torch.cuda.get_device_properties(index)}")
    if not arguments.check:
        return 0
    right = {name for name in _CHECKS if _is_right(name)}
    unexpected = set() if torch.cuda.is_available() else {"triton", "router triton"}
    return int(not right >= _CHECKS.keys() - unexpected)


def _is_right(name: str) -> bool:
    import torch

    from sparsebalance_megatron.attention.self_check import check_attention

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    choices, head_dims = _CHECKS[name]
    config = SparseBalanceConfig(block_size=64, **choices)
    try:
        problems = check_attention(config, (4, 2), head_dims, dtype, device).problems()
    # Kernels fail in the compilers' own ways, and every one of them is an answer here.
    except Exception as error:
        problems = [f"does not run: {str(error).partition('\n')[0] or type(error).__name__}"]
    print(f"{name}: {'; '.join(problems) or 'right'}")
    return not problems
