# SPDX-License-Identifier: Apache-2.0
"""Data sets that are damaged, foreign, or made for another model; and what cannot be opened."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_inputs.judge import bounded, check_refused
from data.stored_documents import open_stored, write_stored

from sparsebalance_megatron.data import documents
from sparsebalance_megatron.errors import DataError

VOCABULARY = 256
LENGTHS = (30, 7, 2, 64)
HEADER = struct.Struct("<9sQBQQ")
Change = Callable[[bytearray], object]


def write(prefix: Path, values: np.ndarray, lengths: tuple[int, ...] = LENGTHS) -> Path:
    documents = np.split(values, np.cumsum(lengths)[:-1])
    return write_stored(prefix, documents, dtype=values.dtype.type)


def tokens(dtype: Any = np.uint16) -> np.ndarray:
    return np.arange(sum(LENGTHS)).astype(dtype)


def read(prefix: Path, *, vocab_size: int = VOCABULARY) -> int:
    """Open as training does, and read every sample."""
    index = open_stored(prefix, vocab_size=vocab_size)
    return sum(index.read(sample).length_tokens for sample in range(len(index)))


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write(tmp_path / "train", tokens())


def put(format_: str, offset: int, *values: Any) -> Change:
    return lambda raw: struct.pack_into(format_, raw, offset, *values)


LENGTHS_AT, OFFSETS_AT, BOUNDARIES_AT = HEADER.size, HEADER.size + 16, HEADER.size + 48
INDEX: dict[str, Change] = {
    "another magic": put("<9s", 0, b"PK\x03\x04"),
    "version 2": put("<Q", 9, 2),
    "a dtype of fractions": put("<B", 17, 7),
    "wider tokens than there are": put("<B", 17, 4),
    "no sequence": put("<Q", 18, 0),
    "a sequence too many": put("<Q", 18, 5),
    "sequences beyond any disk": put("<Q", 18, 2**63),
    "a negative length": put("<i", LENGTHS_AT, -30),
    "a huge length": put("<i", LENGTHS_AT, 2**31 - 1),
    "an offset that is another": put("<q", OFFSETS_AT + 8, 61),
    "a first boundary that is not 0": put("<q", BOUNDARIES_AT, 1),
    "boundaries out of order": put("<q", BOUNDARIES_AT + 8, 3),
    "a last boundary beyond the end": put("<q", BOUNDARIES_AT + 32, 5),
    "cut inside the header": lambda raw: raw.__delitem__(slice(20, None)),
    "cut by a byte": lambda raw: raw.pop(),
    "a byte too many": lambda raw: raw.append(0),
    "nothing": lambda raw: raw.clear(),
}


TOKENS: dict[str, Change] = {
    "nothing": lambda raw: raw.clear(),
    "cut by a byte": lambda raw: raw.pop(),
    "a byte too many": lambda raw: raw.append(0),
    "a token beyond the vocabulary": put("<H", 40, VOCABULARY),
}


@pytest.mark.parametrize(
    ("suffix", "name"), [(".idx", name) for name in INDEX] + [(".bin", name) for name in TOKENS]
)
def test_damage(suffix: str, name: str, prefix: Path) -> None:
    path = Path(f"{prefix}{suffix}")
    raw = bytearray(path.read_bytes())
    (INDEX if suffix == ".idx" else TOKENS)[name](raw)
    path.write_bytes(raw)
    check_refused(lambda: read(prefix), DataError, str(path if suffix == ".bin" else prefix))


@pytest.mark.parametrize(("dtype", "value"), [(np.int32, -1), (np.int8, -5), (np.int64, 2**40)])
def test_signed_tokens(dtype: Any, value: int, tmp_path: Path) -> None:
    values = tokens(dtype)
    values[50] = value
    prefix = write(tmp_path / "signed", values)
    check_refused(lambda: read(prefix), DataError, f"{prefix}.bin", f"token {value}")


def test_tokens_that_the_first_look_passes_over_are_found_when_they_are_read(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_PLACE_BYTES", 2)
    monkeypatch.setattr(documents, "_PLACES", 2)
    raw = bytearray(Path(f"{prefix}.bin").read_bytes())
    struct.pack_into("<H", raw, 64, 999)
    Path(f"{prefix}.bin").write_bytes(raw)
    open_stored(prefix, vocab_size=VOCABULARY)
    check_refused(lambda: read(prefix), DataError, f"{prefix}, document 1", "token 999")


SUMMARIES: dict[str, tuple[bytes, bool]] = {
    "a tokenizer that is too large": (b'{"tokenizer": {"vocab_size": 257}}', True),
    "a tokenizer that fits": (b'{"tokenizer": {"vocab_size": 256}}', False),
    "another program's": (b'[{"file": 1}]', False),
    "damaged": (b'{"tokenizer": ', False),
}
"""PREFIX.json -> whether it is refused. What is no summary is nobody's business: tokens are looked
at themselves."""


@pytest.mark.parametrize("name", SUMMARIES)
def test_summaries(name: str, prefix: Path) -> None:
    text, refused = SUMMARIES[name]
    Path(f"{prefix}.json").write_bytes(text)
    if refused:
        check_refused(lambda: read(prefix), DataError, f"{prefix}.json", "256")
    else:
        with bounded():
            assert read(prefix) == sum(LENGTHS) - len(LENGTHS)


ONES = np.ones(sum(LENGTHS), dtype=np.uint8)
MASKS: dict[str, tuple[np.ndarray, tuple[int, ...]]] = {
    "weights of four bytes": (ONES.astype(np.int32), LENGTHS),
    "one two": (np.where(np.arange(len(ONES)) == 40, 2, 1).astype(np.uint8), LENGTHS),
    "all zero": (0 * ONES, LENGTHS),
    "other documents": (ONES, tuple(reversed(LENGTHS))),
    "fractions": (ONES.astype(np.float32), LENGTHS),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, prefix: Path) -> None:
    mask = write(Path(f"{prefix}_loss_mask"), *MASKS[name])
    check_refused(lambda: read(prefix), DataError, str(mask))


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_half_a_mask(missing: str, prefix: Path) -> None:
    mask = write(Path(f"{prefix}_loss_mask"), ONES)
    Path(f"{mask}{missing}").unlink()
    check_refused(lambda: read(prefix), DataError, f"{mask}{missing}")


@pytest.mark.parametrize("name", ["", "\0", "x" * 300, "/", "train.bin", "train.idx"])
def test_prefixes(name: str, prefix: Path) -> None:
    check_refused(lambda: read(Path(f"{prefix.parent}/{name}")), DataError)
