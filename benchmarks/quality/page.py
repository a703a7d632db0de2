# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/QUALITY.md, made of the JSON file alone."""

from pathlib import Path


def rewrite(page: Path, json: Path) -> None:
    raise NotImplementedError
