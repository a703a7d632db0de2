# SPDX-License-Identifier: Apache-2.0
"""Reads the step log, ``steps.jsonl``: a header, then a line per step, written by one rank.

What a damaged file still says is kept, and every line that had to be left out is named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sparsebalance_megatron.log.log_lines import LogReader, log_files
from sparsebalance_megatron.log.records import (
    STEP_LOG,
    CoverageRecord,
    RunHeader,
    StepRecord,
)
from sparsebalance_megatron.log.steps import MicroBatchTimes, Step, step_of, times_of
from sparsebalance_megatron.plan.pipeline.orders import MegatronSchedule

STEP_LOG_NAME = "steps.jsonl"


class RunLogError(ValueError):
    """A run left no usable step log."""


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """A run's header and steps by rising iteration; ``problems`` says what the file lacks.

    ``header``: keys of :class:`.records.RunHeader`, empty where it is missing. ``coverage``: the
    last record of coverage curves, None where there is none.
    """

    directory: Path
    header: Mapping[str, Any]
    steps: tuple[Step, ...]
    problems: tuple[str, ...]
    coverage: CoverageRecord | None = None


def step_log_path(directory: str | Path) -> Path:
    """``DIR/steps.jsonl``."""
    return Path(directory) / STEP_LOG_NAME


def logged_schedule(header: Mapping[str, Any]) -> MegatronSchedule:
    """The schedule that the run of this header planned with; Megatron's default where it does not
    name a group size."""
    return MegatronSchedule(header.get("micro_batch_group_size"))


def read_run_log(directory: str | Path) -> RunLog:
    """Read ``DIRECTORY/steps.jsonl``, and ``steps.1.jsonl`` before it where the log outgrew a file.

    A resumed run appends to its log: of an iteration that is there twice the later line counts.

    Raises:
        RunLogError: if the file is missing, unreadable, or holds no step at all.
    """
    path = step_log_path(directory)
    reader = LogReader(STEP_LOG)
    header: dict[str, Any] = {}
    steps: dict[int, Step] = {}
    coverage = None
    repeated = 0
    try:
        for each in log_files(path) or (path,):
            for record in reader.records(each):
                match record:
                    case RunHeader():
                        header = msgspec.to_builtins(record)
                    case CoverageRecord():
                        coverage = record
                    case StepRecord():
                        repeated += record.iteration in steps
                        steps[record.iteration] = step_of(record)
    except FileNotFoundError:
        raise RunLogError(
            f"{path}: not there; train with --sparse-balance-log-dir {path.parent}"
        ) from None
    except OSError as error:
        raise RunLogError(
            f"{path}: {error.strerror}; give a directory that --sparse-balance-log-dir named"
        ) from error
    if not steps:
        raise RunLogError(
            f"no readable step: {reader.problems[0]}"
            if reader.problems
            else f"{path}: no step; the run ended before its first step did"
        )
    problems = [*reader.problems, *reader.remarks(path)]
    if not header:
        problems.append(f"{path}: no header line, the run's configuration is unknown")
    if repeated:
        problems.append(f"{path}: {repeated} steps ran again after a resume; the later ones count")
    return RunLog(
        directory=path.parent,
        header=header,
        steps=tuple(steps[iteration] for iteration in sorted(steps)),
        problems=tuple(problems),
        coverage=coverage,
    )


def read_step_times(directory: Path, iterations: Collection[int]) -> dict[int, MicroBatchTimes]:
    """Times of the micro-batches of the given iterations, where they can be read.

    Damaged lines are passed over: :func:`read_run_log` names them.
    """
    reader = LogReader(STEP_LOG, frozenset(iterations))
    return {
        record.iteration: times_of(record)
        for path in log_files(step_log_path(directory))
        for record in reader.records(path)
        if isinstance(record, StepRecord)
    }
