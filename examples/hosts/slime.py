# SPDX-License-Identifier: Apache-2.0
"""slime: block-sparse attention with budgets on its training ranks.

    --custom-config-path sparse_balance.yaml             # sparse_balance: {block_size: 256, ...}
    --custom-megatron-init-path hosts.slime.install      # training ranks
    --spec hosts.slime layer_spec
    --custom-megatron-before-log-prob-hook-path hosts.slime.end_step
    --custom-megatron-before-train-step-hook-path hosts.slime.end_step

:mod:`.slime_schedule` places the samples. Set ``--calculate-per-token-loss``; context parallelism
is refused. All passes over a rollout, for log-probabilities and its updates, execute the same
budgets.

Tested against stubs of what it touches of slime 624b824 (2026-08-21), whose names a test looks up
in its source. Never run with slime itself, which needs GPUs.
"""

from __future__ import annotations

import logging
from typing import Any

from sparsebalance_megatron import SparseBalanceConfig, integration

logger = logging.getLogger(__name__)


class Rank:
    """What a training rank keeps between slime's calls."""

    def __init__(self) -> None:
        self.run: Any = None
        self._rollout: Any = None
        self._plans: dict[int, Any] = {}
        self._open = False

    def attach(self, data_iterator: Any, keys: Any, position: int, params: Any) -> Any:
        """Budgets of the micro-batch at a position of the rollout."""
        rollout = data_iterator.rollout_data
        if rollout is not self._rollout:
            self._rollout, self._plans = rollout, {}
        first = 0
        for size in rollout["num_microbatches"]:
            if position < first + size:
                break
            first += size
        if first not in self._plans:
            rows = data_iterator.micro_batch_indices[first : first + size]
            lengths = [[rollout["total_lengths"][sample] for sample in row] for row in rows]
            self._plans[first] = self.run.plan_as_placed(lengths)
        trains = "advantages" in keys
        self._open |= trains
        planned = self._plans[first]
        return self.run.attach(planned, position - first, params, learn=trains)

    def end_step(self) -> None:
        if self._open:
            self._open = False
            logger.info("%s", self.run.end_step())


RANK = Rank()


def install(args: Any) -> None:
    """Have micro-batches carry their budgets."""
    from slime.backends.megatron_utils import model as slime_model

    get_batch = slime_model.get_batch

    def get_batch_with_budgets(data_iterator: Any, keys: Any, *others: Any) -> dict[str, Any]:
        position = data_iterator.offset
        batch = get_batch(data_iterator, keys, *others)
        batch["packed_seq_params"] = RANK.attach(
            data_iterator, keys, position, batch["packed_seq_params"]
        )
        return batch

    slime_model.get_batch = get_batch_with_budgets


def layer_spec(args: Any, config: Any, vp_stage: int | None) -> Any:
    """slime's ``--spec``; the model's config is the first that it is called with."""
    if RANK.run is None:
        RANK.run = integration.begin_host_run(
            SparseBalanceConfig(**getattr(args, "sparse_balance", {})),
            config,
            vocab_size=args.padded_vocab_size,
            max_sample_tokens=args.seq_length,
            global_batch_size=args.global_batch_size,
        )
    return RANK.run.layer_spec(vp_stage=vp_stage)


def end_step(*_: Any) -> None:
    """Between schedules: learn from the training step before, if one has run."""
    RANK.end_step()
