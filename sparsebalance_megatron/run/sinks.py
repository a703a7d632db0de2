# SPDX-License-Identifier: Apache-2.0
"""Where one rank's steps go: step log, rank log, and scalars for TensorBoard and W&B, which
docs/TELEMETRY.md lists."""

import socket
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.learn.measurement import RankPlace
from sparsebalance_megatron.log.files import (
    LogDirectory,
    LogDirectoryError,
    LogWriter,
    rank_log_path,
    step_log_path,
)
from sparsebalance_megatron.log.records import (
    FinishedStep,
    RunHeader,
    StepRecord,
    rank_header,
    rank_step,
    step_record,
)
from sparsebalance_megatron.megatron.compat import megatron_version, metric_writers
from sparsebalance_megatron.predict.outcome import flops_of
from sparsebalance_megatron.run.agreement import gather_or_raise, print_rank_0
from sparsebalance_megatron.run.inputs import Inputs

PREFIX = "sparse-balance"


def prepare_log_directory(path: str, *, keep_in_place: bool) -> LogDirectory:
    """Claim the directory and move an earlier run's logs out of the way; collective, errors alike.
    The claim lasts as long as the result.

    ``keep_in_place``: the run goes on with the logs that are there.
    """
    directory = LogDirectory(path)
    claims = torch.distributed.get_rank() == 0

    def make() -> int:
        directory.make(claim=claims)
        return 0 if keep_in_place else directory.number_for_earlier_logs()

    # Ranks of other hosts may see another disk.
    number = max(gather_or_raise(make, LogDirectoryError))
    if number:
        (kept, *_) = gather_or_raise(lambda: directory.set_aside(number), LogDirectoryError)
        print_rank_0(f"logs of an earlier run are kept in {kept}")
    return directory


class StepSinks:
    """Take finished steps; lines of the logs are made and written in the background.

    Rank 0 writes the step log; scalars go where Megatron has writers.
    """

    def __init__(self, inputs: Inputs, place: RankPlace, device: torch.device) -> None:
        self._job, self._shape = inputs.job, inputs.settings.host_job.shape
        self._block_size, self._dealt = inputs.config.block_size, inputs.dealt
        self._place = place
        self._step_log = self._rank_log = None
        directory, max_bytes = inputs.config.log_dir, inputs.config.log_megabytes * 10**6
        if directory is not None:
            self._rank_log = LogWriter(
                rank_log_path(directory, place.world_rank),
                rank_header(place, self._job, socket.gethostname()),
                max_bytes=max_bytes,
            )
        if directory is not None and place.world_rank == 0:
            header = run_header(inputs, device, place.world_size)
            self._step_log = LogWriter(step_log_path(directory), header, max_bytes=max_bytes)
        self._writers = metric_writers()

    def write(self, step: FinishedStep) -> None:
        """Hand the step to everything that wants it."""
        if self._rank_log is not None:
            self._rank_log.append(partial(rank_step, step, self._place, self._job))
        if self._step_log is not None:
            self._step_log.append(partial(self._record, step))
        if self._writers is not None and step.iteration % self._writers[2] == 0:
            scalars = step_scalars(
                step,
                shape=self._shape,
                block_size=self._block_size,
                world_size=self._place.world_size,
            )
            write_scalars(self._writers, step.iteration, scalars)

    def _record(self, step: FinishedStep) -> StepRecord:
        flops = flops_of(step.planned.plan, shape=self._shape, block_size=self._block_size)
        return step_record(step, self._dealt, flops / 1e12)


def run_header(inputs: Inputs, device: torch.device, world_size: int) -> RunHeader:
    """The first line of the step log."""
    return RunHeader(
        config=asdict(inputs.config),
        cost_source=inputs.cost.source,
        job=replace(inputs.job, order=None),
        global_batch_size=inputs.settings.batch_sizes.largest,
        seq_length=inputs.settings.seq_length,
        iterations=inputs.settings.train_iters,
        grid=inputs.grid,
        counts=asdict(inputs.train.counts),
        megatron_core=megatron_version(),
        torch=str(torch.__version__),
        world_size=world_size,
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        sources=tuple(
            {"prefix": each.prefix, "weight": weight, "counts": asdict(each.counts)}
            for each, weight in inputs.train.sources
        ),
    )


def write_scalars(
    writers: tuple[Any, Any, int], iteration: int, values: Mapping[str, float]
) -> None:
    """Write values, under :data:`PREFIX`, to what :func:`.compat.metric_writers` found."""
    tensorboard, wandb, _ = writers
    named = {f"{PREFIX}/{name}": value for name, value in values.items()}
    if tensorboard is not None:
        for name, value in named.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(named, iteration)


def step_scalars(
    step: FinishedStep, *, shape: ModelShape, block_size: int, world_size: int
) -> dict[str, float]:
    """Name -> value of everything that was measured and is not in the log line."""
    values = {"plan-ms": step.planned.plan_ms, "host-ms": sum(step.host_ms.values())}
    if step.iteration_ms is not None:
        # 1e9 per ms is 1e12 per second.
        per_rank = step.iteration_ms * 1e9 * world_size
        flops = flops_of(step.planned.plan, shape=shape, block_size=block_size)
        values |= {
            "tokens-per-second": step.measured.tokens / step.iteration_ms * 1e3,
            "tflops-per-rank-executed": flops / per_rank,
        }
    return step.figures.scalars() | values
