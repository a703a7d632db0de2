# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance examples``: the scripts, adapters and patches that come with the package."""

import shutil
from argparse import ArgumentParser, Namespace
from pathlib import Path

from sparsebalance_megatron.cli.output import OutputError, writing

FOLDERS = ("examples", "patches")


def add_flags(parser: ArgumentParser) -> None:
    parser.description = (
        "Show where the example scripts, the adapters for other trainers, a package of selectors "
        "and the patches for Megatron's own pretrain_gpt.py are, or copy them."
    )
    parser.add_argument(
        "--copy", type=Path, metavar="DIR", help="make DIR/examples and DIR/patches; default: show"
    )


def run(arguments: Namespace) -> int:
    package = Path(__file__).parents[1]
    # In an installed wheel, or beside the package in a checkout.
    root = package / "shipped" if (package / "shipped").is_dir() else package.parent
    if arguments.copy is None:
        print(*(root / folder for folder in FOLDERS), sep="\n")
        return 0
    targets = {root / folder: arguments.copy / folder for folder in FOLDERS}
    for target in filter(Path.exists, targets.values()):
        raise OutputError(f"{target}: exists; remove it or copy into another folder")
    try:
        for source, target in targets.items():
            with writing(target):
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    except BaseException:
        for target in targets.values():
            shutil.rmtree(target, ignore_errors=True)
        raise
    return 0
