# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance env``: versions, devices, and which attention implementations run here."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from argparse import ArgumentParser, Namespace
from datetime import UTC, datetime
from typing import Any, get_args

from sparsebalance_megatron import supported
from sparsebalance_megatron.cli.output import print_json
from sparsebalance_megatron.config import DEFAULT_SELECTION, AttentionImplementation, Router

PACKAGES = (
    *("torch", "megatron-core", "numpy", "scipy", "triton", "transformer-engine", "flash-attn"),
    "apex",
)
_BLOCK_SIZE = 64
HEAD_DIMS = {"64": (64, 64), "96": (96, 96), "128": (128, 128), "192": (192, 192)}
HEAD_DIMS |= {"192/128": (192, 128), "256": (256, 256)}
"""Head dims that are checked: one of keys and values, or one of each."""
_WHOSE_REASON = r'^(block_sparse_attention: )?(implementation|router) "\w+" '

Facts = dict[str, Any]


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``env``."""
    parser.description = (
        "Show versions, devices, whether Megatron is in the supported range, and which "
        "attention implementations run here: results and gradients of each are compared with the "
        "reference, those of the default selection at several head dims."
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def run(arguments: Namespace) -> int:
    """Look, print."""
    found = environment()
    if arguments.json:
        print_json(found)
    else:
        print(*as_text(found), sep="\n")
    return 0


def environment() -> Facts:
    """Everything that ``env`` shows, as plain Python types."""
    packages = {name: supported.installed_version(name) for name in PACKAGES}
    notes = []
    if packages["apex"] and importlib.util.find_spec("amp_C") is None:
        notes = ["apex has no amp_C: it is not NVIDIA's, or was built without CUDA extensions"]
    path, megatron, problem = supported.find_megatron()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sparsebalance_megatron": supported.installed_version("sparsebalance-megatron"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "notes": notes,
        "torch": _judged("torch", packages["torch"]),
        "megatron": {
            **_judged("megatron-core", megatron),
            "path": None if path is None else str(path),
            "problem": problem,
        },
        **_torch_facts(),
    }


def as_text(found: Facts) -> list[str]:
    """The lines that ``env`` prints."""
    attention, devices = found["attention"], found["devices"]
    known = {"sparsebalance-megatron": found["sparsebalance_megatron"]} | found["packages"]
    known |= {"python": f"{found['python']} on {found['platform']}"}
    lines = [f"{name:<22}  {version or 'not installed'}" for name, version in known.items()]
    lines += [f"note: {note}" for note in found["notes"]]
    for name in ("torch", "megatron"):
        facts = found[name]
        verdict = {True: "supported", False: "NOT supported", None: "cannot be judged"}
        lines.append(
            f"{name} {facts['version'] or 'not found'}: {verdict[facts['in_range']]} "
            f"(range {facts['supported']})"
        )
        lines += [f"{name} {key}: {facts[key]}" for key in ("path", "problem") if facts.get(key)]
    for device in devices["found"]:
        lines.append("device: " + ", ".join(f"{key} {value}" for key, value in device.items()))
    if devices["no_cuda_because"]:
        lines.append(f"no CUDA device: {devices['no_cuda_because']}")
    lines.append(f"attention on {attention['device'] or 'no device'}")
    lines += [f"  {attention['because']}"] if attention["because"] else []
    for what in ("implementations", "routers", "head_dims"):
        for name, tried in attention[what].items():
            says = f"does not run: {tried['because']}"
            if tried["usable"]:
                share = f"{tried['of_tolerance']:.0%} of their tolerance"
                says = f"runs, {tried['kernel']}, errors up to {share}"
            lines.append(f"  {what.removesuffix('s').replace('_', ' ')} {name} {says}")
    return lines + ([f"  ptxas {attention['ptxas']}"] if attention["ptxas"] else [])


def _judged(name: str, known: str | None) -> Facts:
    """A version against the supported range."""
    inside = supported.is_supported(name, known)
    return {"version": known, "supported": supported.RANGES[name], "in_range": inside}


def _torch_facts() -> Facts:
    """The CPU, every CUDA device or why there is none, and whose attention runs on the best one."""
    devices: list[Facts] = [{"type": "cpu", "name": platform.machine(), "cores": os.cpu_count()}]
    attention: Facts = {"device": None, "because": None, "implementations": {}, "routers": {}}
    attention |= {"head_dims": {}, "ptxas": None}
    facts = {"devices": {"found": devices, "no_cuda_because": None}, "attention": attention}
    try:
        import torch
    except ImportError as error:
        because = f"torch cannot be imported: {error}"
        facts["devices"]["no_cuda_because"] = attention["because"] = because
        return facts
    attention["device"] = device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        facts["devices"]["no_cuda_because"] = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else f"torch is built for CUDA {torch.version.cuda}, and sees no device or driver"
        )
    for index in range(torch.cuda.device_count() if device == "cuda" else 0):
        properties = torch.cuda.get_device_properties(index)
        memory_gib = round(properties.total_memory / 2**30, 1)
        capability = f"{properties.major}.{properties.minor}"
        devices.append(
            {"type": "cuda", "name": properties.name}
            | {"memory_gib": memory_gib, "capability": capability}
        )
    implementations, routers = (
        [name for name in get_args(names) if name != "auto"]
        for names in (AttentionImplementation, Router)
    )
    attention["implementations"] = {name: _tried(name, device) for name in implementations}
    attention["routers"] = {name: _tried("auto", device, name) for name in routers}
    attention["head_dims"] = {
        name: _tried("auto", device, head_dims=dims) for name, dims in HEAD_DIMS.items()
    }
    if device == "cuda":
        from sparsebalance_megatron.attention.self_check import ptxas

        attention["ptxas"] = ptxas(torch.device(device))
    return facts


def _tried(
    implementation: str,
    device: str,
    router: str = "auto",
    head_dims: tuple[int, int] = HEAD_DIMS["64"],
) -> Facts:
    """Whether results agree with the reference, and how far the worst of them is off."""
    try:
        verdict = _verdict(implementation, device, router, head_dims)
    # Kernels fail in the compilers' own ways, and every one of them is an answer here.
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        return {"usable": False, "because": re.sub(_WHOSE_REASON, "", reason)}
    if problems := verdict.problems():
        return {"usable": False, "because": "wrong results: " + "; ".join(problems)}
    worst = max(error / tolerance for error, tolerance in verdict.found.values())
    return {"usable": True, "because": None, "kernel": verdict.kernel, "of_tolerance": worst}


def _verdict(implementation: Any, device: str, router: Any, head_dims: tuple[int, int]) -> Any:
    import torch

    from sparsebalance_megatron.attention.self_check import CheckedCase, check_case

    case = CheckedCase(
        selection="previous-block" if implementation == "blocks" else DEFAULT_SELECTION,
        implementation=implementation,
        router=router,
        query_heads=4,
        kv_heads=2,
        head_dim=head_dims[0],
        value_dim=head_dims[1],
        block_size=_BLOCK_SIZE,
        dtype="bfloat16" if device == "cuda" else "float32",
    )
    return check_case(case, torch.device(device))
