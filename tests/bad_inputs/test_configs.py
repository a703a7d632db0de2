# SPDX-License-Identifier: Apache-2.0
"""Wrong numbers and choices in the config, as flags give them and as trainers do."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

import pytest
from bad_inputs.judge import check_refused

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name

NAN, INFINITY = float("nan"), float("inf")
REFUSED: dict[str, tuple[Any, ...]] = {
    "block_size": (0, -1, 3, 96, 2**21, 2**63, 1.5, NAN, "256", []),
    "base_budget": (0, -1, 2**31, 2**40, NAN, "32"),
    "coverage_threshold": (1.0, 2, 5, -0.1, NAN, INFINITY, "0.1"),
    "coverage_decay": (1.0, -0.5, NAN, INFINITY, "0.9"),
    "plan_ms": (-1, NAN, INFINITY, 1e9, "4"),
    "log_megabytes": (0, -1, 10**9, NAN, "64"),
    "max_tokens_per_micro_batch": (0, -5, NAN, "4096"),
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

TYPED_AND_REFUSED = (
    "--context-parallel-size=0",
    "--sparse-balance-base-budget=1099511627776",
    *("--sparse-balance-max-tokens-per-micro-batch=255", "--global-batch-size=7"),
    *("--attention-dropout=0.5", "--dataloader-type=single"),
)
"""Of training, refused as typed; each names its flag."""
TYPED = (
    *("--sparse-balance", "--data-path", "prefix", "--seq-length", "256", "--num-layers", "4"),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "1e-3"),
    *("--train-iters", "4", "--eval-interval", "1000"),
)

ACCEPTED: dict[str, tuple[dict[str, Any], str]] = {
    "a threshold of zero": ({"coverage_threshold": 0.0}, "nothing may be lost: budgets only rise"),
    "no search": ({"plan_ms": 0.0}, "placements without search are a choice"),
    "blocks of one token": ({"block_size": 1}, "slow, and right"),
    "a budget beyond any sample": ({"base_budget": 2**24}, "dense attention"),
    "no past": ({"coverage_decay": 0.0}, "curves of the last step only"),
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values]
)
def test_values(field: str, value: Any) -> None:
    check_refused(
        lambda: SparseBalanceConfig(**{field: value}), ConfigError, f"{flag_name(field)} {value}"
    )


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    changes, reason = ACCEPTED[name]
    assert SparseBalanceConfig(**changes) and reason


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    from sparsebalance_megatron.megatron.arguments import args_provider

    bare = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    return args_provider(enabled=True, on_cpu=False)(bare)


@pytest.mark.parametrize("word", TYPED_AND_REFUSED)
def test_typed_flags(word: str, parser: ArgumentParser) -> None:
    from sparsebalance_megatron.megatron.arguments import check_typed_flags

    check_typed_flags(parser, TYPED)
    check_refused(
        lambda: check_typed_flags(parser, (*TYPED, word)), ConfigError, word.partition("=")[0]
    )
