# SPDX-License-Identifier: Apache-2.0
"""Runs of trainers that call Megatron's schedules themselves. Loads no ``megatron.training``.

Times come from hooks in the model's config, put there at the first forward. What belongs to the end
of a step happens in :meth:`OwnLoopRun.end_step`, which the trainer calls, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.megatron.compat import default_layer_spec, enable_variable_lengths
from sparsebalance_megatron.megatron.core_attention import AttentionOptions, replace_core_attention
from sparsebalance_megatron.megatron.sequence_groups import data_parallel_size
from sparsebalance_megatron.megatron.settings import RunSettings
from sparsebalance_megatron.megatron.unsupported import (
    check_cap,
    check_model,
    check_selection,
)
from sparsebalance_megatron.profile.profile import AUTO
from sparsebalance_megatron.run.forward_step import ForwardStep
from sparsebalance_megatron.run.inputs import Inputs, read_inputs
from sparsebalance_megatron.run.micro_batches import MicroBatchIterator
from sparsebalance_megatron.run.run import IntegrationError, Loop
from sparsebalance_megatron.run.session import Session


class TrainerRun:
    """What such runs share; ``grid`` has the budgets, in blocks, at which coverage is observed."""

    def __init__(
        self, config: SparseBalanceConfig, grid: Sequence[int], transformer_config: Any
    ) -> None:
        self._options = AttentionOptions.from_config(config, tuple(grid))
        self._transformer_config = transformer_config

    def layer_spec(self, spec: Any, vp_stage: int | None) -> Any:
        """``spec``, or Megatron's own for the model's config, with core attention replaced."""
        if spec is None:
            spec = default_layer_spec(self._transformer_config, vp_stage)
        return replace_core_attention(spec, self._options)


class OwnLoopRun(TrainerRun):
    """One run on one rank; see :mod:`sparsebalance_megatron.integration` for its life."""

    def __init__(self, inputs: Inputs, device: torch.device, transformer_config: Any) -> None:
        super().__init__(inputs.config, inputs.grid, transformer_config)
        self._session = Session(inputs, device, Loop())
        self._saved_samples: int | None = None
        self._iterates = False

    @property
    def micro_batches(self) -> int:
        """``num_microbatches`` of every training step."""
        return self._session.inputs.job.micro_batches

    def wrap(self, forward_step: Callable[..., Any]) -> ForwardStep:
        """A forward step of planned micro-batches around the trainer's own."""
        return ForwardStep(
            forward_step, lambda: self._session.run, self._session.inputs, self._session.device
        )

    def train_iterator(self, consumed_samples: int, vp_stage: int | None) -> MicroBatchIterator:
        """See :func:`.integration.train_data_iterator`."""
        if self._saved_samples not in (None, consumed_samples):
            raise IntegrationError(
                f"consumed_samples {consumed_samples}: the loaded state goes on after "
                f"{self._saved_samples} samples; give the number that was saved with it"
            )
        self._iterates = True
        samples = self._session.start(consumed_samples=consumed_samples)
        return samples.train_iterator(vp_stage, consumed_samples=consumed_samples)

    def end_step(self) -> dict[str, float]:
        """See :func:`.integration.on_step_end`."""
        problem = self._session.run.problem(
            "call it once, after a schedule with num_microbatches=run.micro_batches has run",
            "packed_seq_params=batch['packed_seq_params']",
        )
        if problem is not None:
            raise IntegrationError(problem)
        return self._session.run.end_step()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold besides ``consumed_samples``; alike on all ranks."""
        return self._session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over :meth:`state_dict` of an earlier run, before the iterator, which makes the
        first plan."""
        if self._iterates:
            raise IntegrationError("load_state_dict: call it before train_data_iterator")
        self._saved_samples = int(state["consumed_samples"])
        self._session.load_state_dict(state)


def begin_run(
    config: SparseBalanceConfig,
    transformer_config: Any,
    *,
    vocab_size: int,
    data_prefix: str,
    seq_length: int,
    micro_batch_size: int,
    global_batch_size: int,
    split: str = "100,0,0",
    seed: int = 1234,
    device: torch.device | None = None,
) -> OwnLoopRun:
    """Begin a run in a trainer that owns its loop; on every rank, once Megatron's groups exist.

    Args:
        config: the plugin's choices; ``enabled`` is taken for granted.
        transformer_config: the model's, before the model is built. Its pipeline stages will
            exchange sequences of any length: ``variable_seq_lengths`` is set.
        vocab_size: rows of the embedding, padding included.
        data_prefix: names a pair of .bin and .idx files, whose documents are the samples.
        seq_length: tokens of the longest sample.
        micro_batch_size: samples that a micro-batch holds on average.
        global_batch_size: samples of a training step.
        split: weights of training, validation and test documents; the first are trained on.
        seed: of the order of samples.
        device: where the model runs; None is the current CUDA device.

    Returns:
        The run: ``micro_batches`` is the ``num_microbatches`` of every step; ``state_dict()`` and
        ``load_state_dict()`` go with a checkpoint.

    Raises:
        ConfigError, DataError, CostTableError: naming the field or file and the remedy.
    """
    device = device or torch.device(torch.cuda.current_device())
    config = trainer_config(config, device)
    check_model(transformer_config, config)
    check_cap(seq_length, config, context_parallel_size=transformer_config.context_parallel_size)
    check_selection(config, context_parallel_size=transformer_config.context_parallel_size)
    settings = RunSettings.from_transformer_config(
        transformer_config,
        vocab_size=vocab_size,
        data_parallel_size=data_parallel_size(),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        data_path=(data_prefix,),
        split=split,
        seed=seed,
    )
    inputs = read_inputs(settings, config, device.type)
    enable_variable_lengths(transformer_config)
    return OwnLoopRun(inputs, device, transformer_config)


def trainer_config(
    config: SparseBalanceConfig, device: torch.device, *, logs: bool = True
) -> SparseBalanceConfig:
    """The choices, turned on; refuses what only Megatron's own loop or command line can follow."""
    for name, unusable, remedy in (
        ("cost_table", config.cost_table == AUTO, "give a table of `sparse-balance profile`"),
        ("dry_run", config.dry_run is not None, "dry-run sparsebalance_megatron.pretrain_gpt"),
        ("eval_attention", config.eval_attention != "sparse", "evaluate with a dense model"),
        ("max_segments", config.max_segments > 1, "give 1"),
        ("device", config.device not in ("auto", device.type), "the model's device counts"),
        ("log_dir", not logs and config.log_dir is not None, "log what on_step_end returns"),
    ):
        if unusable:
            flag = f"{flag_name(name)} {getattr(config, name)}"
            raise ConfigError(f"{flag}: not for a trainer with its own loop; {remedy}")
    return replace(config, enabled=True)
