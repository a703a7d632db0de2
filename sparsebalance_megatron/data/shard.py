# SPDX-License-Identifier: Apache-2.0
"""One of several equal parts of a list of files, so that machines can share the work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsebalance_megatron.data.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part ``number`` of ``count``, counted from 1: parts follow one another in the files' order.

    So the documents of all parts, one part after another, are those of a single run.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``2/8``.

        Raises:
            DataError: if it is no such thing.
        """
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        number, count = map(int, match.groups()) if match else (0, 0)
        if not 1 <= number <= count:
            raise DataError(f"--shard {text}: must be a part of parts, from 1/8 to 8/8")
        return cls(number=number, count=count)

    def ranges(self, paths: Sequence[Path]) -> Iterator[tuple[Path, int, int]]:
        """(file, first byte, end) of what belongs to this part; files without a byte are left out.

        The bytes of all files count together. A reader of lines takes those that begin within the
        range; one that can only read whole files takes those whose first byte does.
        """
        sizes = [path.stat().st_size for path in paths]
        total, file_begin = sum(sizes), 0
        begin, end = (total * (self.number - 1 + i) // self.count for i in (0, 1))
        for path, size in zip(paths, sizes, strict=True):
            first, last = max(begin - file_begin, 0), min(end - file_begin, size)
            if first < last:
                yield path, first, last
            file_begin += size
