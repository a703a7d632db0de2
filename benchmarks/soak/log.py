# SPDX-License-Identifier: Apache-2.0
"""What the attempts at a run have logged: every step of every attempt, once and in order."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class SoakLog:
    """The step logs of one run's directory; what a run that began anew has set aside comes first.

    Nothing here asks a clock: an attempt's lines are those behind the ones that it found.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "logs" / "steps.jsonl"
        self._seen = self._size()

    def last_of_attempt(self, otherwise: int) -> int:
        """The last iteration logged since the attempt began."""
        file, size = self._size()
        if (file, size) == self._seen:
            return otherwise
        begin = self._seen[1] if file == self._seen[0] else 0
        steps = _read(self._path, begin)
        return steps[-1]["iteration"] if steps else otherwise

    def steps(self) -> list[dict[str, Any]]:
        """The records of all steps, in the order in which they were logged."""
        folder = self._path.parent / "earlier"
        earlier = sorted((int(each.name) for each in folder.iterdir()) if folder.is_dir() else ())
        paths = [*(folder / str(number) / self._path.name for number in earlier), self._path]
        return [record for path in paths if path.exists() for record in _read(path)]

    def _size(self) -> tuple[int, int]:
        if not self._path.exists():
            return (0, 0)
        status = self._path.stat()
        return status.st_ino, status.st_size


def _read(path: Path, begin_bytes: int = 0) -> list[dict[str, Any]]:
    """Step records; a line that a kill has cut off belongs to a step that is run again."""
    records = []
    for line in path.read_bytes()[begin_bytes:].decode(errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [record for record in records if record["type"] == "step"]


def differing_steps(
    expected: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Iterations of which any record differs, in what training computed or planned."""
    known = {record["iteration"]: record for record in expected}
    return sorted(
        {
            record["iteration"]
            for record in found
            if record["iteration"] not in known
            or _compared(record) != _compared(known[record["iteration"]])
        }
    )


def iterations_to_log(attempts: Sequence[Any]) -> list[int]:
    """What a log must hold in which every step of every attempt is once."""
    return [
        step
        for attempt in attempts
        for step in range(attempt.first_step + 1, attempt.last_step + 1)
    ]


def _compared(record: Mapping[str, Any]) -> list[Any]:
    """What training computed and planned, and no time."""
    coverage = [record["figures"][name] for name in ("coverage", "coverage_base", "coverage_min")]
    return [record["lm_loss"], record["predicted"], record["tokens"], *coverage]
