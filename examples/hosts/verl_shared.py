# SPDX-License-Identifier: Apache-2.0
"""verl's dynamic context parallelism with the plugin's attention on its workers.

    engine: dynamic_context_parallel true, use_remove_padding true, context_parallel_size 1

    schedule = hosts.shared_schedule.Scheduler(config, run.job, run)   # in place of Megatron's
    with shared_micro_batches(run, schedule, engine.module, learn=True):
        engine.forward_backward_batch(batch, loss_function)
    run.end_step()

The batch is on every worker, and each makes the same plan. While :func:`shared_micro_batches` is
open, verl's functions that cut a micro-batch for a rank, and put outputs together again, are those
of the plan: a rank gets its blocks, and budgets travel in ``PackedSeqParams``. verl computes losses
from whole samples on every rank that shares them. Begin the run with ``pad_samples_to=1`` and
``scales_own_loss=True``. Virtual pipeline stages are refused.

Tested against stubs of what it touches of verl's ``models/mcore`` (2026-08). Never run with verl
itself, whose engine needs GPUs and a Megatron of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from verl.models.mcore import model_forward


class SharedRows:
    """The micro-batches of the schedule's last plan, in the order in which this rank runs them."""

    def __init__(self, run: Any, schedule: Any, model: Any, *, learn: bool) -> None:
        self._run, self._schedule, self._model, self._learn = run, schedule, model, learn
        self._position = -1
        self._ended = True
        self._carrier: Any = None

    def cut(
        self,
        values: Any,
        pre_process: bool = True,
        need_roll: bool = False,
        use_fp8_padding: bool = False,
        local_cp_size: int | None = None,
    ) -> tuple[Any, Any, Any]:
        """verl's ``preprocess_thd_engine``: inputs first, then what else the loss needs."""
        if self._ended:
            self._position, self._ended = self._position + 1, False
            self._carrier = self._run.attach(*self._place, model=self._model, learn=self._learn)
        if not pre_process:
            return values, self._carrier, None
        samples = [sample.roll(-1, 0) if need_roll else sample for sample in values.unbind()]
        packed = {"values": torch.cat(samples)}
        part = self._run.cut(*self._place, packed)
        return part["values"][None], self._carrier, part["position_ids"][None]

    def put_together(
        self,
        output: Any,
        packed_seq_params: Any,
        input_ids: Any,
        batch_size: int,
        post_process: bool = True,
        local_cp_size: int | None = None,
    ) -> Any:
        """verl's ``postprocess_thd_engine``: a nested tensor of whole samples."""
        self._ended = True
        if not post_process:
            return output
        whole = self._run.whole(*self._place, {"output": output[0]})["output"]
        lengths = input_ids.offsets().diff().tolist()
        return torch.nested.as_nested_tensor(list(whole.split(lengths)), layout=torch.jagged)

    @property
    def _place(self) -> tuple[Any, int]:
        return self._schedule.planned, self._position


@contextmanager
def shared_micro_batches(
    run: Any, schedule: Any, models: Sequence[Any], *, learn: bool
) -> Iterator[None]:
    """While it is open, verl runs one schedule of a plan's micro-batches."""
    (model,) = models
    rows = SharedRows(run, schedule, model, learn=learn)
    own = model_forward.preprocess_thd_engine, model_forward.postprocess_thd_engine
    model_forward.preprocess_thd_engine = rows.cut
    model_forward.postprocess_thd_engine = rows.put_together
    try:
        yield
    finally:
        model_forward.preprocess_thd_engine, model_forward.postprocess_thd_engine = own
