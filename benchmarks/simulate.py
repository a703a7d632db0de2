# SPDX-License-Identifier: Apache-2.0
"""Predicted step times of the paper's setups and others: the simulated figures of RESULTS.

    nice python benchmarks/simulate.py --json benchmarks/results/simulate.json

Times are counted operations of an H200. Every row plans the same generated lengths; speeds are over
dense attention in order of arrival.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from simulated.lengths import LENGTHS
from simulated.setups import SETUPS, WINDOW_SETUPS, Setup

from sparsebalance_megatron.config import DEFAULT_SELECTION, SparseBalanceConfig
from sparsebalance_megatron.predict.comparison import (
    AS_MEGATRON,
    DEFAULT,
    EXACT,
    EXACT_WINDOW,
    ROWS,
    Row,
    rows_of,
)
from sparsebalance_megatron.predict.outcome import Outcome, predict
from sparsebalance_megatron.predict.workload import Workload
from sparsebalance_megatron.text_table import shown_ms, text_table

MOST_SEGMENTS = 8
SELECTIONS = (DEFAULT_SELECTION, "previous-block")
"""The default, and one whose lists a block of queries shares: counted at their own rates."""
FURTHER_ROWS = {
    "fixed budgets, arrival": Row({**AS_MEGATRON, "tuning": "off"}, "base budgets for all"),
    "DST": Row({**AS_MEGATRON, "tuning": "anchor"}, "in order of arrival, the paper's budgets"),
    "LBB": Row({"batching": "length", "tuning": "off"}, "placed by length, base budgets"),
    "SAB": Row({"batching": "latency", "tuning": "off"}, "placed by latency, base budgets"),
    "LBB+DST": Row({"batching": "length", "tuning": "anchor"}, "LBB, with the paper's budgets"),
    "ours, static cp": Row({"context_parallel": "static"}, "as many ranks for every micro-batch"),
}
"""Parts of the default."""
WINDOWS = tuple(itertools.product((4, 8), (0.25, 0.5)))
"""Steps of a window, and the share of a step that is gathered by length."""
_NUMBERS = ("makespan_ms", "bound_ratio", "coverage_mean", "work_ratio", "bubble_share", "plan_ms")


def main(argv: Sequence[str] | None = None) -> None:
    """Plan, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    setups = WINDOW_SETUPS | SETUPS
    parser.add_argument("--setup", nargs="+", choices=tuple(setups), help="default: those of rows")
    parser.add_argument("--selection", nargs="+", default=SELECTIONS, metavar="NAME")
    parser.add_argument("--lengths", choices=tuple(LENGTHS), help="default: each setup's")
    parser.add_argument("--steps", type=int, help="default: as RESULTS has for each setup")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--max-segments", type=int, default=MOST_SEGMENTS)
    parser.add_argument("--segment-tokens", type=int, default=SparseBalanceConfig.segment_tokens)
    parser.add_argument("--sparse-efficiency", type=float, help="default: each selection's")
    parser.add_argument("--rows", choices=("main", "all", "windows"), default="main")
    parser.add_argument("--quick", action="store_true", help="one setup of one step; for tests")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args(argv)
    of_windows = arguments.rows == "windows"
    if of_windows:
        setups, arguments.selection = WINDOW_SETUPS, arguments.selection[:1]
    if arguments.quick:
        name = "ranks-8x2" if of_windows else "paper-ablation"
        arguments.setup, arguments.steps = (name,), 4 if of_windows else 1
    found: dict[str, Any] = {}
    for name in arguments.setup or (setups if of_windows else SETUPS):
        setup = setups[name]
        for data in (arguments.lengths,) if arguments.lengths else setup.data:
            for selection in arguments.selection:

                def workload(
                    most_segments: int,
                    setup: Setup = setup,
                    data: str = data,
                    selection: str = selection,
                ) -> Workload:
                    return setup.workload(
                        data,
                        steps=arguments.steps or setup.steps,
                        seed=arguments.seed,
                        config=SparseBalanceConfig(
                            selection=selection,
                            max_segments=most_segments,
                            segment_tokens=arguments.segment_tokens,
                        ),
                        cp_size=arguments.context_parallel_size,
                        sparse_efficiency=arguments.sparse_efficiency,
                    )

                whole = workload(1)
                if of_windows:
                    outcomes = with_windows(whole)
                else:
                    outcomes = predicted(whole, every=arguments.rows == "all")
                    job, cuts = whole.job, arguments.max_segments > 1
                    if cuts and job.pipeline_stages > 1 and job.lockstep_ranks == 1:
                        # Documents that are cut run on other kernels: their costs are others.
                        outcomes |= in_segments(workload(arguments.max_segments))
                place = f"{name}, {data}, {selection}"
                print(f"\n{place}, {len(whole.batches)} steps", *table(outcomes), sep="\n")
                dense_ms = next(iter(outcomes.values())).makespan_ms
                found[place] = {
                    row: {number: asdict(outcome)[number] for number in _NUMBERS}
                    | {"speedup": dense_ms / outcome.makespan_ms}
                    for row, outcome in outcomes.items()
                }
                # A long run that is stopped leaves what it has.
                if arguments.json is not None:
                    text = json.dumps({"costs": whole.cost.source, "setups": found}, indent=1)
                    arguments.json.parent.mkdir(parents=True, exist_ok=True)
                    arguments.json.write_text(f"{text}\n", encoding="utf-8")


def predicted(workload: Workload, *, every: bool) -> dict[str, Outcome]:
    """All rows in one piece."""
    rows = rows_of(workload) | (FURTHER_ROWS if every else {})
    rows.pop(EXACT_WINDOW, None)
    return {name: predict(row.of(workload)) for name, row in rows.items()}


def in_segments(workload: Workload) -> dict[str, Outcome]:
    """Two rows of a job whose micro-batches may be cut; none of one of 100 ranks or more."""
    if workload.job.data_parallel_size >= 100:
        return {}
    rows = rows_of(workload)
    ways = {f"{name}, segments": rows[name].of(workload) for name in (EXACT, DEFAULT)}
    return {name: predict(way) for name, way in ways.items()}


def with_windows(workload: Workload) -> dict[str, Outcome]:
    """Mode exact in order of arrival, and with windows, by how much tokens a step vary."""
    rows = {EXACT: {"window": 1}} | {
        f"window {steps}, share {share:g}": {"window": steps, "window_share": share}
        for steps, share in WINDOWS
    }
    found = {}
    for name, changes in rows.items():
        way = Row({**ROWS[EXACT].changes, "max_segments": 1, **changes}, name).of(workload)
        tokens = [sum(batch) for batch in way.dealt_batches]
        found[f"{name} (tokens {np.std(tokens) / np.mean(tokens):.2f})"] = predict(way)
    return found


def table(outcomes: dict[str, Outcome]) -> list[str]:
    """Lines with a row for each way to plan."""
    dense_ms = next(iter(outcomes.values())).makespan_ms
    return text_table(
        [
            {
                "": name,
                "step ms": shown_ms(each.makespan_ms),
                "speed": f"{dense_ms / each.makespan_ms:.2f}",
                "bound ratio": f"{each.bound_ratio:.2f}",
                "coverage": f"{each.coverage_mean:.3f}",
                "work ratio": f"{each.work_ratio:.2f}",
                "plan ms": f"{each.plan_ms:.1f}",
            }
            for name, each in outcomes.items()
        ]
    )


if __name__ == "__main__":
    main()
