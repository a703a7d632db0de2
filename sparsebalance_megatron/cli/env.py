# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance env``: versions and devices; with --check, which attention is right here."""

from __future__ import annotations

import os
import platform
from argparse import ArgumentParser, Namespace
from datetime import UTC, datetime
from typing import Any, get_args

from sparsebalance_megatron import supported
from sparsebalance_megatron.cli.output import print_json
from sparsebalance_megatron.config import (
    DEFAULT_SELECTION,
    AttentionImplementation,
    Router,
    SparseBalanceConfig,
)

PACKAGES = (
    *("sparsebalance-megatron", "torch", "megatron-core", "numpy", "scipy", "triton"),
    *("transformer-engine", "flash-attn", "apex"),
)
_HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
"""Dims of keys and of values that are checked."""
_VERDICTS = {True: "supported", False: "NOT supported", None: "cannot be judged"}

Facts = dict[str, Any]


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``env``."""
    parser.description = (
        "Show versions, devices, and whether PyTorch and Megatron are in the supported ranges."
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also compare every attention implementation and router, and the default selection at "
        "several head dims, with the reference: a minute on a CPU. Exit status 1 where one that "
        "this device should run does not, or is wrong",
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def run(arguments: Namespace) -> int:
    """Look, print; 1 where attention that this device should run does not."""
    attention = checked_attention() if arguments.check else {}
    found = environment() | ({"attention": attention} if arguments.check else {})
    wrong = any(each["expected"] and not each["usable"] for each in attention.values())
    if arguments.json:
        print_json(found)
        return int(wrong)
    for name, value in found.items():
        for key, each in value.items() if isinstance(value, dict) else [("", value)]:
            says = each["says"] if isinstance(each, dict) else each
            print(f"{f'{name} {key}'.strip():<30}  {'-' if says is None else says}")
    return int(wrong)


def environment() -> Facts:
    """Versions and devices, as plain Python types."""
    packages = {name: supported.installed_version(name) for name in PACKAGES}
    path, megatron, problem = supported.find_megatron()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": f"{platform.python_version()} on {platform.platform()}",
        "installed": packages,
        "torch": _judged("torch", packages["torch"]),
        "megatron": _judged("megatron-core", megatron)
        | {"path": None if path is None else str(path), "problem": problem},
        "device": {"cpu": f"{platform.machine()}, {os.cpu_count()} cores"} | _cuda_devices(),
    }


def _judged(name: str, version: str | None) -> Facts:
    """A version against the supported range."""
    verdict = _VERDICTS[supported.is_supported(name, version)]
    return {"version": version, "verdict": f"{verdict} (range {supported.RANGES[name]})"}


def _cuda_devices() -> dict[str, str]:
    """Every CUDA device, or why there is none."""
    try:
        import torch
    except ImportError as error:
        return {"cuda": f"none: torch cannot be imported: {error}"}
    if not torch.cuda.is_available():
        return {"cuda": f"none: torch is built for CUDA {torch.version.cuda} and sees no device"}
    every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return {
        f"cuda:{index}": f"{each.name}, {each.total_memory / 2**30:.1f} GiB, compute capability "
        f"{each.major}.{each.minor}"
        for index, each in enumerate(every)
    }


def checked_attention() -> dict[str, Facts]:
    """Whose results and gradients agree with the reference on the best device."""
    implementations = (name for name in get_args(AttentionImplementation) if name != "auto")
    routers = (name for name in get_args(Router) if name != "auto")
    return {
        **{f"implementation {name}": _checked(implementation=name) for name in implementations},
        **{f"router {name}": _checked(router=name) for name in routers},
        **{f"head dims {dims[0]}/{dims[1]}": _checked(head_dims=dims) for dims in _HEAD_DIMS},
    }


def _checked(
    implementation: Any = "auto", router: Any = "auto", head_dims: tuple[int, int] = (64, 64)
) -> Facts:
    """Whether results agree with the reference, and how far the worst of them is off."""
    import torch

    from sparsebalance_megatron.attention import self_check

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    selection = "previous-block" if implementation == "blocks" else DEFAULT_SELECTION
    # Triton's kernels are for CUDA.
    expected = device.type == "cuda" or "triton" not in (implementation, router)
    try:
        verdict = self_check.check_attention(
            SparseBalanceConfig(
                selection=selection, attention=implementation, router=router, block_size=64
            ),
            heads=(4, 2),
            head_dims=head_dims,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            device=device,
        )
    # Kernels fail in the compilers' own ways, and every one of them is an answer here.
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        return {"usable": False, "expected": expected, "says": f"does not run: {reason}"}
    if problems := verdict.problems():
        wrong = f"wrong results: {'; '.join(problems)}"
        return {"usable": False, "expected": expected, "says": wrong}
    right = f"{verdict.kernel}, errors up to {max(verdict.errors.values()):.0%} of tolerance"
    return {"usable": True, "expected": expected, "says": right}
