# SPDX-License-Identifier: Apache-2.0
"""Refuses to train on kernels that are wrong on this device.

Compilers and assemblers have produced kernels whose gradients were wrong without an error. A check
takes seconds; that it passed is kept in the user's cache directory, for this device, these versions
and these shapes.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sparsebalance_megatron import attention
from sparsebalance_megatron.attention.select import selector_named
from sparsebalance_megatron.attention.self_check import CheckedCase, check_case, ptxas
from sparsebalance_megatron.config import SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.layer_budgets import has_dense_layers
from sparsebalance_megatron.supported import installed_version


class KernelCheckError(ValueError):
    """A kernel is wrong on this device, or cannot run."""


_LARGEST_BLOCK_ON_CPU = 128
"""Tokens. The check's documents have some blocks each, which would take minutes on a CPU, whose
implementations do not depend on the block size."""


def check_kernels(
    config: SparseBalanceConfig,
    shape: ModelShape,
    dtype: str,
    device: torch.device,
    *,
    keep: bool = True,
) -> str:
    """Check the kernels that this run's layers will use; see :func:`ensure_checked`."""
    block_size = config.block_size
    if device.type == "cpu":
        block_size = min(block_size, _LARGEST_BLOCK_ON_CPU)
    selections = [config.selection]
    if has_dense_layers(config.layer_budgets) or config.dense_up_to_tokens:
        # Lists by block of queries and KV head, as dense layers have them, and slices of documents
        # that are attended to densely.
        selections.append("previous-block")
    return "; ".join(
        ensure_checked(
            CheckedCase(
                selection=selection,
                implementation=config.attention,
                router=config.router,
                query_heads=max(1, shape.num_attention_heads // shape.tensor_parallel_size),
                kv_heads=max(1, shape.num_query_groups // shape.tensor_parallel_size),
                head_dim=shape.head_dim,
                value_dim=shape.value_dim,
                block_size=block_size,
                dtype=dtype,
            ),
            device,
            keep=keep,
        )
        for selection in dict.fromkeys(selections)
    )


def ensure_checked(case: CheckedCase, device: torch.device, *, keep: bool = True) -> str:
    """Check the kernels unless they passed before; gives one line for the log.

    Without ``keep`` the verdict is not written down.

    Every failure of a compiler or of the device becomes a :class:`KernelCheckError`, so that other
    ranks can be told.
    """
    tools = toolchain(device)
    key = json.dumps({"toolchain": tools, "case": asdict(case)}, sort_keys=True)
    file = cache_directory() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    on = ", ".join(f"{name} {value}" for name, value in tools.items() if name != "sources")
    if file.exists():
        return f"kernels passed their check before ({on}): {file}"
    try:
        verdict = check_case(case, device)
        problems = verdict.problems()
    # Kernels fail in the compilers' own ways, and every one of them is an answer here.
    except Exception as error:
        raise KernelCheckError(
            f"kernel check on {on}: {type(error).__name__}: {error}; {_way_on(case)}"
        ) from error
    if problems:
        raise KernelCheckError(
            f'kernel check on {on}: "{verdict.kernel}" at head dims {case.head_dim} and '
            f"{case.value_dim}, blocks of {case.block_size}, {case.dtype}, "
            f"{case.selection}: {'; '.join(problems)}; {_way_on(case)}"
        )
    kept = "not kept"
    if keep:
        kept = _keep(file, {"key": json.loads(key), "found": verdict.found})
    return f'kernels of "{verdict.kernel}" agree with the reference ({on}): {kept}'


def cache_directory() -> Path:
    """Directory of verdicts, by the convention for user caches."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sparsebalance_megatron" / "kernel_checks"


def _keep(file: Path, content: Mapping[str, Any]) -> str:
    """Write a verdict as a whole or not at all; says where, or why not."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(f".{uuid.uuid4().hex}")
        written.write_text(json.dumps(content, indent=2))
        written.replace(file)
    except OSError as error:
        return f"the verdict is not kept, {error}"
    return os.fspath(file)


def toolchain(device: torch.device) -> dict[str, str]:
    """Versions and device that the machine code and its results depend on, besides the case."""
    found = {
        "device": "cpu",
        "torch": torch.__version__,
        "package": installed_version("sparsebalance-megatron") or "not installed",
        "sources": _digest_of_sources(),
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["driver"] = _driver()
        found["Triton"] = installed_version("triton") or "not installed"
        found["ptxas"] = ptxas(device)
    return found


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().partition("\n")[0] if file.exists() else "unknown"


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(attention.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _way_on(case: CheckedCase) -> str:
    others = {"triton", "tokens" if selector_named(case.selection).by_token else "blocks"}
    names = " or ".join(sorted(others - {case.implementation}))
    return (
        f"train with {flag_name('attention')} {names}, and {flag_name('router')} torch where the "
        "selection has that choice, or with another ptxas (TRITON_PTXAS_PATH)"
    )
