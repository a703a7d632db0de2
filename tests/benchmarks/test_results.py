# SPDX-License-Identifier: Apache-2.0
"""Committed results: every file has a schema, and holds numbers only that are numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from json_shape import keys, numbers

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = sorted(path.name for path in RESULTS.glob("*.json"))

_SPREAD = dict.fromkeys(("median", "p10", "p90"))
_MACHINE = dict.fromkeys(("cpu", "cores", "python", "torch", "load_at_end"))
_END_TO_END = {
    "machine": dict.fromkeys(("cpu", "cores", "torch", "megatron-core", "load_at_end")),
    "formulas": {},
    "layouts": {
        "*": {
            "title": None,
            "batches": None,
            "seq_length": None,
            "flags": [],
            "variants": {"*": dict.fromkeys(("waiting", "imbalance", "lm_loss"))},
            "goals": [],
            "step_ms": {"*": []},
        }
    },
}
_SIMULATED = {
    "setup": None,
    "data": {"*": {"steps": None, "steps_with_unhideable_sample": None, "variants": {"*": {}}}},
}
_QUICKSTART_RUN = dict.fromkeys(
    ("steps", "iteration_ms_median", "loss_last", "rank_imbalance", "coverage_mean")
)
_ERRORS = dict.fromkeys(("median_absolute_error", "p95_absolute_error", "median_signed_error"))
_LAYOUT = dict.fromkeys(("worker", "step", "masks"))
SCHEMAS: dict[str, Any] = {
    "cpu_attention": {
        "machine": {},
        "dense": dict.fromkeys(("median_ms", "min_ms", "max_ms")),
        "cases": {"*": dict.fromkeys(("median_ms", "density", "speedup_over_dense"))},
    },
    "end_to_end": _END_TO_END,
    "kernel_resources": {
        "triton": None,
        "target": None,
        "kernels": [
            {"tile": {}, **dict.fromkeys(("kernel", "registers", "shared_bytes", "matrix_share"))}
        ],
    },
    "mutation": {
        **dict.fromkeys(("seed", "score")),
        "interval_95": [],
        "outcomes": {},
        "drawn": [dict.fromkeys(("path", "line", "kind", "change"))],
    },
    "overhead": {
        "machine": _MACHINE,
        "overhead_share_of_iteration": _SPREAD,
        "overhead_ms_by_part": {"*": _SPREAD},
    },
    "pipeline_reality": {
        "machine": _MACHINE,
        "from_measured_times": _ERRORS,
        "from_cost_model": _ERRORS,
    },
    "planning": {"machine": {}, "goals": [{}], "bound": [{}]},
    "quality": {"benchmark": None, "machine": {}, "tasks": {"*": {"*": {"accuracy": []}}}},
    "quickstart": {
        "baseline": _QUICKSTART_RUN,
        "sparse_balance": _QUICKSTART_RUN,
        **dict.fromkeys(("speedup", "speedup_paired", "speedup_total")),
    },
    "recompute": {
        "machine": {},
        "median_ms": dict.fromkeys(("keep", "again")),
        "again_over_keep": dict.fromkeys(("median", "p25", "p75")),
        "gradients_equal": None,
    },
    "ring_balance": {
        "links": {},
        "generated": {"*": {"*": _LAYOUT}},
        "trained": {"*": {"*": _LAYOUT}},
    },
    "router_resources": {
        "triton": None,
        "target": None,
        "ranking": [dict.fromkeys(("blocks", "places", "observe", "registers", "spilled_bytes"))],
    },
    "search_restarts": [{"setup": None, "data": None, "restarts": [], "step_time_ratio": []}],
    "simulate": _SIMULATED,
    "soak": {
        "machine": _MACHINE,
        "options": dict.fromkeys(("ranks", "steps", "save_every", "kill_every", "seed")),
        "passed": None,
        "checks": {"*": None},
        "ended": {"*": None},
        "attempts": [
            {
                **dict.fromkeys(("disturbance", "first_step", "last_step", "ended", "orphans")),
                "usage": [],
            }
        ],
    },
}
"""By the longest beginning of a file's name: keys that must be there, all the way down. "*" stands
for every key, of which there must be one; None for any value."""


def lacking(found: Any, wanted: Any, place: str = "") -> list[str]:
    """Places of ``wanted`` that ``found`` has not."""
    if wanted is None:
        return []
    if type(found) is not type(wanted):
        return [f"{place}: no {type(wanted).__name__}"]
    if isinstance(wanted, list):
        entries = list(enumerate(found)) if wanted else []
        problems = [] if found or not wanted else [f"{place}: empty"]
        pairs = [(index, entry, wanted[0]) for index, entry in entries]
    else:
        every = wanted.get("*", {})
        problems = [f"{place}: empty"] if "*" in wanted and not found else []
        problems += [f"{place}/{key}: missing" for key in wanted.keys() - found.keys() - {"*"}]
        pairs = [(key, each, wanted.get(key, every)) for key, each in found.items()]
        pairs = [pair for pair in pairs if pair[0] in wanted or "*" in wanted]
    for key, each, of in pairs:
        problems += lacking(each, of, f"{place}/{key}")
    return problems


@pytest.mark.parametrize("name", FILES)
def test_a_result_has_its_schema(name: str) -> None:
    found = json.loads((RESULTS / name).read_text())
    schema = max((each for each in SCHEMAS if name.startswith(each)), key=len)
    assert lacking(found, SCHEMAS[schema]) == []
    assert all(math.isfinite(number) for number in numbers(found))


@pytest.mark.parametrize(
    ("found", "wanted", "problem"),
    [
        ({"a": 1}, {"a": None, "b": None}, "/b: missing"),
        ({"a": {}}, {"a": {"*": None}}, "/a: empty"),
        ({"a": {"x": 1}}, {"a": {"*": {"b": None}}}, "/a/x: no dict"),
        ([{"a": 1}, {}], [{"a": None}], "/1/a: missing"),
        ([], [{}], ": empty"),
    ],
)
def test_what_a_schema_misses_is_said(found: Any, wanted: Any, problem: str) -> None:
    assert lacking(found, wanted) == [problem]


def test_keys_and_numbers_of_a_value() -> None:
    value = {"a": [{"b": 1}, {"b": 2.5}], "c": True, "d": "x"}
    assert keys(value) == {"a": [{"b": None}], "c": None, "d": None}
    assert list(numbers(value)) == [1, 2.5]
