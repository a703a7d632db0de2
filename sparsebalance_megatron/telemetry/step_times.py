# SPDX-License-Identifier: Apache-2.0
"""Predicted and measured times of every micro-batch of chosen steps, from the step log.

Shape legend: D data-parallel ranks, P stages, V virtual stages, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.telemetry.jsonl import (
    BadLineError,
    array,
    lines,
    log_files,
    optional_field,
    whole,
)
from sparsebalance_megatron.telemetry.run_log import STEP_LOG_NAME, measured_times


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """ms of one step, [D, P, V, M]; measured ones are NaN where nothing was measured.

    Predicted ones are None in logs that hold totals only.
    """

    measured_forward_DPVM: np.ndarray
    measured_backward_DPVM: np.ndarray
    predicted_forward_DPVM: np.ndarray | None
    predicted_backward_DPVM: np.ndarray | None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        data_parallel, stages, virtual_stages, micro_batches = self.measured_forward_DPVM.shape
        return data_parallel, stages, virtual_stages, micro_batches


def read_step_times(directory: Path, iterations: Collection[int]) -> dict[int, StepTimes]:
    """Times of the given iterations, where they can be read.

    Damaged lines are passed over: :func:`.run_log.read_run_log` names them.
    """
    wanted = frozenset(iterations)
    found: dict[int, StepTimes] = {}
    for path in log_files(Path(directory) / STEP_LOG_NAME):
        for line in lines(path):
            if line.iteration is not None and line.iteration not in wanted:
                continue
            try:
                record = line.parse(("step",))
                iteration = whole(record, "iteration")
                if iteration in wanted:
                    found[iteration] = _times(record)
            except BadLineError:
                continue
    return found


def _times(record: Mapping[str, Any]) -> StepTimes:
    forward, backward = measured_times(record)
    return StepTimes(
        measured_forward_DPVM=forward,
        measured_backward_DPVM=backward,
        predicted_forward_DPVM=_predicted(record, "forward_ms", forward.shape),
        predicted_backward_DPVM=_predicted(record, "backward_ms", forward.shape),
    )


def _predicted(record: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray | None:
    values = optional_field(record, "predicted", name)
    if values is None:
        return None
    times_DPVM = array(values, f"predicted.{name}")
    usable = times_DPVM.shape == shape and np.isfinite(times_DPVM).all()
    return times_DPVM if usable else None
