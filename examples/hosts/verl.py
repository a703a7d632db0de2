# SPDX-License-Identifier: Apache-2.0
"""verl: an engine ``megatron_sparse_balance`` whose attention has budgets.

    VERL_USE_EXTERNAL_MODULES=hosts.verl                 # or an entry point of group verl.plugins
    engine backend: megatron_sparse_balance, use_remove_padding: true

The samples of a rank stay on it, as verl's trainer dealt them out; budgets are chosen over all
ranks. A pass for log-probabilities keeps the budgets of its samples for the updates: samples are
known by their ``uid`` tensor where the batch has one, so put one there. The plugin's choices come
from ``engine_config.override_transformer_config["sparse_balance"]``.

Tested against stubs of what it touches of verl b178a3c (2026-01-29, after 0.7.0), whose names a
test looks up in its source, and registered with verl 0.9.1 where that is installed. Its passes have
never run with verl itself, whose engine needs GPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hosts.planned_schedule import budgets_on
from verl.workers.engine import utils as verl_utils
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron import transformer_impl
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from sparsebalance_megatron import SparseBalanceConfig, integration


class KeptBudgets:
    """Budgets by sample, of passes that did not train."""

    def __init__(self) -> None:
        self._of: dict[int, np.ndarray] = {}

    def keep(self, samples: list[int], budgets_LS: np.ndarray) -> None:
        self._of |= {sample: budgets_LS[:, at] for at, sample in enumerate(samples)}

    def pinned(self, samples: list[int], layers: int) -> np.ndarray:
        """[L, S]; zeros where a sample has none, which leaves it to the plan."""
        nothing = np.zeros(layers, dtype=np.int64)
        return np.stack([self._of.pop(sample, nothing) for sample in samples], axis=1)


@EngineRegistry.register(
    model_type="language_model", backend="megatron_sparse_balance", device="cuda"
)
class SparseBalanceEngine(MegatronEngineWithLMHead):
    """verl's Megatron engine; its provider gets the plugin's layers, its schedules budgets."""

    def _build_tf_config(self) -> None:
        choices = self.engine_config.override_transformer_config.pop("sparse_balance", {})
        super()._build_tf_config()
        assert self.provider is not None, "sparse balance: set vanilla_mbridge false"
        provider = self.provider
        self.sparse_balance = integration.begin_host_run(
            SparseBalanceConfig(**choices),
            provider,
            vocab_size=provider.vocab_size,
            max_sample_tokens=self.engine_config.max_token_len_per_gpu,
            # On average; coverage that a step owes is weighed by it.
            global_batch_size=64,
            # verl pads every sample so that tensor-parallel ranks share it evenly.
            pad_samples_to=provider.tensor_model_parallel_size,
            scales_own_loss=True,
        )
        self.kept_budgets = KeptBudgets()
        own_spec = provider.transformer_layer_spec

        def spec(provider: Any, vp_stage: int | None = None) -> Any:
            inner = own_spec(provider, vp_stage=vp_stage) if callable(own_spec) else own_spec
            return self.sparse_balance.layer_spec(inner, vp_stage=vp_stage)

        provider.transformer_layer_spec = spec

    def forward_backward_batch(
        self, data: Any, loss_function: Any, forward_only: bool = False
    ) -> Any:
        prepare = transformer_impl.prepare_micro_batches
        open_hooks: list[Any] = []

        def prepare_and_plan(*arguments: Any, **keywords: Any) -> Any:
            micro_batches, indices = prepare(*arguments, **keywords)
            planned = self._plan(micro_batches, forward_only)
            hooks = budgets_on(self.sparse_balance, planned, self.module, learn=not forward_only)
            hooks.__enter__()
            open_hooks.append(hooks)
            return micro_batches, indices

        transformer_impl.prepare_micro_batches = prepare_and_plan
        try:
            output = super().forward_backward_batch(data, loss_function, forward_only)
        finally:
            transformer_impl.prepare_micro_batches = prepare
            for hooks in open_hooks:
                hooks.__exit__(None, None, None)
        if not forward_only:
            figures = self.sparse_balance.end_step()
            if output:
                output["metrics"] |= {name: [value] for name, value in figures.items()}
        return output

    def _plan(self, micro_batches: list[Any], forward_only: bool) -> Any:
        lengths = [row["input_ids"].offsets().diff().tolist() for row in micro_batches]
        uids = [
            row["uid"].flatten().tolist()
            for row in micro_batches
            if "uid" in row.keys()  # noqa: SIM118 - of a TensorDict
        ]
        run = self.sparse_balance
        samples = [uid for row in uids for uid in row]
        layers = run.planner.coverage.layers
        pinned_LS = None
        if samples and not forward_only:
            pinned_LS = self.kept_budgets.pinned(samples, layers)
        planned = run.plan_as_placed(lengths, pinned_LS=pinned_LS)
        if samples and forward_only:
            rank = self.get_data_parallel_rank()
            own = [
                micro_batch.budgets_LS for micro_batch in planned.plan.for_rank(rank).micro_batches
            ]
            self.kept_budgets.keep(samples, np.concatenate(own, axis=1))
        return planned


assert transformer_impl.prepare_micro_batches is verl_utils.prepare_micro_batches
