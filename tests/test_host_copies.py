# SPDX-License-Identifier: Apache-2.0
"""Where a step may copy between the host and the device, or wait for it: read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sparsebalance_megatron"
WAITING = {"cpu", "cuda", "item", "nonzero", "pin_memory", "synchronize"}
"""Methods that wait for the device, copy to the host, or copy to the device elsewhere than in
``host_copy.copied_to``. ``torch.tensor`` with a device does too."""
STEP = ("attention", "megatron", "run")
"""Packages whose code runs in a step."""
ALLOWED = {
    "attention/host_copy.py": {"non_blocking", "pin_memory"},
    # Rows of Megatron's own data loader, which pins them.
    "megatron/plain_gpt.py": {"cuda", "non_blocking"},
    # The copy of a step that the host waits for: the next plan but one is made of it.
    "run/step_reducer.py": {"cpu"},
    # The digest that all ranks compare once a step, and before the first.
    "run/agreement.py": {"cpu", "tensor"},
    # Before training.
    "attention/self_check.py": {"cpu", "tensor"},
}


def waiting_calls(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every call of a method of ``WAITING``, of ``to(non_blocking=...)``, and of
    ``tensor(device=...)``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in WAITING:
                yield node.lineno, node.func.attr
            keywords = {keyword.arg for keyword in node.keywords}
            if "non_blocking" in keywords:
                yield node.lineno, "non_blocking"
            if node.func.attr in ("tensor", "as_tensor") and "device" in keywords:
                yield node.lineno, "tensor"


def step_files() -> list[str]:
    found = (path for folder in STEP for path in (PACKAGE / folder).rglob("*.py"))
    return sorted(path.relative_to(PACKAGE).as_posix() for path in found)


@pytest.mark.parametrize("file", step_files())
def test_the_host_waits_and_copies_in_the_named_places_alone(file: str) -> None:
    allowed = ALLOWED.get(file, set())
    found = list(waiting_calls((PACKAGE / file).read_text("utf-8")))
    assert [call for call in found if call[1] not in allowed] == []
    assert allowed <= {name for _, name in found}, "an exception that nothing needs"
