# SPDX-License-Identifier: Apache-2.0
"""Fits a cost model to a table of measurements, and says how far to believe it."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from sparsebalance_megatron.config import SparseBalanceConfig, flag_with
from sparsebalance_megatron.cost.exchange import Exchange
from sparsebalance_megatron.cost.model import OF_FLASH_ATTENTION_4, CostModel, selection_efficiency
from sparsebalance_megatron.cost.parts import Direction, Part, SegmentCost
from sparsebalance_megatron.cost.table import (
    CostRow,
    CostTable,
    CostTableError,
    ExchangeRow,
    ModelShape,
    RunIdentity,
)
from sparsebalance_megatron.cost.work_model import FEATURES, by_feature, features, work_model_named
from sparsebalance_megatron.flash_attention import will_serve
from sparsebalance_megatron.layer_budgets import ALL_DENSE

_FOLDS = 5
_NO_TABLE = "no cost table"
_DOUBTFUL_ERROR = 0.4
"""Median relative error of a fit. Times of a busy machine stay below half of it; times that fall
where the work grows do not."""

_COMMON_FEATURES = ("micro_batches", "sequences", "tokens")
_PAIRS = {
    Part.ATTENTION: "block_pairs",
    **dict.fromkeys((Part.DENSE_ATTENTION, Part.ROUTER), "visible_block_pairs"),
}
"""The feature besides the common ones that a part's time depends on."""


@contextmanager
def without_warnings() -> Iterator[None]:
    """Leave out that costs are counted, for what says whose times it takes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"{_NO_TABLE}: ")
        yield


def configured_cost_model(
    config: SparseBalanceConfig,
    shape: ModelShape,
    run: Mapping[str, Any],
    *,
    expert_parallel_size: int = 1,
) -> CostModel:
    """The costs of a configured run: those of its table, else counted operations. Warns of the
    latter, and where a table's costs are hard to believe.

    Args:
        run: what else the table must have been measured for.

    Raises:
        CostTableError: the table was measured for something else.
    """
    if config.cost_table is not None:
        compared = {"block_size": config.block_size, **shape.flat(), **run}
        if config.layer_budgets != ALL_DENSE:  # else nothing is selected
            compared["selection"] = config.selection
        table = CostTable.load(config.cost_table)
        table.check_matches(compared)
        cost = fit_cost_model(table)
        for doubt in doubts(table, cost):
            warnings.warn(doubt, stacklevel=3)
        if config.dense_attention not in ("auto", cost.dense_kernel):
            warnings.warn(
                f"{flag_with('dense_attention', config.dense_attention)}: cost table "
                f"{config.cost_table} has times of {cost.dense_kernel}; measure again with "
                "`sparse-balance profile` and this option",
                stacklevel=3,
            )
        return cost
    warnings.warn(
        f"{_NO_TABLE}: times are operations counted for {config.counted_device.upper()}, not "
        "measured, and plans are worse. `sparse-balance profile` measures one.",
        stacklevel=3,
    )
    efficiency = selection_efficiency(work_model_named(config.selection), config.block_size)
    heads, head_dims = shape.rank_heads, (shape.head_dim, shape.value_dim)
    named = config.dense_attention
    if named in ("auto", "fa4") and will_serve(
        config.counted_device, heads, head_dims, named=named == "fa4"
    ):
        efficiency = replace(efficiency, dense=OF_FLASH_ATTENTION_4)
    return CostModel.analytic(
        shape,
        config.block_size,
        selection=config.selection,
        efficiency=efficiency,
        device=config.counted_device,
        expert_parallel_size=expert_parallel_size,
        gigabytes_per_second=config.gigabytes_per_second,
    )


def fit_cost_model(table: CostTable) -> CostModel:
    """Non-negative least squares on relative errors, so that small and large both fit."""
    identity = table.identity
    versions = ", ".join(f"{name} {version}" for name, version in table.versions.items())
    return CostModel(
        block_size=identity.block_size,
        work=work_model_named(identity.selection),
        exchange=_measured_exchange(table),
        segments=table.segments or SegmentCost(),
        ms_per_unit={
            timed: _fit_rows(rows, timed[0], identity) for timed, rows in table.rows_by_part.items()
        },
        source=f"{len(table.rows)} measurements of {table.date} on {identity.device}, "
        f"{identity.dtype} ({versions})",
        device=identity.device,
        list_kernel=table.list_kernel,
        dense_kernel=table.dense_kernel,
    )


def _measured_exchange(table: CostTable) -> Exchange:
    """The model's, at the measured time per byte of each cp_size where there are any."""
    exchange = Exchange.of(table.identity.shape, table.identity.dtype)
    ms_per_byte_of = {
        width: _fitted_ms_per_byte([row for row in table.exchanges if row.width == width])
        for width in sorted({row.width for row in table.exchanges})
    }
    if not ms_per_byte_of:
        return exchange
    smallest = next(iter(ms_per_byte_of.values()))
    slowness = tuple((width, value / smallest) for width, value in ms_per_byte_of.items())
    return replace(exchange, ms_per_byte=smallest, cp_size_slowness=slowness)


