# SPDX-License-Identifier: Apache-2.0
"""Wrong numbers and choices in the config; tests/megatron/test_arguments.py has flags as typed."""

from typing import Any, Literal, get_origin, get_type_hints

import pytest
from bad_inputs.judge import check_refused

from sparsebalance_megatron.config import RANGES, ConfigError, SparseBalanceConfig, flag_with

NAN, INFINITY = float("nan"), float("inf")
TYPES = get_type_hints(SparseBalanceConfig)
CHOICES = [name for name, kind in TYPES.items() if get_origin(kind) is Literal]
BEYOND: dict[str, tuple[Any, ...]] = {
    "block_size": (0, 1, 3, 96, 2**21, 2**63, 1.5),
    "base_budget": (0, 2**31),
    "first_blocks": (17,),
    "coverage_threshold": (1.0, INFINITY),
    "plan_ms": (INFINITY, 1e9),
    **dict.fromkeys(("log_megabytes", "dry_run"), (10**9,)),
    "max_tokens_per_micro_batch": (0,),
    "max_context_parallel": (0, 6),
    "max_segments": (0, 65),
    "window": (0, 17, 2.5),
    "window_share": (0.3, 1.0),
    "segment_tokens": (0, 2**25),
    "gigabytes_per_second": (0.0, INFINITY),
    "layer_budgets": ("", "dense", "dense:", "0:1", "dense:1-0", "8:1,1", "8", 5),
    "selection": ("query", "block", ""),
}
"""Field -> values just outside its range, beside what no field takes."""
REFUSED = [
    *((name, value) for name in RANGES for value in (-1, NAN, "32", [])),
    *((name, value) for name in CHOICES for value in ("", "nonsense", True)),
    *((name, value) for name, values in BEYOND.items() for value in values),
]


def test_every_range_has_values_beyond_it() -> None:
    assert RANGES.keys() - BEYOND.keys() == set()
    assert len(CHOICES) > 10


@pytest.mark.parametrize(
    ("first_blocks", "budgets", "named"),
    [
        (4, {}, "--sparse-balance-base-budget 4"),
        (3, {"layer_budgets": "1:0-1"}, "--sparse-balance-layer-budgets 1:0-1"),
        (2, {"layer_budgets": "2:all"}, "--sparse-balance-layer-budgets 2:all"),
        (3, {"layer_budgets": "dense:all"}, None),
        (1, {"base_budget": 1}, None),
        (3, {"base_budget": 1, "layer_budgets": "8:all"}, None),
    ],
)
def test_first_blocks_have_room_in_every_layer(
    first_blocks: int, budgets: dict[str, Any], named: str | None
) -> None:
    def config() -> SparseBalanceConfig:
        return SparseBalanceConfig(**{"base_budget": 4, "first_blocks": first_blocks} | budgets)

    if named is None:
        config()
    else:
        check_refused(config, ConfigError, f"--sparse-balance-first-blocks {first_blocks}", named)


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_values(field: str, value: Any) -> None:
    check_refused(
        lambda: SparseBalanceConfig(**{field: value}), ConfigError, flag_with(field, value)
    )
