# SPDX-License-Identifier: Apache-2.0
"""The step log, ``steps.jsonl``: a header, then one JSON line per step, written by one rank.

Lines are :mod:`.step_record` and :mod:`.coverage_record`. Of a damaged file what it still says is
kept, and every line that had to be left out is named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.schedules.orders import MegatronSchedule, schedule_name
from sparsebalance_megatron.telemetry.coverage_record import (
    COVERAGE,
    CoverageRecord,
    read_coverage,
)
from sparsebalance_megatron.telemetry.jsonl import (
    BadLineError,
    Line,
    LostLines,
    lines,
    log_files,
    whole,
)
from sparsebalance_megatron.telemetry.step_record import (
    STEP,
    MicroBatchTimes,
    Step,
    read_step,
    read_times,
)

STEP_LOG_NAME = "steps.jsonl"
RUN = "run"
"""Type of the header."""


class RunLogError(ValueError):
    """A run left no usable step log."""


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """A run's header and steps by rising iteration; ``problems`` says what the file lacks.

    ``coverage``: the last record of coverage curves, None where there is none.
    """

    directory: Path
    header: Mapping[str, Any]
    steps: tuple[Step, ...]
    problems: tuple[str, ...]
    coverage: CoverageRecord | None = None


def step_log_path(directory: str | Path) -> Path:
    """``DIR/steps.jsonl``."""
    return Path(directory) / STEP_LOG_NAME


def run_header(
    *,
    config: Mapping[str, Any],
    cost_source: str,
    job: Job,
    global_batch_size: int,
    seq_length: int,
    grid: tuple[int, ...],
    counts: Mapping[str, int],
    megatron_core: str,
    torch: str,
    device: str,
    sources: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The first line: what runs, on what, with which settings.

    Args:
        config: the plugin's settings by name.
        cost_source: where predicted times come from, in words.
        seq_length: tokens of the longest sample.
        grid: budgets, in blocks, at which coverage is observed.
        counts: of the training samples.
        megatron_core, torch: versions.
        device: in words.
        sources: the data sets that the run mixes, each with its ``prefix`` and ``weight``; none
            where there is but one.
    """
    return {
        "type": RUN,
        "config": config,
        "cost_source": cost_source,
        "data_parallel_size": job.data_parallel_size,
        "pipeline_stages": job.pipeline_stages,
        "virtual_stages": job.virtual_stages,
        "micro_batches": job.micro_batches,
        "layers": job.layers,
        "global_batch_size": global_batch_size,
        "seq_length": seq_length,
        "grid": list(grid),
        "counts": counts,
        "stage_layers": job.stage_layers,
        "schedule": schedule_name(job.pipeline_stages, job.virtual_stages),
        "megatron_core": megatron_core,
        "torch": torch,
        "device": device,
        **(
            {}
            if job.micro_batch_group_size is None
            else {"micro_batch_group_size": job.micro_batch_group_size}
        ),
        **({"sources": list(sources)} if sources else {}),
    }


def logged_schedule(header: Mapping[str, Any]) -> MegatronSchedule:
    """The schedule that the run of this header planned with; Megatron's default where it is
    silent."""
    size = header.get("micro_batch_group_size")
    return MegatronSchedule(size if isinstance(size, int) else None)


def read_run_log(directory: str | Path) -> RunLog:
    """Read ``DIRECTORY/steps.jsonl``, and ``steps.1.jsonl`` before it where the log outgrew a file.

    A resumed run appends to its log: of an iteration that is there twice the later line counts.

    Raises:
        RunLogError: if the file is missing, unreadable, or holds no step at all.
    """
    path = step_log_path(directory)
    reader = _StepLogReader()
    for each in log_files(path) or (path,):
        reader.read(each)
    if not reader.steps:
        raise RunLogError(
            f"no readable step: {reader.problems[0]}"
            if reader.problems
            else f"{path}: no step; the run ended before its first step did"
        )
    return RunLog(
        directory=path.parent,
        header=reader.header,
        steps=tuple(reader.steps[iteration] for iteration in sorted(reader.steps)),
        problems=(*reader.problems, *reader.remarks(path)),
        coverage=reader.coverage,
    )


def read_step_times(directory: Path, iterations: Collection[int]) -> dict[int, MicroBatchTimes]:
    """Times of the micro-batches of the given iterations, where they can be read.

    Damaged lines are passed over: :func:`read_run_log` names them.
    """
    wanted = frozenset(iterations)
    found: dict[int, MicroBatchTimes] = {}
    for path in log_files(step_log_path(directory)):
        for line in lines(path):
            if line.iteration is not None and line.iteration not in wanted:
                continue
            try:
                record = line.parse((STEP,))
                iteration = whole(record, "iteration")
                if iteration in wanted:
                    found[iteration] = read_times(record)
            except BadLineError:
                continue
    return found


class _StepLogReader:
    """Takes in lines in the order they were written."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self.steps: dict[int, Step] = {}
        self.coverage: CoverageRecord | None = None
        self.problems: list[str] = []
        self._losses = LostLines()
        self._repeated = 0

    def read(self, path: Path) -> None:
        try:
            for line in lines(path):
                try:
                    self._take(line)
                except BadLineError as error:
                    self.problems.append(line.problem(error))
        except FileNotFoundError:
            raise RunLogError(
                f"{path}: not there; train with --sparse-balance-log-dir {path.parent}"
            ) from None
        except OSError as error:
            raise RunLogError(
                f"{path}: {error.strerror}; give a directory that --sparse-balance-log-dir named"
            ) from error

    def _take(self, line: Line) -> None:
        record = line.parse((RUN, STEP, COVERAGE))
        self._losses.take(record)
        if record["type"] == RUN:
            self.header = record
        elif record["type"] == COVERAGE:
            self.coverage = read_coverage(record)
        else:
            step = read_step(record)
            self._repeated += step.iteration in self.steps
            self.steps[step.iteration] = step

    def remarks(self, path: Path) -> list[str]:
        """What the files as a whole lack."""
        found = self._losses.remarks(path)
        if not self.header:
            found.append(f"{path}: no header line, the run's configuration is unknown")
        if self._repeated:
            found.append(
                f"{path}: {self._repeated} steps ran again after a resume; the later ones count"
            )
        return found
