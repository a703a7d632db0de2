# SPDX-License-Identifier: Apache-2.0
"""Reads the logs of a run: ``steps.jsonl`` of all ranks, ``ranks/rank-*.jsonl`` of each.

What a damaged file still says is kept, and every line that had to be left out is named.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from sparsebalance_megatron.json_file import (
    MAX_BYTES,
    UnreadableFileError,
    bounded_lines,
    open_regular,
)
from sparsebalance_megatron.log.files import older_file, rank_log_path, step_log_path
from sparsebalance_megatron.log.records import (
    LINE_START,
    LOG_FORMAT,
    RANK_LOG,
    STEP_LOG,
    DamagedLineError,
    Header,
    LineStart,
    Place,
    RankHeader,
    RankStep,
    Record,
    RunHeader,
    StepRecord,
    decode,
)


class RunLogError(ValueError):
    """A run left no usable step log."""


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """A run's header, and steps by rising iteration; ``problems`` says what the file lacks."""

    directory: Path
    header: RunHeader | None
    steps: tuple[StepRecord, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankLogs:
    """Who the ranks are, and what they logged of one step."""

    headers: Mapping[Place, RankHeader]
    steps: Mapping[Place, RankStep]
    problems: tuple[str, ...]


def _records[R: Record](
    newest: Path,
    decoder: msgspec.json.Decoder[R],
    problems: list[str],
    *,
    iteration: int | None = None,
    last_bytes: int | None = None,
) -> Iterator[R]:
    """The records of one log, an older file's first; what the files lack goes into ``problems``.

    Damaged lines are left out, as are lines behind a header of another format.

    Args:
        iteration: the step to decode; None for all.
        last_bytes: read no more than so much of the newest file's end, in whole lines; None: all.
    """
    discarded = dropped = foreign = 0
    is_foreign = False
    has_older = last_bytes is None and older_file(newest).exists()
    for path in (older_file(newest), newest) if has_older else (newest,):
        with open_regular(path) as stream:
            for number, text in enumerate(_lines(stream, last_bytes), start=1):
                line = LineStart()
                with suppress(DamagedLineError):
                    line = decode(text, LINE_START)
                if line.type in ("run", "rank"):
                    is_foreign = line.log_format != LOG_FORMAT
                foreign += is_foreign
                is_unwanted = iteration is not None and line.iteration not in (None, iteration)
                is_being_written = last_bytes is not None and not text.endswith(b"\n")
                if is_foreign or is_unwanted or is_being_written:
                    continue
                try:
                    record = decode(text, decoder)
                except DamagedLineError as error:
                    problems.append(f"{path} line {number}: {error}; left out")
                    continue
                dropped += record.lines_dropped or 0
                if isinstance(record, Header):
                    discarded = max(discarded, record.lines_discarded or 0)
                yield record
    counts = {
        f"{foreign} lines in another log format than {LOG_FORMAT}; left out: read them with "
        "the version of sparsebalance_megatron that wrote them": foreign,
        f"the {discarded} oldest lines were discarded while training; raise "
        "--sparse-balance-config log-megabytes to keep them": discarded,
        f"{dropped} lines could not be written in training": dropped,
    }
    problems += [f"{newest}: {problem}" for problem, count in counts.items() if count]


def _lines(stream: BinaryIO, last_bytes: int | None) -> Iterator[bytes]:
    """All lines, or the first, which is the header, and the whole ones of the end."""
    if last_bytes is not None:
        first_byte = os.fstat(stream.fileno()).st_size - last_bytes
        if first_byte > 0:
            yield from islice(bounded_lines(stream, MAX_BYTES), 1)
            stream.seek(first_byte)
            stream.readline()
    yield from bounded_lines(stream, MAX_BYTES)


def read_run_log(directory: str | Path, *, last_bytes: int | None = None) -> RunLog:
    """Read ``DIRECTORY/steps.jsonl``, and the file before it where the log outgrew one.

    A resumed run appends to its log: of the steps before, those that it repeats are left out.
    Of a log that may still be written, only ``last_bytes`` of the end are read.

    Raises:
        RunLogError: if the file is missing, unreadable, or holds no step at all.
    """
    path = step_log_path(directory)
    problems: list[str] = []
    header = None
    steps: list[StepRecord] = []
    repeated = 0
    try:
        for record in _records(path, STEP_LOG, problems, last_bytes=last_bytes):
            match record:
                case RunHeader():
                    header = record
                case StepRecord():
                    while steps and steps[-1].iteration >= record.iteration:
                        steps.pop()
                        repeated += 1
                    steps.append(record)
    except (UnreadableFileError, OSError) as error:
        raise RunLogError(
            f"{path}: {error}; name a folder that --sparse-balance-log-dir named in training"
        ) from error
    if not steps:
        raise RunLogError(
            f"no readable step: {problems[0]}" if problems else f"{path}: no step is logged yet"
        )
    if header is None and last_bytes is None:
        problems.append(f"{path}: no header line, the run's configuration is unknown")
    if repeated:
        problems.append(f"{path}: {repeated} steps before a resume that repeats them; left out")
    return RunLog(
        directory=path.parent,
        header=header,
        steps=tuple(steps),
        problems=tuple(problems),
    )


def read_rank_logs(directory: Path, iteration: int | None = None) -> RankLogs:
    """Read the header of every rank, and one step unless ``iteration`` is None; of lines of it the
    last counts.

    Tensor-parallel ranks do the same work; the first of each group speaks for it.
    """
    headers: dict[Place, RankHeader] = {}
    steps: dict[Place, RankStep] = {}
    problems: list[str] = []
    for path in sorted(rank_log_path(directory, 0).parent.glob("rank-*.jsonl")):
        header: RankHeader | None = None
        try:
            for record in _records(path, RANK_LOG, problems, iteration=iteration):
                if isinstance(record, RankHeader):
                    header = record
                    if header.tensor_parallel_rank:
                        break
                    headers[header.place] = header
                    if iteration is None:
                        break
                elif header is not None:
                    steps[header.place] = record
        except (UnreadableFileError, OSError) as error:
            problems.append(f"{path}: {error}; this rank is left out")
        if header is None:
            problems.append(f"{path}: no header line; this rank is left out")
    return RankLogs(headers=headers, steps=steps, problems=tuple(problems))
