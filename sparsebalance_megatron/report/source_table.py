# SPDX-License-Identifier: Apache-2.0
"""A run's tokens, loss and coverage by the data set that its samples come from."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from sparsebalance_megatron.telemetry.step_record import SourceStep, Step

HEADINGS = ("source", "weight", "tokens", "share", "loss, first", "loss, last", "coverage")
_ENDS = 10
"""A loss is the mean over the tokens of that many steps at either end: one step has few samples of
a small source."""


def source_rows(header: Any, steps: Sequence[Step]) -> list[tuple[str, ...]]:
    """A row per source in the order of the blend; none for a run of one data set.

    Args:
        header: of the run's log; what is missing in it is left blank.
    """
    named = header.get("sources") if isinstance(header, dict) else None
    facts = named if isinstance(named, list) else []
    count = max((len(step.sources) for step in steps), default=0)
    seen = [step for step in steps if len(step.sources) == count]
    totals = [sum(step.sources[source].tokens for step in seen) for source in range(count)]
    rows: list[tuple[str, ...]] = []
    for source, tokens in enumerate(totals):
        each = [step.sources[source] for step in seen]
        fact = facts[source] if source < len(facts) and isinstance(facts[source], dict) else {}
        weight = fact.get("weight")
        rows.append(
            (
                str(fact.get("prefix", f"source {source + 1}")),
                f"{weight:.2%}" if isinstance(weight, float) else "",
                f"{tokens:,}",
                f"{tokens / sum(totals):.2%}" if sum(totals) else "",
                _loss(each[:_ENDS]),
                _loss(each[-_ENDS:]),
                _coverage(each),
            )
        )
    return rows


def _loss(steps: Sequence[SourceStep]) -> str:
    """By token, over steps in which the source had some."""
    known = [(step.lm_loss, step.tokens) for step in steps if step.lm_loss is not None]
    tokens = sum(count for _, count in known)
    return f"{sum(loss * count for loss, count in known) / tokens:.4f}" if tokens else ""


def _coverage(steps: Sequence[SourceStep]) -> str:
    known = [step.coverage for step in steps if step.coverage is not None]
    return f"{fmean(known):.3f}" if known else ""
