# SPDX-License-Identifier: Apache-2.0
"""Where the figures of a step go on one rank: step log, rank log, TensorBoard, W&B."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sparsebalance_megatron.megatron.compat import megatron_version
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.measurement import RankPlace, StepMeasurement, StepTimes
from sparsebalance_megatron.plan.planned_step import PlannedStep
from sparsebalance_megatron.plan.schedules.orders import schedule_name
from sparsebalance_megatron.telemetry.log_file import JsonLinesFile
from sparsebalance_megatron.telemetry.log_writer import BackgroundLog, BackgroundWriter
from sparsebalance_megatron.telemetry.rank_log import (
    rank_header,
    rank_log_path,
    rank_record,
    remove_surplus_rank_logs,
)
from sparsebalance_megatron.telemetry.scalars import MISMATCHES, ScalarWriter, step_scalars
from sparsebalance_megatron.telemetry.step_log import StepLog, coverage_record, step_record
from sparsebalance_megatron.training.inputs import Inputs
from sparsebalance_megatron.training.observed_coverage import ObservedCoverage

_FIRST_COVERAGE_RECORD = 2
_COVERAGE_INTERVAL = 10


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """Everything that is known of a step at its end; nothing in it changes afterwards.

    ``iteration_ms`` is None in the first step of a process. ``times`` and ``observed`` are this
    rank's, ``host_ms`` too (:class:`.host_time.HostTime`).
    """

    iteration: int
    iteration_ms: float | None
    planned: PlannedStep
    measured: StepMeasurement
    padded_tokens: int
    times: StepTimes
    observed: ObservedCoverage
    host_ms: Mapping[str, float]


class StepOutputs:
    """Takes finished steps; lines of the logs are made and written in the background.

    Args:
        coverage: the curves that the scheduler learns.
        step_log, rank_log, scalars: None where this rank writes none.
    """

    def __init__(
        self,
        inputs: Inputs,
        place: RankPlace,
        coverage: CoverageCurves,
        *,
        step_log: BackgroundLog | None,
        rank_log: BackgroundLog | None,
        scalars: ScalarWriter | None,
    ) -> None:
        self._inputs = inputs
        self._place = place
        self._coverage = coverage
        self._step_log = step_log
        self._rank_log = rank_log
        self._scalars = scalars

    def write(self, step: FinishedStep) -> None:
        """Hand the step to everything that wants it."""
        if self._rank_log is not None:
            self._rank_log.append(
                partial(
                    rank_record,
                    iteration=step.iteration,
                    planned=step.planned,
                    place=self._place,
                    job=self._inputs.job,
                    times=step.times,
                    pieces=step.observed.pieces,
                    executed_and_grown_R2=step.observed.executed_and_grown(),
                )
            )
        if self._step_log is not None:
            self._step_log.append(
                partial(
                    step_record,
                    iteration=step.iteration,
                    iteration_ms=step.iteration_ms,
                    planned=step.planned,
                    measured=step.measured,
                    padded_tokens=step.padded_tokens,
                    host_ms=step.host_ms,
                )
            )
            self._log_coverage(self._step_log, step.iteration)
        if self._scalars is not None and self._scalars.due(step.iteration):
            self._scalars.write(step.iteration, self._scalars_of(step))

    def write_mismatches(self, iteration: int, mismatches: int) -> None:
        """The last scalar of a run whose ranks executed different plans."""
        if self._scalars is not None:
            self._scalars.write(iteration, {MISMATCHES: mismatches})

    def _log_coverage(self, log: BackgroundLog, iteration: int) -> None:
        if iteration % _COVERAGE_INTERVAL == _FIRST_COVERAGE_RECORD:
            log.append(
                partial(
                    coverage_record,
                    iteration=iteration,
                    grid=self._coverage.grid,
                    mean_LUK=self._coverage.mean_LUK.copy(),
                    observed_LU=self._coverage.observed_LU.copy(),
                )
            )

    def _scalars_of(self, step: FinishedStep) -> dict[str, float]:
        return step_scalars(
            step.planned,
            step.measured,
            iteration_ms=math.nan if step.iteration_ms is None else step.iteration_ms,
            host_ms=step.host_ms,
            shape=self._inputs.settings.shape,
            block_size=self._inputs.config.block_size,
            world_size=self._place.world_size,
        )


def open_outputs(
    inputs: Inputs,
    place: RankPlace,
    coverage: CoverageCurves,
    device: torch.device,
    *,
    header: Mapping[str, Any],
    resumed: bool,
) -> StepOutputs:
    """The outputs of this rank, by the flags of the run.

    Args:
        header: first line of the step log, to which the machine and the layout are added.
        resumed: whether logs of an earlier run are continued.
    """
    step_log = rank_log = None
    directory = inputs.config.log_dir
    if directory is not None:
        writer = BackgroundWriter()
        max_bytes = inputs.config.log_megabytes * 10**6
        rank_file = JsonLinesFile(rank_log_path(directory, place.world_rank), max_bytes=max_bytes)
        rank_log = BackgroundLog(rank_file, writer)
        rank_log.begin(rank_header(place, inputs.job, socket.gethostname()), resumed=resumed)
        if place.world_rank == 0:
            step_log = BackgroundLog(StepLog(directory, max_bytes=max_bytes), writer)
            step_log.begin(
                {"type": "run", **header, **_facts(inputs, device)},
                resumed=resumed,
            )
            if not resumed:
                writer.submit(partial(remove_surplus_rank_logs, directory, place.world_size))
    return StepOutputs(
        inputs,
        place,
        coverage,
        step_log=step_log,
        rank_log=rank_log,
        scalars=ScalarWriter.of_megatron(),
    )


def _facts(inputs: Inputs, device: torch.device) -> dict[str, Any]:
    job = inputs.job
    return {
        "stage_layers": job.stage_layers,
        "schedule": schedule_name(job.pipeline_stages, job.virtual_stages),
        "megatron_core": megatron_version(),
        "torch": str(torch.__version__),
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
    }
