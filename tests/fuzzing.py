# SPDX-License-Identifier: Apache-2.0
"""Files with random damage: bytes changed, cut out, repeated, or replaced by what trips formats.

Reproducible: the damage is a function of a number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

_TOKENS = (
    *(b"", b"\x00", b"\xff", b"-1", b"0", b"1e999", b"NaN", b"Infinity", b"null", b"true"),
    *(b"9" * 400, b"9" * 5000, b"[", b"]", b"{", b"}", b'"', b",", b"\n", b"\r", b"\\ud800"),
    *(b"[" * 3000, b'{"a":' * 3000, b"\xed\xa0\x80", b"\xff\xff\xff\xff\xff\xff\xff\x7f"),
)


def damaged(original: bytes, count: int) -> Iterator[tuple[int, bytes]]:
    """``count`` damaged copies, each with its number, from 0."""
    for number in range(count):
        yield number, _damage(original, random.Random(number))


def _damage(original: bytes, generator: random.Random) -> bytes:
    raw = bytearray(original)
    for _ in range(generator.choice((1, 1, 1, 2, 4, 16))):
        start = generator.randrange(len(raw) + 1)
        end = min(len(raw), start + generator.choice((0, 1, 1, 2, 4, 8, 64)))
        kind = generator.randrange(5)
        if kind == 0 and end > start:
            raw[start] ^= 1 << generator.randrange(8)
        elif kind == 1:
            raw[start:end] = generator.choice(_TOKENS)
        elif kind == 2:
            del raw[start:end]
        elif kind == 3:
            raw[start:start] = raw[generator.randrange(len(raw) + 1) :][:64]
        elif generator.random() < 0.2:
            del raw[start:]
        else:
            raw[start:end] = generator.randbytes(end - start)
    return bytes(raw)


def check_reader(
    original: bytes,
    count: int,
    read: Callable[[bytes], object],
    errors: type[Exception] | tuple[type[Exception], ...],
) -> int:
    """Read damaged copies; how many were refused. Anything but ``errors`` fails with its number."""
    read(original)
    refused = 0
    for number, raw in damaged(original, count):
        try:
            read(raw)
        except errors as error:
            assert "\n" not in str(error), (number, str(error))
            refused += 1
        except Exception as error:
            raise AssertionError(f"damage {number}: {type(error).__name__}: {error}") from error
    return refused
