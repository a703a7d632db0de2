# SPDX-License-Identifier: Apache-2.0
"""One schedule of a host: its rows in order, and a hook that gives each its budgets.

For hosts that make ``PackedSeqParams`` deep inside their forward step: a hook in front of the model
exchanges them. A chunk's forwards run in the order of its micro-batches in every schedule of
Megatron, and recomputation starts below the model, so counting them names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any


def row_lengths(cu_seqlens: Any) -> list[int]:
    """Tokens of every sequence of a row, from its boundaries; empty ones are left out."""
    boundaries = cu_seqlens.flatten().tolist()
    lengths = [end - start for start, end in pairwise(boundaries)]
    return [length for length in lengths if length > 0]


@contextmanager
def budgets_on(
    run: Any, planned: Any, models: Sequence[Any], *, learn: bool, first: int = 0
) -> Iterator[None]:
    """While it is open, every forward of the models carries the budgets of its micro-batch.

    Args:
        run: of :func:`.integration.begin_host_run`.
        planned: the step that the schedule runs.
        models: the chunks of this rank, in order.
        learn: whether the schedule is a training step.
        first: position of the micro-batch whose forward comes first.
    """
    forwards = [first] * len(models)

    def hook(chunk: int) -> Any:
        def exchange(model: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
            position, forwards[chunk] = forwards[chunk], forwards[chunk] + 1
            carrier = run.attach(
                planned,
                position,
                keywords.get("packed_seq_params"),
                vp_stage=chunk if len(models) > 1 else None,
                learn=learn,
            )
            return arguments, keywords | {"packed_seq_params": carrier}

        return exchange

    handles = [
        model.register_forward_pre_hook(hook(chunk), with_kwargs=True)
        for chunk, model in enumerate(models)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
