# SPDX-License-Identifier: Apache-2.0
"""The cost model: ms of every part of the model, affine in a micro-batch's features.

Affine costs add up over documents, never fall when a feature grows, and extrapolate sensibly to
lengths that were not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sparsebalance_megatron.config import DEFAULT_SELECTION, ConfigError
from sparsebalance_megatron.cost.exchange import Exchange, ms_per_byte
from sparsebalance_megatron.cost.features import FEATURES
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.cost.table import (
    CostRow,
    CostTable,
    CostTableError,
    ExchangeRow,
    ModelShape,
)
from sparsebalance_megatron.cost.work_model import WorkModel, work_model_named

_FOLDS = 5

_PER_ROW = ("micro_batches", "sequences", "tokens")
_DEPENDS_ON: Mapping[Part, tuple[str, ...]] = {
    Part.ATTENTION: (*_PER_ROW, "block_pairs"),
    Part.ROUTER: (*_PER_ROW, "visible_block_pairs"),
    Part.LINEAR: _PER_ROW,
    Part.EMBEDDING: _PER_ROW,
    Part.HEAD: _PER_ROW,
}
_FULL_RECOMPUTE = frozenset({Part.ATTENTION, Part.ROUTER, Part.LINEAR})
_ATTENTION_RECOMPUTE = frozenset({Part.ATTENTION, Part.ROUTER})
_NOTHING: frozenset[Part] = frozenset()

COUNTED = "counted operations"
"""How the source of a model begins that measured nothing."""
_NOMINAL_FLOPS_PER_MS = 1e11
"""100 TFLOP/s. Plans depend on ratios of costs only."""


@dataclass(frozen=True, kw_only=True)
class FitError:
    """How far a model is from the measurements of one (part, direction), relative to them."""

    median: float
    p95: float
    rows: int


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """ms per unit of every feature, in the order of :data:`.features.FEATURES`, never negative.

    ``source`` says where the numbers come from, ``work`` how many block pairs the selection
    computes, ``exchange`` what it takes that ranks share a row. The parts of a layer are per layer.
    """

    block_size: int
    forward_ms: Mapping[Part, tuple[float, ...]]
    backward_ms: Mapping[Part, tuple[float, ...]]
    source: str
    work: WorkModel = field(default_factory=lambda: work_model_named(DEFAULT_SELECTION), repr=False)
    exchange: Exchange = field(default=Exchange())

    def __post_init__(self) -> None:
        for direction in Direction:
            for part in Part:
                row = self._of(direction).get(part, ())
                if len(row) != len(FEATURES) or not all(
                    math.isfinite(value) and value >= 0.0 for value in row
                ):
                    raise ValueError(
                        f"cost model: {part} {direction} is {row}, expected {len(FEATURES)} "
                        "finite costs of at least 0"
                    )

    def _of(self, direction: Direction) -> Mapping[Part, tuple[float, ...]]:
        return self.forward_ms if direction is Direction.FORWARD else self.backward_ms

    def coefficients_ms(self, part: Part, direction: Direction) -> np.ndarray:
        """[5] ms per unit of every feature."""
        return np.array(self._of(direction)[part], dtype=np.float64)

    def with_recompute(
        self, *, full: bool, attention_only: bool, attention_kept: bool = False
    ) -> CostModel:
        """A model whose backward contains the forward that activation recomputation repeats.

        Args:
            full: ``--recompute-granularity full``: whole layers.
            attention_only: selective recomputation of ``core_attn``: routing and attention.
            attention_kept: routing and attention of the forward serve the recomputed pass too.
        """
        repeated = _FULL_RECOMPUTE if full else _ATTENTION_RECOMPUTE if attention_only else _NOTHING
        if attention_kept:
            repeated -= _ATTENTION_RECOMPUTE
        backward_ms = dict(self.backward_ms)
        for part in repeated:
            pairs = zip(self.backward_ms[part], self.forward_ms[part], strict=True)
            backward_ms[part] = tuple(backward + forward for backward, forward in pairs)
        return replace(self, backward_ms=backward_ms)

    def with_frozen_weights(self) -> CostModel:
        """A model whose weights take no gradients: of low-rank adapters (LoRA), say.

        Backward of a projection is two products as large as its forward, one for its input and one
        for its weights; the second falls away, and with it half the backward of the linear parts
        and the head, and all of the embedding's. Attention has no weights. The adapters' own
        products are left out: they are smaller by rank over width.
        """
        kept = {Part.LINEAR: 0.5, Part.HEAD: 0.5, Part.EMBEDDING: 0.0}
        backward_ms = {
            part: tuple(kept.get(part, 1.0) * value for value in row)
            for part, row in self.backward_ms.items()
        }
        return replace(self, backward_ms=backward_ms)

    def with_bandwidth(self, gigabytes_per_second: float) -> CostModel:
        """A model whose exchange runs at a bandwidth that a rank receives with, at every width."""
        rate = ms_per_byte(gigabytes_per_second)
        exchange = replace(self.exchange, ms_per_byte=rate, cp_size_slowness=())
        return replace(self, exchange=exchange)

    @classmethod
    def fit(cls, table: CostTable) -> CostModel:
        """Non-negative least squares on relative errors, so that small and large both fit.

        Raises:
            CostTableError: if the table is invalid.
        """
        table.validate()
        block_size, work = table.identity.block_size, _work_of(table)
        fitted = {
            direction: {
                part: _fit_rows(_rows_of(table, part, direction), part, block_size, work)
                for part in Part
            }
            for direction in Direction
        }
        versions = ", ".join(f"{name} {version}" for name, version in table.versions.items())
        identity = table.identity
        return cls(
            block_size=block_size,
            work=work,
            exchange=_measured_exchange(table),
            forward_ms=fitted[Direction.FORWARD],
            backward_ms=fitted[Direction.BACKWARD],
            source=f"{len(table.rows)} measurements of {table.date} on {identity.device}, "
            f"{identity.dtype} ({versions})",
        )

    @classmethod
    def analytic(
        cls,
        shape: ModelShape,
        block_size: int,
        *,
        selection: str = DEFAULT_SELECTION,
        flops_per_ms: float = _NOMINAL_FLOPS_PER_MS,
    ) -> CostModel:
        """Counted operations over a nominal rate, for runs without a table.

        Counts matrix multiplications, twice per multiply-add, of one tensor-parallel rank.
        Backward is 2x the forward of a projection and 2.5x of attention (five products for two).
        """
        work = work_model_named(selection)
        per_token, per_pair = _counted_flops(shape, block_size, work)
        forward_ms = {
            part: _coefficients(
                tokens=per_token[part] / flops_per_ms,
                block_pairs=per_pair[part] / flops_per_ms if part is Part.ATTENTION else 0.0,
                visible_block_pairs=per_pair[part] / flops_per_ms if part is Part.ROUTER else 0.0,
            )
            for part in Part
        }
        factor = {Part.ATTENTION: 2.5, Part.ROUTER: 0.0, Part.EMBEDDING: 1.0}
        backward_ms = {
            part: tuple(factor.get(part, 2.0) * value for value in row)
            for part, row in forward_ms.items()
        }
        return cls(
            block_size=block_size,
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            work=work,
            exchange=_exchange(shape),
            source=f"{COUNTED} at {flops_per_ms:.3g} per ms",
        )


def _exchange(shape: ModelShape, dtype: str = "bfloat16") -> Exchange:
    kv_heads = max(1, shape.num_query_groups // shape.tensor_parallel_size)
    return Exchange.of(kv_heads, shape.head_dim, dtype)


def _measured_exchange(table: CostTable) -> Exchange:
    """The model's, at the measured time per byte of each width where there are any."""
    exchange = _exchange(table.identity.shape, table.identity.dtype)
    ms_per_byte_W = {
        width: _fitted_ms_per_byte([row for row in table.exchanges if row.width == width])
        for width in sorted({row.width for row in table.exchanges})
    }
    if not ms_per_byte_W:
        return exchange
    narrowest = next(iter(ms_per_byte_W.values()))
    slowness = tuple((width, value / narrowest) for width, value in ms_per_byte_W.items())
    return replace(exchange, ms_per_byte=narrowest, cp_size_slowness=slowness)


