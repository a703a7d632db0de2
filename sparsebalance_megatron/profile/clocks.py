# SPDX-License-Identifier: Apache-2.0
"""Clocks for forwards and backwards: host time, or CUDA events that nobody waits for."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes marks without waiting; resolves differences when the step is over."""

    def mark(self) -> Any: ...

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Waits until the device has come to ``end``."""


class HostClock:
    """Host time; for a model on the CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3


class CudaEventClock:
    """CUDA events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end)
