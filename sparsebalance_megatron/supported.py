# SPDX-License-Identifier: Apache-2.0
"""The versions of torch and Megatron that this package trains with; loads neither.

What says that a dependency is missing loads none.
"""

import importlib.util
import re
import runpy
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sparsebalance_megatron.errors import ConfigError

RANGES = {"torch": ">=2.8.0a0", "megatron-core": ">=0.19,<0.21"}
"""As in pyproject.toml. With "a0" the builds of NVIDIA's containers, such as 2.8.0a0+5228986c39,
satisfy it."""

_PACKAGES = (
    *("torch", "megatron", "numpy", "scipy", "msgspec", "psutil"),
    *("jinja2", "matplotlib", "tqdm", "pyarrow", "safetensors", "tokenizers", "transformers"),
)
"""Modules of pyproject.toml's dependencies, and of its extras for commands."""


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution; None without it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def is_within(known: str, versions: str) -> bool:
    """Whether a version is in a range of :data:`RANGES`; a pre-release counts as its release."""
    least, _, below = map(_release, versions.partition(","))
    return least <= _release(known) and (not below or _release(known) < below)


def _release(version: str) -> tuple[int, ...]:
    numbers = re.search(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def find_megatron() -> tuple[Path | None, str | None, str | None]:
    """Look at the Megatron that an import would find, without importing it.

    Returns:
        The folder ``megatron``, the version of megatron.core, and what is wrong with them; None for
        each that there is not.
    """
    spec = importlib.util.find_spec("megatron")
    folders = [Path(each) for each in (spec.submodule_search_locations or [])] if spec else []
    folder = next((each for each in folders if (each / "core" / "package_info.py").is_file()), None)
    if folder is None:
        known = installed_version("megatron-core")
        return None, known, "no megatron.core is found; install megatron-core"
    facts = runpy.run_path(str(folder / "core" / "package_info.py"))
    # Megatron appends the commit of whatever git repository surrounds the installation.
    known = str(facts["__version__"]).partition("+")[0]
    problem = None
    if not is_within(known, RANGES["megatron-core"]):
        problem = f"version {known} is outside {RANGES['megatron-core']}; install one inside"
    elif not any((each / "training" / "__init__.py").is_file() for each in folders):
        problem = "megatron.core is found but megatron.training is not; both are needed"
    return folder, known, problem


def check_megatron() -> None:
    """Raise a :class:`ConfigError` unless there is a Megatron to import that is not older than the
    range; a newer one is tried."""
    if "megatron.core" in sys.modules:
        return
    folder, known, problem = find_megatron()
    least, _, _ = RANGES["megatron-core"].partition(",")
    if folder is None or known is None or not is_within(known, least):
        where = "" if folder is None else f" in {folder}"
        raise ConfigError(f"megatron{where}: {problem} (sparse-balance env shows what is found)")


def what_is_missing(error: ModuleNotFoundError) -> str | None:
    """The remedy for a dependency of this package that is not installed; None of other modules."""
    name = (error.name or "").partition(".")[0]
    if name not in _PACKAGES:
        return None
    return f"the package {name} is not installed here; pip install {name}"
