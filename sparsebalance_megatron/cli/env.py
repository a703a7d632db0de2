# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance env``: versions, devices, and which attention implementations run here."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
import runpy
from argparse import ArgumentParser, Namespace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, get_args

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from sparsebalance_megatron.config import DEFAULT_SELECTION, AttentionImplementation, Router

DISTRIBUTION = "sparsebalance-megatron"
PACKAGES = (
    "torch",
    "megatron-core",
    "numpy",
    "scipy",
    "triton",
    "transformer-engine",
    "flash-attn",
    "apex",
)
_BLOCK_SIZE = 128
_PROBE_LENGTHS_TOKENS = (300, 84)
_WHOSE_REASON = r'^(block_sparse_attention: )?(implementation|router) "\w+" '

Facts = dict[str, Any]


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``env``."""
    parser.description = (
        "Show versions, devices, whether Megatron is in the supported range, and which "
        "attention implementations run here: each runs forward and backward once."
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def run(arguments: Namespace) -> int:
    """Look, print."""
    found = environment()
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(as_text(found)))
    return 0


def environment() -> Facts:
    """Everything that ``env`` shows, as plain Python types."""
    packages = {name: _version(name) for name in PACKAGES}
    return {
        "sparsebalance_megatron": _version(DISTRIBUTION),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "notes": _notes(packages),
        "torch": _supported("torch", packages["torch"]),
        "megatron": _megatron(packages["megatron-core"]),
        "devices": _devices(),
        "attention": _attention(),
    }


def as_text(found: Facts) -> list[str]:
    """The lines that ``env`` prints."""
    lines = [
        f"sparsebalance-megatron  {found['sparsebalance_megatron'] or 'not installed'}",
        f"python                  {found['python']} on {found['platform']}",
    ]
    lines += [
        f"{name:<22}  {known or 'not installed'}" for name, known in found["packages"].items()
    ]
    lines += [f"note: {note}" for note in found["notes"]]
    lines += ["", _range_text("torch", found["torch"]), _range_text("megatron", found["megatron"])]
    if found["megatron"]["path"]:
        lines.append(f"megatron is found in {found['megatron']['path']}")
    if found["megatron"]["problem"]:
        lines.append(f"megatron: {found['megatron']['problem']}")
    lines += ["", "devices", *(f"  {_device_text(each)}" for each in found["devices"]["found"])]
    if found["devices"]["no_cuda_because"]:
        lines.append(f"  no CUDA device: {found['devices']['no_cuda_because']}")
    lines += ["", f"attention on {found['attention']['device'] or 'no device'}"]
    if found["attention"]["because"]:
        lines.append(f"  {found['attention']['because']}")
    lines += [
        f"  {name:<10} {'runs' if each['usable'] else 'does not run: ' + each['because']}"
        for name, each in found["attention"]["implementations"].items()
    ]
    lines += [
        f"  router {name:<6} {'runs' if each['usable'] else 'does not run: ' + each['because']}"
        for name, each in found["attention"]["routers"].items()
    ]
    return lines


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _notes(packages: dict[str, str | None]) -> list[str]:
    """What a version does not say."""
    if packages["apex"] and importlib.util.find_spec("amp_C") is None:
        return ["apex has no amp_C: it is not NVIDIA's, or was built without CUDA extensions"]
    return []


def _supported(name: str, known: str | None) -> Facts:
    """A version against the range in this package's metadata; None where one is unknown."""
    wanted = _range(name)
    inside = None if known is None or wanted is None else wanted.contains(known, prereleases=True)
    return {"version": known, "supported": wanted and str(wanted), "in_range": inside}


def _range(name: str) -> SpecifierSet | None:
    """The versions of a requirement that this package asks for; None if it is not installed."""
    try:
        wanted = map(Requirement, requires(DISTRIBUTION) or [])
    except PackageNotFoundError:
        return None
    return next((each.specifier for each in wanted if each.name == name), None)


