# SPDX-License-Identifier: Apache-2.0
"""Cost tables: measured latencies of one model's parts on one device, kept as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.cost.features import features
from sparsebalance_megatron.cost.parts import NEVER_TIMED, Direction, Part
from sparsebalance_megatron.cost.work_model import WorkModel
from sparsebalance_megatron.json_file import UnreadableFileError, read_json

FORMAT_VERSION = 1
_LARGEST_INTEGER = 2**40
"""Limit of any size, length or count: far below where numbers of 64 bits lose digits."""
_MS_RANGE = (1e-7, 1e7)
"""Range of a measured time: from less than a clock can tell to hours."""

_PLAIN_TYPES: Mapping[Any, type] = {"bool": bool, "float": float, "int": int, "str": str}
"""Name in annotations -> type."""

_SHOWN_CHARACTERS = 60

_REMEDY = "measure again with `sparse-balance profile` and this model's flags"


class CostTableError(ValueError):
    """A cost table cannot be read, is damaged, or was measured for something else."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that a layer's cost depends on, as Megatron's flags name them."""

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    gated_linear_unit: bool
    tensor_parallel_size: int


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What latencies depend on besides lengths and budgets; equal or not comparable.

    ``selection`` is who selects blocks (the granularity); ``dtype`` is torch's name without the
    prefix.
    """

    device: str
    dtype: str
    block_size: int
    selection: str
    shape: ModelShape

    def differences(self, other: RunIdentity) -> list[tuple[str, Any, Any]]:
        """(field, value here, value there) of every field that differs."""
        here, there = _flat(self), _flat(other)
        return [(name, here[name], there[name]) for name in here if here[name] != there[name]]


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """One measurement: a part of the model on one packed micro-batch.

    ``lengths_tokens``: one per document. ``budget_blocks``: of every document; None means all
    visible blocks. ``ms_spread``: median absolute deviation over ``repeats`` runs.
    """

    part: Part
    direction: Direction
    lengths_tokens: tuple[int, ...]
    budget_blocks: int | None
    ms_median: float
    ms_spread: float
    repeats: int

    def features(self, block_size: int, work: WorkModel) -> np.ndarray:
        """[5] feature vector of the measured micro-batch."""
        budget = np.inf if self.budget_blocks is None else self.budget_blocks
        return features(self.lengths_tokens, budget, block_size, work)


@dataclass(frozen=True, kw_only=True)
class ExchangeRow:
    """One measurement of keys and values travelling between the ranks that share a row.

    ``width``: ranks. ``received_bytes``: by each of them (:func:`.exchange.received_bytes`).
    """

    width: int
    received_bytes: int
    ms_median: float
    ms_spread: float
    repeats: int


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Measurements and what they were measured on.

    ``exchanges``: none in a table that was measured on one rank, or by an earlier release.
    ``versions``: package -> version, ``date``: ISO 8601, ``threads``: host threads of the
    process. ``path`` is where the table was read from; it is not part of the table.
    """

    identity: RunIdentity
    versions: Mapping[str, str]
    date: str
    threads: int
    rows: tuple[CostRow, ...]
    exchanges: tuple[ExchangeRow, ...] = ()
    path: str | None = field(default=None, compare=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostTable:
        """Read and validate a table.

        Raises:
            CostTableError: if the file is missing, not JSON, of another format, incomplete, or
                holds a value that no measurement can have.
        """
        place = f"cost table {os.fspath(path)}"
        try:
            document = read_json(Path(path))
        except UnreadableFileError as error:
            raise CostTableError(f"{place}: {error}; check the path, or {_REMEDY}") from error
        table = _Reader(place).table(document, os.fspath(path))
        table.validate()
        return table

    def save(self, path: str | os.PathLike[str]) -> None:
        """Validate, then write atomically: readers see the old file or the whole new one.

        Raises:
            CostTableError: if the table is invalid.
            OSError: if the file cannot be written.
        """
        self.validate()
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            with partial.open("x", encoding="utf-8") as file:
                file.write(self._to_json())
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    def validate(self) -> None:
        """Check every value.

        Raises:
            CostTableError: naming the field or row that no measurement can have.
        """
        place = self._place()
        for name, value in _flat(self.identity).items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise CostTableError(f"{place}: {name} is {value}; must be at least 1; {_REMEDY}")
        for index, row in enumerate(self.rows):
            problem = _row_problem(row)
            if problem is not None:
                raise CostTableError(f"{place}, row {index}: {problem}; {_REMEDY}")
        for index, exchange in enumerate(self.exchanges):
            problem = _exchange_problem(exchange)
            if problem is not None:
                raise CostTableError(f"{place}, exchange {index}: {problem}; {_REMEDY}")
        measured = {(row.part, row.direction) for row in self.rows}
        for pair in ((part, direction) for part in Part for direction in Direction):
            if pair not in measured | NEVER_TIMED:
                raise CostTableError(f"{place}: no row for {pair[0]} {pair[1]}; {_REMEDY}")

    def check_matches(self, run: RunIdentity) -> None:
        """Check that the table was measured for ``run``.

        Raises:
            CostTableError: naming every field that differs and both values.
        """
        differences = self.identity.differences(run)
        if differences:
            listed = "; ".join(
                f"{name} is {table_value} in the table, {run_value} in this run"
                for name, table_value, run_value in differences
            )
            raise CostTableError(f"{self._place()}: {listed}; {_REMEDY}")

    def _place(self) -> str:
        return "cost table" if self.path is None else f"cost table {self.path}"

    def _to_json(self) -> str:
        header = {
            "format_version": FORMAT_VERSION,
            **asdict(self.identity),
            "versions": dict(self.versions),
            "date": self.date,
            "threads": self.threads,
        }
        if self.exchanges:
            header["exchanges"] = [asdict(exchange) for exchange in self.exchanges]
        head = json.dumps(header, indent=1, allow_nan=False).removesuffix("\n}")
        rows = ",\n".join("  " + json.dumps(_row_json(row), allow_nan=False) for row in self.rows)
        return f'{head},\n "rows": [\n{rows}\n ]\n}}\n'


def _flat(identity: RunIdentity) -> dict[str, Any]:
    values = {f.name: getattr(identity, f.name) for f in fields(identity) if f.name != "shape"}
    return values | {f"shape.{name}": value for name, value in asdict(identity.shape).items()}


def _row_json(row: CostRow) -> dict[str, Any]:
    values = asdict(row)
    return {"kind": values.pop("part"), **values}


def _exchange_problem(row: ExchangeRow) -> str | None:
    if row.width < 2 or row.received_bytes < 1:
        return f"{row.received_bytes} bytes received by {row.width} ranks; at least 1 by 2 ranks"
    return _times_problem(row)


def _row_problem(row: CostRow) -> str | None:
    if not row.lengths_tokens or min(row.lengths_tokens) < 1:
        return f"lengths_tokens {list(row.lengths_tokens)} must be at least 1 token each"
    if row.budget_blocks is not None and row.budget_blocks < 1:
        return f"budget_blocks {row.budget_blocks} must be at least 1 or null"
    return _times_problem(row)


def _times_problem(row: CostRow | ExchangeRow) -> str | None:
    least_ms, most_ms = _MS_RANGE
    if not least_ms <= row.ms_median <= most_ms:
        return f"ms_median {row.ms_median} must lie in {least_ms:g} to {most_ms:g}"
    if not (math.isfinite(row.ms_spread) and row.ms_spread >= 0.0):
        return f"ms_spread {row.ms_spread} must be finite and not negative"
    if row.repeats < 1:
        return f"repeats {row.repeats} must be at least 1"
    return None


class _Reader:
    """Takes typed values out of parsed JSON; errors name the place and the key."""

    def __init__(self, place: str) -> None:
        self._place = place

    def table(self, document: Any, path: str) -> CostTable:
        version = self._value(document, "format_version", int, "")
        if version != FORMAT_VERSION:
            raise CostTableError(
                f"{self._place}: format_version is {version}, this release reads "
                f"{FORMAT_VERSION}; {_REMEDY}"
            )
        shape = self._value(document, "shape", dict, "")
        versions = self._value(document, "versions", dict, "")
        rows = self._value(document, "rows", list, "")
        return CostTable(
            identity=RunIdentity(
                **self._plain(RunIdentity, document, ""),
                shape=ModelShape(**self._plain(ModelShape, shape, "shape")),
            ),
            versions={name: self._value(versions, name, str, "versions") for name in versions},
            date=self._value(document, "date", str, ""),
            threads=self._value(document, "threads", int, ""),
            rows=tuple(self._row(row, f"row {index}") for index, row in enumerate(rows)),
            exchanges=self._exchanges(document),
            path=path,
        )

    def _exchanges(self, document: Any) -> tuple[ExchangeRow, ...]:
        if "exchanges" not in document:
            return ()
        rows = self._value(document, "exchanges", list, "")
        return tuple(
            ExchangeRow(**self._plain(ExchangeRow, row, f"exchange {index}"))
            for index, row in enumerate(rows)
        )

    def _plain(self, holder: Any, mapping: Any, where: str) -> dict[str, Any]:
        """The fields of a dataclass that are plain numbers, strings and flags."""
        return {
            f.name: self._value(mapping, f.name, _PLAIN_TYPES[f.type], where)
            for f in fields(holder)
            if f.type in _PLAIN_TYPES
        }

    def _row(self, row: Any, where: str) -> CostRow:
        lengths = self._value(row, "lengths_tokens", list, where)
        numbered = dict(enumerate(lengths))
        budget = row.get("budget_blocks", math.nan)
        return CostRow(
            part=self._choice(row, "kind", Part, where),
            direction=self._choice(row, "direction", Direction, where),
            lengths_tokens=tuple(
                self._value(numbered, index, int, f"{where}, lengths_tokens") for index in numbered
            ),
            budget_blocks=None if budget is None else self._value(row, "budget_blocks", int, where),
            **self._plain(CostRow, row, where),
        )

    def _choice[T: (Part, Direction)](
        self, mapping: Any, key: str, choices: type[T], where: str
    ) -> T:
        value = self._value(mapping, key, str, where)
        if value not in set(choices):
            allowed = ", ".join(choices)
            raise self._error(where, f"{key} is {value!r}, expected one of {allowed}")
        return choices(value)

    def _value(self, mapping: Any, key: Any, kind: type, where: str) -> Any:
        if not isinstance(mapping, dict):
            raise self._error(where, f"expected an object, found {type(mapping).__name__}")
        if key not in mapping:
            raise self._error(where, f"{key} is missing")
        value = mapping[key]
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
            shown = repr(value)[:_SHOWN_CHARACTERS]
            raise self._error(where, f"{key} is {shown}, expected {kind.__name__}")
        if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            raise self._error(where, f"{key} is an integer of more than {_LARGEST_INTEGER}")
        return kind(value)

    def _error(self, where: str, problem: str) -> CostTableError:
        place = f"{self._place}, {where}" if where else self._place
        return CostTableError(f"{place}: {problem}; {_REMEDY}")
