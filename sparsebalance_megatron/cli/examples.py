# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance examples``: the scripts, adapters and patches that come with the package."""

from __future__ import annotations

import os
import shutil
from argparse import ArgumentParser, Namespace
from pathlib import Path

from sparsebalance_megatron.cli.output import OutputError, writing

FOLDERS = ("examples", "patches")


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``examples``."""
    parser.description = (
        "List the example scripts, the adapters for other trainers, a package of selectors and the "
        "patches for Megatron's own pretrain_gpt.py, or copy them. A file that is there already is "
        "never replaced."
    )
    parser.add_argument(
        "--copy", type=Path, metavar="DIR", help="copy DIR/examples and DIR/patches; default: list"
    )


def run(arguments: Namespace) -> int:
    """List or copy."""
    shipped = shipped_files()
    if arguments.copy is None:
        print(*(f"{name}  {path}" for name, path in shipped.items()), sep="\n")
        return 0
    targets = {arguments.copy / name: path for name, path in shipped.items()}
    for target in targets:
        if os.path.exists(target):
            raise OutputError(f"{target}: exists; remove it or copy into another folder")
    for target, path in targets.items():
        with writing(target):
            # With its mode: scripts stay executable.
            shutil.copy(path, target)
    print(f"{len(targets)} files copied into {arguments.copy}")
    return 0


def shipped_files() -> dict[str, Path]:
    """Name below the repository's root -> file, of an installed wheel or of a checkout.

    Raises:
        OutputError: if there are none.
    """
    package = Path(__file__).parents[1]
    for root in (package / "shipped", package.parent):
        files = {
            path.relative_to(root).as_posix(): path
            for folder in FOLDERS
            for path in sorted((root / folder).rglob("*"))
            if path.suffix in (".sh", ".patch", ".md", ".py", ".toml")
        }
        if files:
            return files
    raise OutputError(f"{package}: came without {' and '.join(FOLDERS)}; install it again")
