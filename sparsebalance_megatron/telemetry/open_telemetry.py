# SPDX-License-Identifier: Apache-2.0
"""A step's scalars as OpenTelemetry metrics, by Megatron's own handle; docs/TELEMETRY.md has them.

Megatron main has the handle, ``megatron.training.global_vars.get_telemetry``; megatron-core 0.19
has none. Names follow its docs/user-guide/observability/extending.md: ``megatron.<subsystem>.
<metric>``, gauges for values of an interval, histograms for durations, shared attributes ``dl.*``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Protocol

SUBSYSTEM = "megatron.sparse_balance"
STAGE = "dl.pipeline_parallel.rank"
KIND = f"{SUBSYSTEM}.kind"
QUARTER = f"{SUBSYSTEM}.depth_quarter"
_KINDS = ("predicted", "measured")
_NUMBERED = re.compile(r"(?P<name>.+?)(?:-(?P<by>stage|quarter))-(?P<number>\d+)")
_DURATION = re.compile(r".+_ms")


class Meter(Protocol):
    """What is used of ``opentelemetry.metrics.Meter``."""

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> Any:
        """An instrument with ``set(amount, attributes)``."""

    def create_histogram(self, name: str, unit: str = "", description: str = "") -> Any:
        """An instrument with ``record(amount, attributes)``."""


def metric_of(scalar: str) -> tuple[str, dict[str, str | int]]:
    """The metric of a scalar, and the attributes that tell it from others of that metric.

    What TensorBoard needs a name of its own for becomes an attribute: a pipeline stage, a quarter
    of the layers, and whether a value was predicted or measured.
    """
    attributes: dict[str, str | int] = {}
    if (numbered := _NUMBERED.fullmatch(scalar)) is not None:
        scalar = numbered["name"]
        attributes[STAGE if numbered["by"] == "stage" else QUARTER] = int(numbered["number"])
    for kind in _KINDS:
        if scalar.endswith(f"-{kind}"):
            scalar = scalar.removesuffix(f"-{kind}")
            attributes[KIND] = kind
    return f"{SUBSYSTEM}.{scalar.replace('-', '_')}", attributes


class MetricWriter:
    """Writes to the meter of Megatron's telemetry handle; instruments are made at first use."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._instruments: dict[str, Any] = {}

    @classmethod
    def of_megatron(cls, global_vars: Any) -> MetricWriter | None:
        """On the rank that exports, where this Megatron has a handle and it is on.

        Args:
            global_vars: the module ``megatron.training.global_vars``.
        """
        get_telemetry = getattr(global_vars, "get_telemetry", None)
        handle = None if get_telemetry is None else get_telemetry()
        if handle is None or not handle.is_exporting:
            return None
        return cls(handle.meter)

    def write(self, values: Mapping[str, float]) -> None:
        """Those that are finite.

        Args:
            values: by the scalar's name, as :func:`.scalars.step_scalars` gives them.
        """
        for scalar, value in values.items():
            if math.isfinite(value):
                name, attributes = metric_of(scalar)
                self._record(name, value, attributes)

    def _record(self, name: str, value: float, attributes: Mapping[str, str | int]) -> None:
        is_duration = _DURATION.fullmatch(name) is not None
        instrument = self._instruments.get(name)
        if instrument is None:
            create = self._meter.create_histogram if is_duration else self._meter.create_gauge
            instrument = create(name, unit="ms" if is_duration else "")
            self._instruments[name] = instrument
        if is_duration:
            instrument.record(value, attributes)
        else:
            instrument.set(value, attributes)
