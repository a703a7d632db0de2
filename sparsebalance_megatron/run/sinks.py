# SPDX-License-Identifier: Apache-2.0
"""Outputs of a step's figures on one rank: step log, rank log, scalars.

Shape legend: U length buckets, O rows of observations.
"""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch

from sparsebalance_megatron.learn.measurement import Piece, RankPlace, StepTimes
from sparsebalance_megatron.log.log_directory import rank_log_path, step_log_path
from sparsebalance_megatron.log.log_file import RunLog
from sparsebalance_megatron.log.recording import (
    FinishedStep,
    coverage_record,
    rank_header,
    rank_step,
    step_record,
)
from sparsebalance_megatron.log.records import LOG_FORMAT, RunHeader
from sparsebalance_megatron.log.scalars import MISMATCHES, ScalarWriter, step_scalars
from sparsebalance_megatron.megatron.compat import megatron_version, metric_writers
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.run.inputs import Inputs

_FIRST_COVERAGE_RECORD = 2
_COVERAGE_INTERVAL = 10


@dataclass(frozen=True, kw_only=True)
class StepSinks:
    """Take finished steps; lines of the logs are made and written in the background.

    Attributes:
        coverage: the curves that the scheduler learns.
        step_log, rank_log, scalars: None where this rank writes none.
    """

    inputs: Inputs
    place: RankPlace
    coverage: CoverageCurves
    step_log: RunLog | None
    rank_log: RunLog | None
    scalars: ScalarWriter | None

    def write(
        self,
        step: FinishedStep,
        times: StepTimes,
        pieces: tuple[Piece, ...],
        executed_O: np.ndarray,
    ) -> None:
        """Hand the step to everything that wants it.

        ``times`` are this rank's; ``pieces`` say whose coverage it observed, ``executed_O`` how
        much it was.
        """
        if self.rank_log is not None:
            self.rank_log.append(
                partial(
                    rank_step,
                    iteration=step.iteration,
                    planned=step.planned,
                    place=self.place,
                    job=self.inputs.job,
                    times=times,
                    pieces=pieces,
                    executed_O=executed_O,
                )
            )
        if self.step_log is not None:
            self.step_log.append(partial(step_record, step))
            if step.iteration % _COVERAGE_INTERVAL == _FIRST_COVERAGE_RECORD:
                self.step_log.append(
                    partial(
                        coverage_record,
                        iteration=step.iteration,
                        grid=self.coverage.grid,
                        mean_LUK=self.coverage.mean_LUK.copy(),
                        observed_LU=self.coverage.observed_LU.copy(),
                    )
                )
        if self.scalars is not None and self.scalars.due(step.iteration):
            scalars = step_scalars(
                step,
                shape=self.inputs.settings.host_job.shape,
                block_size=self.inputs.config.block_size,
                world_size=self.place.world_size,
            )
            self.scalars.write(step.iteration, scalars)

    def write_mismatches(self, iteration: int, mismatches: int) -> None:
        """The last scalar of a run whose ranks executed different plans."""
        if self.scalars is not None:
            self.scalars.write(iteration, {MISMATCHES: mismatches})


def open_sinks(
    inputs: Inputs, place: RankPlace, coverage: CoverageCurves, device: torch.device
) -> StepSinks:
    """The sinks of this rank, by the flags; logs that are there are continued."""
    step_log = rank_log = None
    directory, max_bytes = inputs.config.log_dir, inputs.config.log_megabytes * 10**6
    if directory is not None:
        rank_log = RunLog(
            rank_log_path(directory, place.world_rank),
            rank_header(place, inputs.job, socket.gethostname()),
            max_bytes=max_bytes,
        )
    if directory is not None and place.world_rank == 0:
        header = RunHeader(
            log_format=LOG_FORMAT,
            config=asdict(inputs.config),
            cost_source=inputs.cost.source,
            job=inputs.job,
            global_batch_size=inputs.settings.global_batch_size,
            seq_length=inputs.settings.seq_length,
            iterations=inputs.settings.train_iters,
            grid=inputs.grid,
            counts=asdict(inputs.train.counts),
            megatron_core=megatron_version(),
            torch=str(torch.__version__),
            device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
            sources=tuple(
                {"prefix": each.prefix, "weight": each.weight, "counts": asdict(each.counts)}
                for each in inputs.train.sources
            ),
        )
        step_log = RunLog(step_log_path(directory), header, max_bytes=max_bytes)
    # Where Megatron has one on this rank: at --log-interval.
    writers = metric_writers()
    return StepSinks(
        inputs=inputs,
        place=place,
        coverage=coverage,
        step_log=step_log,
        rank_log=rank_log,
        scalars=writers and ScalarWriter(writers[0], writers[1], interval=writers[2]),
    )