def _fitted_ms_per_byte(rows: Sequence[ExchangeRow]) -> float:
    """Least squares on relative errors: with x bytes per measured ms, sum(x) / sum(x^2)."""
    bytes_per_ms = np.array([row.received_bytes / row.ms_median for row in rows])
    return float(f"{bytes_per_ms.sum() / (bytes_per_ms**2).sum():.6g}")


def fit_errors(model: CostModel, table: CostTable) -> dict[tuple[Part, Direction], np.ndarray]:
    """Absolute relative errors of a model on a table's rows, per part and direction."""
    return {
        timed: np.abs(_features_per_ms(rows, table.identity) @ model.coefficients_ms(*timed) - 1.0)
        for timed, rows in table.rows_by_part.items()
    }


def held_out_errors(table: CostTable) -> dict[tuple[Part, Direction], np.ndarray]:
    """Like :func:`fit_errors`, but every row is predicted from a fit that has not seen it: every
    fifth row is left out at a time, so that fits interpolate and extrapolate."""
    errors = {}
    for timed, rows in table.rows_by_part.items():
        folds = min(_FOLDS, len(rows))
        of_folds = []
        for fold in range(folds):
            seen = [row for index, row in enumerate(rows) if index % folds != fold]
            coefficients = _fit_rows(seen or rows, timed[0], table.identity)
            of_folds.append(_features_per_ms(rows[fold::folds], table.identity) @ coefficients)
        errors[timed] = np.abs(np.concatenate(of_folds) - 1.0)
    return errors


def _features_per_ms(rows: Sequence[CostRow], identity: RunIdentity) -> np.ndarray:
    """[rows, 5] features over measured ms: their products with coefficients are 1 where these
    predict what was measured."""
    work = work_model_named(identity.selection)
    of_rows = [
        features(row.lengths_tokens, row.budget_blocks or np.inf, identity.block_size, work)
        for row in rows
    ]
    return np.stack(of_rows) / np.array([row.ms_median for row in rows])[:, None]


def _fit_rows(rows: Sequence[CostRow], part: Part, identity: RunIdentity) -> tuple[float, ...]:
    """Coefficients of one part in one direction."""
    names = _COMMON_FEATURES + ((_PAIRS[part],) if part in _PAIRS else ())
    relative = _features_per_ms(rows, identity)[:, [FEATURES.index(name) for name in names]]
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
    return by_feature(dict(zip(names, rounded, strict=True)))


def doubts(table: CostTable, model: CostModel) -> tuple[str, ...]:
    """Reasons to measure again, one sentence each."""
    single = [
        f"{part} {direction}"
        for (part, direction), rows in table.rows_by_part.items()
        if len({row.lengths_tokens for row in rows}) == 1
    ]
    off = [
        f"{part} {direction} by {median:.0%}"
        for (part, direction), errors in fit_errors(model, table).items()
        if (median := float(np.median(errors))) > _DOUBTFUL_ERROR
    ]
    found = {
        "measured at one size only, so that times at any other are a guess": single,
        "times do not grow as work does; the fit is off, at the median, in": off,
    }
    return tuple(
        f"{table.place}: {problem}: {', '.join(where)}; measure again on an idle machine with "
        "`sparse-balance profile`"
        for problem, where in found.items()
        if where
    )
