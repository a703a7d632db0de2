# SPDX-License-Identifier: Apache-2.0
"""Megatron's forward step for packed micro-batches that carry their budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsebalance_megatron.attention.host_copy import copied_to
from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.megatron.experts import leave_out_padding
from sparsebalance_megatron.megatron.hooks import (
    count_sequences,
    model_config_of,
    token_loss,
    use_true_positions,
)
from sparsebalance_megatron.megatron.kept_attention import RecomputeCounts
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch

if TYPE_CHECKING:
    from sparsebalance_megatron.run.trainer import TrainerRun

Batch = dict[str, Any]
"""What a forward step reads: ``tokens``, ``position_ids``, ``labels`` and ``loss_mask``, [1, T] or
None on stages that read no tokens, and ``packed_seq_params``, which the model must be given."""

LossFunction = Callable[..., tuple[Tensor, Tensor, dict[str, Tensor]]]

_ROW_KEYS = ("tokens", "position_ids", "labels", "loss_mask")


class ForwardStep:
    """Callable ``(data_iterator, model) -> (output, loss_func)``, as Megatron's schedules want it.

    Args:
        inner: a trainer's own forward step of that form. Its iterator yields one :data:`Batch`; its
            loss function returns (sum of token losses, token count, report).
        trainer: the run that training micro-batches are reported to, which has started before the
            first step.
    """

    def __init__(
        self,
        inner: Callable[[Iterator[Batch], Any], tuple[Tensor, LossFunction]],
        trainer: TrainerRun,
    ) -> None:
        self._inner = inner
        self._trainer = trainer

    def __call__(self, data_iterator: Any, model: Any) -> tuple[Tensor, LossFunction]:
        if model.training:
            self._trainer.run.install(model_config_of(model), model)
        read: LocalMicroBatch = next(data_iterator)
        batch: Batch = dict.fromkeys(_ROW_KEYS)
        for name, values_T in (read.inputs or {}).items():
            batch[name] = copied_to(torch.as_tensor(values_T), self._trainer.device)[None]
        # It lives until the step's end, without tokens. Megatron may run a step again: what is read
        # stays as it is.
        micro_batch = replace(read, inputs=None, observations={}, recompute=RecomputeCounts())
        if micro_batch.sequence is not None:
            use_true_positions(model)
        leave_out_padding(model)
        if micro_batch.observe:
            planned = self._trainer.scheduler.planned(micro_batch.step)
            self._trainer.run.begin_micro_batch(micro_batch, planned)
        max_seqlen_tokens = self._trainer.inputs.settings.seq_length
        batch["packed_seq_params"] = micro_batch.params(max_seqlen_tokens)
        output, loss_function = self._inner(iter((batch,)), model)
        if micro_batch.observe:
            # The model's kernels are launched: time to plan the next step.
            self._trainer.scheduler.plan_following(micro_batch.step)
        return output, partial(self._loss, loss_function, micro_batch.observe)

    def _loss(
        self, loss_function: LossFunction, training: bool, output: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        values = loss_function(output)
        if len(values) != 3:
            raise ConfigError(
                f"--sparse-balance: the loss function returned {len(values)} values; return the "
                "sum of token losses, the number of tokens and a report, and set "
                "calculate_per_token_loss"
            )
        loss, tokens, report = values
        if not isinstance(tokens, Tensor):
            tokens = copied_to(torch.as_tensor(tokens), loss.device)
        if tokens.is_floating_point():
            raise ConfigError(
                f"--sparse-balance: the loss function returned {tokens.dtype} as the number of "
                "tokens; Megatron adds up whole numbers, return .to(torch.int)"
            )
        if training:
            self._trainer.run.add_loss(loss.detach(), tokens, report)
        return loss, tokens, report


def packed_forward_step(
    check_for_nan: bool, data_iterator: Iterator[Batch], model: Any
) -> tuple[Tensor, LossFunction]:
    """The forward step of ``megatron.training``; ``check_for_nan`` asks Megatron's re-run
    machinery."""
    batch = next(data_iterator)
    count_sequences(batch["packed_seq_params"])
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        packed_seq_params=batch["packed_seq_params"],
    )
    return output, partial(token_loss, batch["loss_mask"], check_for_nan)
