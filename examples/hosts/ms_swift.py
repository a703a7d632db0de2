# SPDX-License-Identifier: Apache-2.0
"""ms-swift: ``megatron sft ... --external_plugins examples/hosts/ms_swift.py --padding_free true``.

    SPARSE_BALANCE='{"max_sample_tokens": 32768, "global_batch_size": 64, "config": {...}}'

ms-swift's parser takes no flags of others, so this variable holds what ``begin_host_run`` takes
(``"frozen_weights": true`` with ``--tuner_type lora``), and in "config" the plugin's fields. Rows
are those of ms-swift, packed or padding-free, read one step ahead of the model, and stay on their
ranks; budgets are chosen over all of them. Virtual pipeline stages are refused.

Tested against stubs of what it touches of ms-swift 3602360 (2026-08-22, 4.6 in development) and
mcore-bridge f020e47 (2026-05-04), whose names a test looks up in their source. Never run with
ms-swift itself: mcore-bridge, which builds its models, imports Transformer Engine.
"""

from __future__ import annotations

import json
import os
from typing import Any

from hosts.planned_schedule import budgets_on, row_lengths
from mcore_bridge.model.register import ModelLoader
from swift.megatron.trainers.trainer import MegatronTrainer

from sparsebalance_megatron import SparseBalanceConfig, integration

RUN: list[Any] = []
"""This rank's run, once the model is built."""


def with_layer_spec(get_transformer_layer_spec: Any) -> Any:
    """A loader's method whose layers have the plugin's attention."""

    def layer_spec(loader: Any, vp_stage: int | None = None) -> Any:
        assert vp_stage is None, "sparse balance: no virtual pipeline stages; drop them"
        own = get_transformer_layer_spec(loader, vp_stage=vp_stage)
        if not RUN:
            sizes = json.loads(os.environ["SPARSE_BALANCE"])
            choices = SparseBalanceConfig(**sizes.pop("config", {}))
            vocab_size = loader.config.padded_vocab_size
            RUN.append(
                integration.begin_host_run(choices, loader.config, vocab_size=vocab_size, **sizes)
            )
        return RUN[0].layer_spec(own)

    return layer_spec


def with_budgets(train_step: Any) -> Any:
    """A trainer's ``train_step`` over rows that carry their budgets."""

    def planned_step(trainer: Any, train_data_iterator: Any) -> Any:
        (run,) = RUN
        rows = [
            trainer.get_batch(train_data_iterator) for _ in range(trainer.args.num_microbatches)
        ]
        lengths = [row_lengths(row["packed_seq_params"].cu_seqlens_q) for row in rows]
        planned = run.plan_as_placed(lengths)
        trainer.get_batch = lambda data_iterator, vp_stage=None: next(data_iterator)
        try:
            with budgets_on(run, planned, trainer.wrapped_models, learn=True):
                metrics, *rest = train_step(trainer, iter(rows))
        finally:
            del trainer.get_batch
        trainer.sparse_balance_figures = run.end_step()
        return metrics, *rest

    return planned_step


ModelLoader.get_transformer_layer_spec = with_layer_spec(ModelLoader.get_transformer_layer_spec)
MegatronTrainer.train_step = with_budgets(MegatronTrainer.train_step)
