# SPDX-License-Identifier: Apache-2.0
"""Megatron's forward step for packed micro-batches that carry their budgets.

Shape legend: T tokens of the packed row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.utils import get_model_config
from torch import Tensor

from sparsebalance_megatron.compat import update_sequence_statistics
from sparsebalance_megatron.runtime.data import MicroBatch
from sparsebalance_megatron.runtime.loss import validate_loss
from sparsebalance_megatron.runtime.packed_params import (
    MicroBatchContext,
    micro_batch_context,
    packed_params,
)


class StepObserver(Protocol):
    """What the forward step tells: hooks to install, micro-batches begun, losses computed."""

    def install(self, model_config: Any) -> None: ...

    def begin_micro_batch(self, micro_batch: MicroBatch, context: MicroBatchContext) -> None: ...

    def add_loss(self, loss: Tensor, tokens: Tensor, report: dict[str, Tensor]) -> None: ...


class ForwardStep:
    """Callable ``(data_iterator, model) -> (output, loss_func)``, as Megatron's schedules want it.

    Args:
        observer: gives who hears of training micro-batches; asked within a step, because it
            exists only once Megatron has process groups. Evaluation stays unobserved.
        check_for_nan: validate losses through Megatron's re-run machinery.
    """

    def __init__(
        self,
        observer: Callable[[], StepObserver],
        *,
        block_size: int,
        max_seqlen_tokens: int,
        device: torch.device,
        check_for_nan: bool,
    ) -> None:
        self._observer = observer
        self._block_size = block_size
        self._max_seqlen_tokens = max_seqlen_tokens
        self._device = device
        self._check_for_nan = check_for_nan

    def __call__(
        self, data_iterator: Any, model: Any
    ) -> tuple[Tensor, Callable[..., tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        if model.training:
            self._observer().install(get_model_config(model))
        micro_batch: MicroBatch = next(data_iterator)
        context = micro_batch_context(
            micro_batch.plan,
            micro_batch.cu_seqlens,
            step=micro_batch.step,
            position=micro_batch.position,
            chunk=micro_batch.chunk,
            block_size=self._block_size,
            observe=micro_batch.training,
            device=self._device,
        )
        if micro_batch.training:
            self._observer().begin_micro_batch(micro_batch, context)
        params = packed_params(
            context, max_seqlen_tokens=self._max_seqlen_tokens, device=self._device
        )
        update_sequence_statistics(params.cu_seqlens_q)
        row = self._row_on_device(micro_batch)
        output = model(
            row.get("tokens"),
            row.get("position_ids"),
            None,
            labels=row.get("labels"),
            packed_seq_params=params,
        )
        return output, partial(self._loss, row.get("loss_mask"), micro_batch.training)

    def _row_on_device(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """[1, T] tensors, or nothing on stages that read no tokens."""
        row = micro_batch.row
        if row is None:
            return {}
        return {
            name: torch.as_tensor(getattr(row, name)).to(self._device, non_blocking=True)[None]
            for name in ("tokens", "position_ids", "labels", "loss_mask")
        }

    def _loss(
        self, loss_mask_1T: Tensor, training: bool, output_1T: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Sum of token losses, token count, and what Megatron reports."""
        losses_T = output_1T.reshape(-1).float()
        mask_T = loss_mask_1T.reshape(-1)
        loss = (losses_T * mask_T).sum()
        tokens = mask_T.sum().to(torch.int)
        if self._check_for_nan:
            validate_loss(loss)
        report = {"lm loss": torch.stack([loss.detach(), tokens.detach().float()])}
        if training:
            self._observer().add_loss(loss.detach(), tokens, report)
        return loss, tokens, report