def _fitted_ms_per_byte(rows: Sequence[ExchangeRow]) -> float:
    """Least squares on relative errors: with x bytes per measured ms, sum(x) / sum(x^2)."""
    bytes_per_ms = np.array([row.received_bytes / row.ms_median for row in rows])
    return float(f"{bytes_per_ms.sum() / (bytes_per_ms**2).sum():.6g}")


def fit_errors(model: CostModel, table: CostTable) -> dict[tuple[Part, Direction], FitError]:
    """Absolute relative error of a model on a table's rows, per part and direction."""
    return {
        (part, direction): _error(
            _relative_errors(
                model.coefficients_ms(part, direction), rows, model.block_size, model.work
            )
        )
        for part, direction, rows in _timed_parts(table)
    }


def held_out_errors(table: CostTable) -> dict[tuple[Part, Direction], FitError]:
    """Like :func:`fit_errors`, but every row is predicted from a fit that has not seen it.

    Rows are left out a fifth at a time, every fifth row in the table's order; the order follows
    length, so that each fit has to interpolate and the outer ones to extrapolate.
    """
    block_size, work = table.identity.block_size, _work_of(table)
    errors = {}
    for part, direction, rows in _timed_parts(table):
        folds = min(_FOLDS, len(rows))
        parts = []
        for fold in range(folds):
            seen = [row for index, row in enumerate(rows) if index % folds != fold]
            coefficients = np.array(_fit_rows(seen or rows, part, block_size, work))
            parts.append(_relative_errors(coefficients, rows[fold::folds], block_size, work))
        errors[part, direction] = _error(np.concatenate(parts))
    return errors