def _megatron(installed: str | None) -> Facts:
    """The Megatron that an import would find: a checkout on the path hides an installed wheel.

    It is looked at, not imported: that takes long and prints.
    """
    spec = importlib.util.find_spec("megatron")
    folders = [Path(each) for each in (spec.submodule_search_locations or [])] if spec else []
    core = next((each for each in folders if (each / "core" / "package_info.py").is_file()), None)
    problem = None
    if core is None:
        problem = "no megatron.core is found; install megatron-core"
    elif not any((each / "training" / "__init__.py").is_file() for each in folders):
        problem = "megatron.core is found but megatron.training is not; both are needed"
    known = installed
    if core is not None:
        facts = runpy.run_path(str(core / "core" / "package_info.py"))
        known = str(facts["__version__"]).partition("+")[0]
    facts = _supported("megatron-core", known)
    if facts["in_range"] is False:
        problem = f"version {known} is outside {facts['supported']}; install one inside"
    return {**facts, "path": None if core is None else str(core), "problem": problem}


def _devices() -> Facts:
    """The CPU, and every CUDA device with the reason if there is none."""
    found: list[Facts] = [{"type": "cpu", "name": platform.machine(), "cores": os.cpu_count()}]
    try:
        import torch
    except ImportError as error:
        return {"found": found, "no_cuda_because": f"torch cannot be imported: {error}"}
    if not torch.cuda.is_available():
        because = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else f"torch is built for CUDA {torch.version.cuda}, and sees no device or driver"
        )
        return {"found": found, "no_cuda_because": because}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "type": "cuda",
                "name": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return {"found": found, "no_cuda_because": None}


def _attention() -> Facts:
    """What happens when every implementation runs once on the best device."""
    try:
        import torch
    except ImportError as error:
        because = f"torch cannot be imported: {error}"
        return {"device": None, "because": because, "implementations": {}, "routers": {}}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "device": device,
        "because": None,
        "implementations": {
            name: _tried(name, device)
            for name in get_args(AttentionImplementation)
            if name != "auto"
        },
        "routers": {
            name: _tried("auto", device, name) for name in get_args(Router) if name != "auto"
        },
    }


def _tried(implementation: str, device: str, router: str = "auto") -> Facts:
    try:
        _forward_and_backward(implementation, device, router)
    # Kernels fail in the compilers' own ways, and every one of them is an answer here.
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        because = re.sub(_WHOSE_REASON, "", reason)
        return {"usable": False, "because": because}
    return {"usable": True, "because": None}


def _forward_and_backward(implementation: Any, device: str, router: Any) -> None:
    """Two short documents at a budget that selects.

    Raises:
        ValueError: the implementation does not serve this device.
        FloatingPointError: a result or a gradient is not finite.
    """
    import torch

    from sparsebalance_megatron.attention.api import budgeted_attention
    from sparsebalance_megatron.attention.select import selector_named

    first, second = _PROBE_LENGTHS_TOKENS
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(first + second, heads, 64, generator=generator)
        .to(device, torch.bfloat16 if device == "cuda" else torch.float32)
        .requires_grad_()
        for heads in (4, 2, 2)
    )
    out, _ = budgeted_attention(
        *(q, k, v, (0, first, first + second), 2),
        block_size=_BLOCK_SIZE,
        softmax_scale=0.125,
        selection=selector_named(
            "previous-block" if implementation == "blocks" else DEFAULT_SELECTION, router
        ),
        implementation=implementation,
    )
    out.float().square().sum().backward()
    results = [out, *(tensor.grad for tensor in (q, k, v))]
    if not all(result is not None and bool(result.isfinite().all()) for result in results):
        raise FloatingPointError("a result or a gradient is not finite")


def _range_text(name: str, facts: Facts) -> str:
    words = {True: "supported", False: "NOT supported", None: "cannot be judged"}
    return (
        f"{name} {facts['version'] or 'not found'}: {words[facts['in_range']]} "
        f"(range {facts['supported'] or 'unknown'})"
    )


def _device_text(device: Facts) -> str:
    if device["type"] == "cpu":
        return f"cpu   {device['name']}, {device['cores']} cores"
    return f"cuda  {device['name']}, {device['memory_gib']} GiB, capability {device['capability']}"
