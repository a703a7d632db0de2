# SPDX-License-Identifier: Apache-2.0
"""Scalars as OpenTelemetry metrics, against a stub of what Megatron's handle offers.

That Megatron and its handle have these names is looked up by ``tests/hosts/test_symbols.py``.
"""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from step_cases import BLOCK_SIZE, SHAPE, measured_as_planned, planned_step

from sparsebalance_megatron.telemetry.open_telemetry import MetricWriter, metric_of
from sparsebalance_megatron.telemetry.scalars import ScalarWriter, step_scalars
from sparsebalance_megatron.telemetry.step_record import FinishedStep


class StubInstrument:
    """A gauge has ``set``, a histogram has ``record``, and neither has the other's."""

    def __init__(self, kind: str, written: list[Any], name: str) -> None:
        def write(value: float, attributes: Any = None) -> None:
            written.append((name, value, dict(attributes or {})))

        setattr(self, {"gauge": "set", "histogram": "record"}[kind], write)


class StubMeter:
    """Remembers which instruments were made, and what they got."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str, str]] = []
        self.written: list[tuple[str, float, dict[str, Any]]] = []

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> StubInstrument:
        self.made.append(("gauge", name, unit))
        return StubInstrument("gauge", self.written, name)

    def create_histogram(self, name: str, unit: str = "", description: str = "") -> StubInstrument:
        self.made.append(("histogram", name, unit))
        return StubInstrument("histogram", self.written, name)


def global_vars(handle: Any, *, tensorboard: Any = None) -> SimpleNamespace:
    """What is touched of ``megatron.training.global_vars`` of Megatron main."""
    return SimpleNamespace(
        get_tensorboard_writer=lambda: tensorboard,
        get_wandb_writer=lambda: None,
        get_args=lambda: SimpleNamespace(log_interval=5),
        get_telemetry=lambda: handle,
    )


@pytest.mark.parametrize(
    ("scalar", "name", "attributes"),
    [
        ("coverage-mean", "coverage_mean", {}),
        ("wait-time-ratio", "wait_time_ratio", {}),
        (
            "makespan-ms-predicted",
            "makespan_ms",
            {"megatron.sparse_balance.kind": "predicted"},
        ),
        (
            "imbalance-rank-sums-measured",
            "imbalance_rank_sums",
            {"megatron.sparse_balance.kind": "measured"},
        ),
        ("bubble-fraction-stage-12", "bubble_fraction", {"dl.pipeline_parallel.rank": 12}),
        (
            "coverage-depth-quarter-4",
            "coverage_depth",
            {"megatron.sparse_balance.depth_quarter": 4},
        ),
        ("predicted-error", "predicted_error", {}),
    ],
)
def test_names_follow_megatrons(scalar: str, name: str, attributes: dict[str, Any]) -> None:
    assert metric_of(scalar) == (f"megatron.sparse_balance.{name}", attributes)


def test_every_finite_scalar_of_a_step_arrives_once() -> None:
    planned = planned_step()
    step = FinishedStep(
        iteration=1,
        iteration_ms=None,
        planned=planned,
        measured=measured_as_planned(planned),
        padded_tokens=0,
        host_ms={"plan": 1.0},
    )
    values = step_scalars(step, shape=SHAPE, block_size=BLOCK_SIZE, world_size=4)
    meter = StubMeter()
    writer = MetricWriter(meter)
    writer.write(values)
    writer.write(values)
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    assert len(finite) < len(values)
    once = [(name, value, sorted(attributes.items())) for name, value, attributes in meter.written]
    assert len(once) == 2 * len(finite)
    assert once[: len(finite)] == once[len(finite) :]
    # No two scalars are one series.
    assert len({(name, str(attributes)) for name, _, attributes in once}) == len(finite)
    names = [name for _, name, _ in meter.made]
    assert len(set(names)) == len(names), "an instrument is made once"
    assert {(kind, unit) for kind, _, unit in meter.made} == {("histogram", "ms"), ("gauge", "")}
    assert {name for kind, name, _ in meter.made if kind == "histogram"} == {
        f"megatron.sparse_balance.{name}" for name in ("makespan_ms", "plan_ms", "host_ms")
    }


def test_the_rank_that_exports_writes_at_the_log_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = StubMeter()
    handle = SimpleNamespace(meter=meter, is_exporting=True)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", global_vars(handle))
    writer = ScalarWriter.of_megatron()
    assert writer is not None and writer.due(5) and not writer.due(6)
    writer.write(5, {"coverage-mean": 0.5, "plan-ms": math.nan})
    assert meter.written == [("megatron.sparse_balance.coverage_mean", 0.5, {})]


@pytest.mark.parametrize("handle", [None, SimpleNamespace(meter=StubMeter(), is_exporting=False)])
def test_other_ranks_and_runs_without_it_write_nothing(
    handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", global_vars(handle))
    assert ScalarWriter.of_megatron() is None


def test_a_megatron_without_the_handle_has_its_other_writers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As megatron-core 0.19 is."""
    older = global_vars(None, tensorboard=SimpleNamespace())
    del older.get_telemetry
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", older)
    assert ScalarWriter.of_megatron() is not None
