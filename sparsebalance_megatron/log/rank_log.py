# SPDX-License-Identifier: Apache-2.0
"""Reads the logs of the ranks, ``ranks/rank-*.jsonl``.

Tensor-parallel ranks do the same work; the first of each group speaks for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparsebalance_megatron.log.log_lines import (
    LogReader,
    iterations_in,
    log_files,
    newest_file,
)
from sparsebalance_megatron.log.records import RANK_LOG, Place, RankHeader, RankStep

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
            return tuple(sorted(set().union(*(iterations_in(each) for each in log_files(path)))))
        except OSError:
            return ()
    return ()


def read_rank_logs(directory: Path, iterations: Collection[int]) -> RankLogs:
    """Read the given iterations of every rank; of one that is there twice the later line counts."""
    wanted = frozenset(iterations)
    headers: dict[Place, RankHeader] = {}
    steps: dict[int, dict[Place, RankStep]] = {}
    problems: list[str] = []
    for path in rank_files(directory):
        header, of_rank, found = _read_rank(path, wanted)
        problems += found
        if header is None or header.tensor_parallel_rank:
            continue
        headers[header.place] = header
        for iteration, step in of_rank.items():
            steps.setdefault(iteration, {})[header.place] = step
    return RankLogs(headers=headers, steps=steps, problems=tuple(problems))


def _read_rank(
    path: Path, wanted: frozenset[int]
) -> tuple[RankHeader | None, dict[int, RankStep], list[str]]:
    """The last header, steps by iteration, and problems; no steps of what repeats another rank."""
    reader = LogReader(RANK_LOG, wanted)
    header: RankHeader | None = None
    steps: dict[int, RankStep] = {}
    headless = 0
    for each in log_files(path):
        try:
            for record in reader.records(each):
                if isinstance(record, RankHeader):
                    header = record
                    if header.tensor_parallel_rank:
                        return header, {}, reader.problems
                elif header is None:
                    headless += 1
                elif problem := _other_layers(record, header):
                    reader.problems.append(f"{each}: step {record.iteration}: {problem}; left out")
                else:
                    steps[record.iteration] = record
        except OSError as error:
            reader.problems.append(f"{each}: {error.strerror}; this rank is left out")
    if header is None:
        reader.problems.append(f"{path}: no header line; this rank is left out")
    elif headless:
        reader.problems.append(f"{path}: {headless} steps before the first header; left out")
    return header, steps, [*reader.problems, *reader.remarks(path)]


def _other_layers(step: RankStep, header: RankHeader) -> str | None:
    layers = len(header.layers)
    for micro_batch in step.micro_batches:
        if len(micro_batch.budgets_LS) != layers:
            return f"budgets {micro_batch.budgets.shape} must be of {layers} layers"
    return None