def _work_of(table: CostTable) -> WorkModel:
    try:
        return work_model_named(table.identity.selection)
    except ConfigError as error:
        raise CostTableError(
            f"cost table: no selection named {table.identity.selection!r}: {error}"
        ) from error


def _timed_parts(table: CostTable) -> list[tuple[Part, Direction, list[CostRow]]]:
    parts = [
        (part, direction, _rows_of(table, part, direction))
        for direction in Direction
        for part in Part
    ]
    return [part for part in parts if part[2]]


def _relative_errors(
    coefficients: np.ndarray, rows: list[CostRow], block_size: int, work: WorkModel
) -> np.ndarray:
    measured_ms = np.array([row.ms_median for row in rows])
    matrix = np.stack([row.features(block_size, work) for row in rows])
    return np.abs(matrix @ coefficients / measured_ms - 1.0)


def _error(relative: np.ndarray) -> FitError:
    return FitError(
        median=float(np.median(relative)),
        p95=float(np.quantile(relative, 0.95)),
        rows=len(relative),
    )


def _rows_of(table: CostTable, part: Part, direction: Direction) -> list[CostRow]:
    return [row for row in table.rows if (row.part, row.direction) == (part, direction)]


def _fit_rows(
    rows: list[CostRow], part: Part, block_size: int, work: WorkModel
) -> tuple[float, ...]:
    """Coefficients of one part in one direction; no rows mean that it is never timed."""
    if not rows:
        return _coefficients()
    names = _DEPENDS_ON[part]
    columns = [FEATURES.index(name) for name in names]
    measured_ms = np.array([row.ms_median for row in rows])
    matrix = np.stack([row.features(block_size, work) for row in rows])[:, columns]
    relative = matrix / measured_ms[:, None]
    # Here, because it takes a second to load, and only measured tables are fitted.
    from scipy.optimize import nnls

    # Columns differ by many orders of magnitude; unit columns keep the solver accurate.
    unit = np.linalg.norm(relative, axis=0)
    try:
        solution, _ = nnls(relative / unit, np.ones(len(rows)))
    except (RuntimeError, ValueError) as error:
        raise CostTableError(
            f"cost table: {part} cannot be fitted ({error}); measure again with "
            "`sparse-balance profile`"
        ) from error
    # Six digits, so that ranks whose linear algebra rounds differently still agree on the model.
    rounded = [float(f"{value:.6g}") for value in solution / unit]
    return _coefficients(**dict(zip(names, rounded, strict=True)))


def _coefficients(**ms_per_unit: float) -> tuple[float, ...]:
    return tuple(ms_per_unit.get(name, 0.0) for name in FEATURES)


def _counted_flops(
    shape: ModelShape, block_size: int, work: WorkModel
) -> tuple[dict[Part, float], dict[Part, float]]:
    """(operations per token, operations per block pair) of every part on one TP rank."""
    heads, groups, head_dim = shape.num_attention_heads, shape.num_query_groups, shape.head_dim
    hidden, share = shape.hidden_size, 1.0 / shape.tensor_parallel_size
    projections = hidden * head_dim * (2 * heads + 2 * groups)
    mlp = hidden * shape.ffn_hidden_size * (3 if shape.gated_linear_unit else 2)
    scores = work.scores_per_visible_pair(heads, groups, block_size)
    per_token = dict.fromkeys(Part, 0.0) | {
        Part.ROUTER: head_dim * (heads + groups) * share,
        Part.LINEAR: 2.0 * (projections + mlp) * share,
        Part.EMBEDDING: float(hidden),
        Part.HEAD: 2.0 * hidden * shape.vocab_size * share,
    }
    per_pair = dict.fromkeys(Part, 0.0) | {
        Part.ATTENTION: 4.0 * heads * head_dim * block_size**2 * share,
        Part.ROUTER: 2.0 * scores * head_dim * share,
    }
    return per_token, per_pair
