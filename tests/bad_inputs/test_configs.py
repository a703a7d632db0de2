# SPDX-License-Identifier: Apache-2.0
"""Wrong numbers and choices in the config; tests/megatron/test_arguments.py has flags as typed."""

from __future__ import annotations

from typing import Any

import pytest
from bad_inputs.judge import check_refused

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name

NAN, INFINITY = float("nan"), float("inf")
REFUSED: dict[str, tuple[Any, ...]] = {
    "block_size": (0, -1, 3, 96, 2**21, 2**63, 1.5, NAN, "256", []),
    "base_budget": (0, -1, 2**31, 2**40, NAN, "32"),
    "layer_budgets": ("", "dense", "dense:", "0:1", "dense:1-0", "8:1,1", "8", 5),
    "coverage_threshold": (1.0, 2, 5, -0.1, NAN, INFINITY, "0.1"),
    "coverage_decay": (1.0, -0.5, NAN, INFINITY, "0.9"),
    "plan_ms": (-1, NAN, INFINITY, 1e9, "4"),
    "log_megabytes": (0, -1, 10**9, NAN, "64"),
    "max_tokens_per_micro_batch": (0, -5, NAN, "4096"),
    "max_context_parallel": (0, 6, NAN, "2"),
    "coverage_slack": (1.0, -0.1, NAN, "0"),
    "gigabytes_per_second": (0.0, -1, INFINITY, NAN),
    "dry_run": (-1, 10**9, NAN, "32"),
    "batching": ("best", "", 1, None),
    "tuning": ("on", "", True),
    "anchor": ("median", ""),
    "selection": ("query", "block", ""),
    "attention": ("flash", ""),
    "eval_attention": ("off",),
    "coverage_target": ("mean",),
    "planning": ("late",),
    "overlong": ("cut", "Split"),
    "calibration": ("on",),
    "device": ("tpu", "cuda:0"),
}
"""Field -> values; a refusal names the flag."""

ACCEPTED: tuple[dict[str, Any], ...] = (
    *({"coverage_threshold": 0.0}, {"plan_ms": 0.0}, {"block_size": 2}, {"coverage_decay": 0.0}),
    {"base_budget": 2**24},
)
"""Odd, and a choice: only raised budgets, no search, slow blocks, no past, dense attention."""


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values]
)
def test_values(field: str, value: Any) -> None:
    check_refused(
        lambda: SparseBalanceConfig(**{field: value}), ConfigError, f"{flag_name(field)} {value}"
    )


@pytest.mark.parametrize("changes", ACCEPTED)
def test_accepted(changes: dict[str, Any]) -> None:
    config = SparseBalanceConfig(**changes)
    assert {name: getattr(config, name) for name in changes} == changes
