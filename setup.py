# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: the index page, and files from outside the package."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHIPPED = ("examples", "patches")
"""Folders that `sparse-balance examples` copies; a wheel holds them below the package."""


def index_page() -> str:
    """The README with links to the outside only: an index page has no files beside it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?![a-z]+:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?![a-z]+:)[^)]*\)", r"\1", text)


class BuildWithShippedFolders(build_py):
    """Also copies the folders of ``SHIPPED``, with their modes; an editable install has them.

    What an earlier build left is removed: it may hold files that the sources do not.
    """

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "sparsebalance_megatron"), ignore_errors=True)
        super().run()
        if not self.editable_mode:
            for folder in SHIPPED:
                target = Path(self.build_lib, "sparsebalance_megatron", "shipped", folder)
                shutil.copytree(ROOT / folder, target, dirs_exist_ok=True)


setup(
    long_description=index_page(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildWithShippedFolders},
)
