# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge: a layer spec, a forward step and a callback.

    balance = SparseBalance(SparseBalanceConfig(...), max_sample_tokens=..., global_batch_size=...)
    config.model.transformer_layer_spec = balance.layer_spec(config.model.transformer_layer_spec)
    pretrain(config, balance, callbacks=[balance])

Rows are those of Bridge's packed data sets (micro-batch size 1), read one step ahead of the model,
and stay where its data loader puts them; budgets are chosen over all ranks. Trap:
``attention_backend`` local would replace the plugin's attention after the spec, so it is refused.
Pipelines are too: a middle stage reads no rows. For LoRA (``bridge.peft``) say
``frozen_weights=True``.

Tested against stubs of what it touches of Megatron-Bridge 067f987 (2026-08-22, 0.6), whose names a
test looks up in its source. Never run with Bridge itself, which imports Transformer Engine and
ModelOpt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hosts.planned_schedule import budgets_on, row_lengths
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.gpt_step import forward_step
from megatron.core.num_microbatches_calculator import get_num_microbatches

from sparsebalance_megatron import SparseBalanceConfig, integration

_BOUNDARIES = ("cu_seqlens_q_padded", "cu_seqlens_q", "cu_seqlens")
"""What Bridge's rows call them, best first: those of the tokens' places, older names last."""


class SparseBalance(Callback):
    """A run's forward step and callback; ``sizes`` are those of ``begin_host_run``."""

    def __init__(self, config: SparseBalanceConfig, **sizes: Any) -> None:
        self._config = config
        self._sizes = sizes
        self._rows: list[Any] = []
        self._planned: Any = None
        self._position = 0
        self.run: Any = None

    def layer_spec(self, own_spec: Any) -> Callable[..., Any]:
        """A provider's ``transformer_layer_spec`` around its own."""

        def spec(provider: Any, vp_stage: int | None = None) -> Any:
            if self.run is None:
                assert provider.pipeline_model_parallel_size == 1, "sparse balance: no pipelines"
                self.run = integration.begin_host_run(
                    self._config, provider, vocab_size=provider.vocab_size, **self._sizes
                )
            inner = own_spec(provider) if callable(own_spec) else own_spec
            return self.run.layer_spec(inner, vp_stage=vp_stage)

        return spec

    def __call__(
        self,
        state: Any,
        data_iterator: Iterator[Any],
        model: Any,
        return_schedule_plan: bool = False,
    ) -> Any:
        """Bridge's forward step on the next row, with its budgets."""
        if not model.training:
            return forward_step(state, data_iterator, model, return_schedule_plan)
        if self._position == len(self._rows):
            self._rows = [next(data_iterator) for _ in range(get_num_microbatches())]
            self._planned = self.run.plan_as_placed([self._lengths(row) for row in self._rows])
            self._position = 0
        position, self._position = self._position, self._position + 1
        row = iter(self._rows[position : position + 1])
        with budgets_on(self.run, self._planned, [model], learn=True, first=position):
            return forward_step(state, row, model, return_schedule_plan)

    def on_train_step_end(self, context: Any) -> None:
        """Learn from the step; its figures go where the run's own losses go."""
        figures = self.run.end_step()
        context.user_state["sparse_balance"] = figures
        writer = context.state.tensorboard_logger
        if writer is not None:
            for name, value in figures.items():
                writer.add_scalar(name, value, context.state.train_state.step)

    @staticmethod
    def _lengths(row: dict[str, Any]) -> list[int]:
        for name in _BOUNDARIES:
            if row.get(name) is not None:
                return row_lengths(row[name])
        raise ValueError(f"sparse balance: a row without {', '.join(_BOUNDARIES)}; use packed data")
