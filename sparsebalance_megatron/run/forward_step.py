# SPDX-License-Identifier: Apache-2.0
"""The forward step of planned micro-batches that are read from an index, around a trainer's own."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsebalance_megatron.attention.device import copied_to
from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.megatron.hooks import get_model_config
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch

if TYPE_CHECKING:
    from sparsebalance_megatron.run.trainer import TrainerRun

Batch = dict[str, Any]
"""What a forward step reads: ``tokens``, ``position_ids``, ``labels`` and ``loss_mask``, [1, T] or
None on stages that read no tokens, and ``packed_seq_params``, which the model must be given."""

LossFunction = Callable[..., tuple[Tensor, Tensor, dict[str, Tensor]]]

_ROW_KEYS = ("tokens", "position_ids", "labels", "loss_mask")


class ForwardStep:
    """Makes a trainer's forward step one of planned micro-batches; see
    :meth:`.TrainerRun.wrap_forward_step`."""

    def __init__(
        self,
        inner: Callable[[Iterator[Batch], Any], tuple[Tensor, LossFunction]],
        trainer: "TrainerRun",
    ) -> None:
        self._inner = inner
        self._trainer = trainer

    def __call__(self, data_iterator: Any, model: Any) -> tuple[Tensor, LossFunction]:
        run, scheduler = self._trainer.run, self._trainer.scheduler
        if model.training:
            run.install(get_model_config(model), model)
        read: LocalMicroBatch = next(data_iterator)
        batch: Batch = dict.fromkeys(_ROW_KEYS)
        for name, values_T in (read.inputs or {}).items():
            batch[name] = copied_to(torch.as_tensor(values_T), self._trainer.device)[None]
        # It lives until the step's end, without tokens. Megatron may run a step again: what is read
        # stays as it is.
        micro_batch = replace(read, inputs=None, observations={})
        planned = scheduler.planned(micro_batch.step) if micro_batch.observe else None
        batch["packed_seq_params"] = run.begin_micro_batch(micro_batch, model, planned)
        output, loss_function = self._inner(iter((batch,)), model)
        if micro_batch.observe:
            # The model's kernels are launched: time to plan the next step.
            scheduler.plan_following(micro_batch.step)
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
