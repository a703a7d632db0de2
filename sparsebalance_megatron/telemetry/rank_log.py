# SPDX-License-Identifier: Apache-2.0
"""A log per rank, ``ranks/rank-*.jsonl``: the files, and reading what every rank wrote.

Lines are :mod:`.rank_record`. Tensor-parallel ranks do the same work; the first of each group
speaks for it. Only the iterations asked for are parsed; files are read line by line.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebalance_megatron.telemetry.jsonl import (
    BadLineError,
    LostLines,
    lines,
    log_files,
    newest_file,
    whole,
)
from sparsebalance_megatron.telemetry.rank_record import (
    RANK,
    Place,
    RankHeader,
    RankStep,
    read_rank_header,
    read_rank_step,
)
from sparsebalance_megatron.telemetry.step_record import STEP

_FOLDER = "ranks"
_PREFIX = "rank-"
_PATTERN = f"{_FOLDER}/{_PREFIX}*.jsonl"


@dataclass(frozen=True, kw_only=True)
class RankLogs:
    """What the ranks wrote; ``steps[iteration][place]``."""

    headers: Mapping[Place, RankHeader] = field(default_factory=dict)
    steps: Mapping[int, Mapping[Place, RankStep]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def rank_folder(directory: Path) -> Path:
    """Where all ranks of a run write."""
    return directory / _FOLDER


def rank_log_path(directory: str | Path, world_rank: int) -> Path:
    """``DIR/ranks/rank-00000.jsonl``."""
    return rank_folder(Path(directory)) / f"{_PREFIX}{world_rank:05d}.jsonl"


def rank_files(directory: Path) -> tuple[Path, ...]:
    """The newest file of every rank that has one."""
    return tuple(sorted({newest_file(path) for path in directory.glob(_PATTERN)}))


def rank_iterations(directory: Path) -> tuple[int, ...]:
    """Iterations that the first rank wrote of; for runs without a step log."""
    for path in rank_files(directory)[:1]:
        try:
            found = {line.iteration for each in log_files(path) for line in lines(each)}
        except OSError:
            return ()
        return tuple(sorted(iteration for iteration in found if iteration is not None))
    return ()


def read_rank_logs(directory: Path, iterations: Collection[int]) -> RankLogs:
    """Read the given iterations of every rank; of one that is there twice the later line counts."""
    wanted = frozenset(iterations)
    headers: dict[Place, RankHeader] = {}
    steps: dict[int, dict[Place, RankStep]] = {}
    problems: list[str] = []
    for path in rank_files(directory):
        reader = _RankReader(path, wanted)
        for each in log_files(path):
            if reader.repeats_another:
                break
            reader.read(each)
        problems += reader.finish()
        if reader.header is None or reader.repeats_another:
            continue
        headers[reader.header.place] = reader.header
        for iteration, step in reader.steps.items():
            steps.setdefault(iteration, {})[reader.header.place] = step
    return RankLogs(headers=headers, steps=steps, problems=tuple(problems))


class _RankReader:
    """Takes in one rank's lines in the order they were written."""

    def __init__(self, path: Path, wanted: frozenset[int]) -> None:
        self.header: RankHeader | None = None
        self.steps: dict[int, RankStep] = {}
        self._path = path
        self._wanted = wanted
        self._problems: list[str] = []
        self._losses = LostLines()
        self._headless = 0

    @property
    def repeats_another(self) -> bool:
        """Whether another tensor-parallel rank says the same."""
        return self.header is not None and self.header.tensor_parallel_rank != 0

    def read(self, path: Path) -> None:
        try:
            for line in lines(path):
                iteration = line.iteration
                whole_line = line.text.endswith(b"}\n")
                if whole_line and iteration is not None and iteration not in self._wanted:
                    continue
                try:
                    self._take(line.parse((RANK, STEP)))
                except BadLineError as error:
                    self._problems.append(line.problem(error))
                if self.repeats_another:
                    return
        except OSError as error:
            self._problems.append(f"{path}: {error.strerror}; this rank is left out")

    def _take(self, record: Mapping[str, Any]) -> None:
        self._losses.take(record)
        if record["type"] == RANK:
            self.header = read_rank_header(record)
        elif self.header is None:
            self._headless += 1
        else:
            iteration = whole(record, "iteration")
            if iteration in self._wanted:
                self.steps[iteration] = read_rank_step(record, len(self.header.layers))

    def finish(self) -> list[str]:
        if self.header is None:
            self._problems.append(f"{self._path}: no header line; this rank is left out")
        elif self._headless:
            self._problems.append(
                f"{self._path}: {self._headless} steps before the first header; left out"
            )
        return [*self._problems, *self._losses.remarks(self._path)]
