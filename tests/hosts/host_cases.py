# SPDX-License-Identifier: Apache-2.0
"""Loads examples/hosts beside stubs of the frameworks; a run that writes down what is asked."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from harness import REPOSITORY

HOSTS = REPOSITORY / "examples" / "hosts"


def load(name: str) -> ModuleType:
    """A file of examples/hosts, as a module of its own."""
    specification = importlib.util.spec_from_file_location(f"example_{name}", HOSTS / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def load_beside(monkeypatch: pytest.MonkeyPatch, name: str, stubs: dict[str, Any]) -> ModuleType:
    """Load an adapter with frameworks as stubs: "package.module" -> what it holds."""
    schedule = load("planned_schedule")
    held = {"hosts.planned_schedule": vars(schedule), **stubs}
    for path, values in held.items():
        parts = path.split(".")
        for end in range(1, len(parts)):
            parent = ".".join(parts[:end])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(path)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, path, module)
        if len(parts) > 1:
            monkeypatch.setattr(sys.modules[path.rpartition(".")[0]], parts[-1], module, False)
    return load(name)


class FakeRun:
    """What an adapter asks of a run, written down."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.planner = SimpleNamespace(coverage=SimpleNamespace(layers=2))

    def plan_as_placed(self, lengths: Any, pinned_LS: Any = None) -> Any:
        pins = () if pinned_LS is None else (pinned_LS.tolist(),)
        self.calls.append(("plan", lengths, *pins))
        return FakePlan(f"plan of {lengths}", lengths)

    def layer_spec(self, spec: Any, *, vp_stage: int | None = None) -> Any:
        return f"budgeted {spec}"

    def attach(self, planned: Any, position: int, params: Any, **how: Any) -> str:
        self.calls.append(("attach", planned.name, position, how["learn"]))
        return f"carried {params}"

    def end_step(self) -> dict[str, float]:
        self.calls.append("end")
        return {"sparse-balance/coverage": 0.5}


class FakePlan:
    """A plan whose budgets are the samples' lengths, in both layers."""

    def __init__(self, name: str, lengths: Any) -> None:
        import numpy as np

        self.name = name
        micro_batches = [SimpleNamespace(budgets_LS=np.array([row, row])) for row in lengths]
        self.plan = SimpleNamespace(for_rank=lambda _: SimpleNamespace(micro_batches=micro_batches))
