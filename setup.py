# SPDX-License-Identifier: Apache-2.0
"""Package metadata; tool settings live in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """``__version__`` as text: importing the package would need its dependencies."""
    source = (ROOT / "sparsebalance_megatron" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError('sparsebalance_megatron/__init__.py: no line __version__ = "..."')
    return match[1]


# PyPI's "apex" is not NVIDIA's: it must never become a requirement.
setup(
    name="sparsebalance-megatron",
    version=version(),
    description="Load-balanced long-context training with dynamic sparse attention for Megatron-LM",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["sparsebalance_megatron", "sparsebalance_megatron.*"]),
    python_requires=">=3.12",
    install_requires=[
        "torch>=2.8",
        "megatron-core>=0.18,<0.20",
        "numpy",
        "scipy",
        # Megatron's checkpoint writer imports it on a CPU, and megatron-core does not require it.
        "psutil",
    ],
    extras_require={
        "tools": ["rich", "matplotlib", "tqdm"],
        "data": [
            *("jinja2", "safetensors", "tokenizers", "transformers", "tqdm"),
            # Inputs of prepare-data: .parquet and .zst.
            *("pyarrow", "zstandard"),
        ],
        "test": [
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "mypy",
            # Reads traces back; its trace_processor_shell is fetched on first use.
            "perfetto",
            # Proves optima that tests hold the planner against.
            "ortools",
            "ruff",
            "tensorboard",
        ],
        "te": ["transformer-engine[pytorch]"],
        "flash": ["flash-attn"],
        "wandb": ["wandb"],
    },
    entry_points={"console_scripts": ["sparse-balance = sparsebalance_megatron.cli:main"]},
)
