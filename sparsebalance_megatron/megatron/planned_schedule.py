# SPDX-License-Identifier: Apache-2.0
"""Run training steps in the number of micro-batches, and of segments, that their plans have.

:func:`as_planned` wraps the function that Megatron's ``get_forward_backward_func`` returns. A
plan may have fewer micro-batches than the batch sizes make, on all ranks alike; Megatron's schedule
then runs so many. Samples, learning rate and logs go on counting by the batch sizes, and the loss
is one of all tokens, so that only the balancing losses of experts that Megatron logs need scaling.
Where plans may have segments, :mod:`.segmented_schedule` runs the steps that have some.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sparsebalance_megatron.megatron.segmented_schedule import run_segments
from sparsebalance_megatron.plan.pipeline.orders import SegmentedSchedule

ForwardBackward = Callable[..., list[dict[str, Any]]]
"""Megatron's function of keywords that runs all forwards and backwards of a step."""


class PlannedIterator(Protocol):
    """A data iterator that knows the plan of the next step."""

    def micro_batches(self) -> int:
        """Micro-batches of every rank in the next step."""

    def segment_tokens(self) -> Sequence[Sequence[int]] | None:
        """Tokens of each segment of each micro-batch of this rank's next step, padding included;
        None where no rank has segments."""

    def segment_schedule(self) -> SegmentedSchedule:
        """Order of this rank's segments in the next step, where it has some."""

    def __next__(self) -> Any:
        """The next segment, in the order of the sequence."""


def as_planned(megatrons: ForwardBackward, *, segments: bool) -> ForwardBackward:
    """``megatrons``, but training steps run as their plans say.

    Evaluation runs as Megatron says, and in one piece: no backward holds activations there.

    Args:
        segments: whether plans may have some.
    """

    @functools.wraps(megatrons)
    def forward_backward(**keywords: Any) -> list[dict[str, Any]]:
        if keywords.get("forward_only"):
            return megatrons(**keywords)
        iterators = keywords["data_iterator"]
        # The chunks of a rank walk through the same plans.
        iterator: Any = iterators[0] if isinstance(iterators, list) else iterators
        if getattr(iterator, "replaying", False):
            if segments:
                raise RuntimeError(
                    "Megatron runs a step with segments again, which cannot be; use "
                    "--sparse-balance-max-segments 1 to find the fault"
                )
            return _run(megatrons, len(iterator.saved_microbatches), keywords)
        # Megatron wraps iterators to run steps again.
        planned: PlannedIterator = getattr(iterator, "iterable", iterator)
        segment_tokens = planned.segment_tokens() if segments else None
        if segment_tokens is None:
            return _run(megatrons, planned.micro_batches(), keywords)
        (model,) = keywords["model"] if isinstance(keywords["model"], list) else [keywords["model"]]
        return run_segments(
            planned.segment_schedule(),
            segment_tokens,
            forward_step_func=keywords["forward_step_func"],
            data_iterator=iterator,
            model=model,
            force_all_reduce=bool(keywords.get("force_all_reduce")),
        )

    return forward_backward


def _run(
    megatrons: ForwardBackward, micro_batches: int, keywords: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run a step of so many micro-batches in Megatron's schedule."""
    counted = keywords["num_microbatches"]
    if micro_batches == counted:
        return megatrons(**keywords)
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    metrics = get_moe_metrics_tracker().metrics
    before = {name: metric.values.clone() for name, metric in metrics.items()}
    reports = megatrons(**keywords | {"num_microbatches": micro_batches})
    # What experts add is divided by the number that the batch sizes make when Megatron logs it.
    for name, metric in metrics.items():
        earlier = before.get(name, 0.0)
        metric.values.sub_(earlier).mul_(counted / micro_batches).add_(earlier)
    return reports


def use_planned_schedule(*, segments: bool) -> None:
    """Have ``megatron.training``'s loop run steps as planned; once, before it trains."""
    from megatron.training import training

    inner = training.get_forward_backward_func

    def forward_backward_func(*arguments: Any, **keywords: Any) -> ForwardBackward:
        return as_planned(inner(*arguments, **keywords), segments=segments)

    training.get_forward_backward_func = forward_backward_func
