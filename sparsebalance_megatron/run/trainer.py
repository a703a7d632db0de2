# SPDX-License-Identifier: Apache-2.0
"""Runs of trainers that call Megatron's schedules themselves. Loads no ``megatron.training``.

Times come from hooks in the model's config, put there at the first forward. What belongs to the end
of a step happens in ``end_step``, which the trainer calls, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.dense_length import check_dense_length
from sparsebalance_megatron.megatron.compat import default_layer_spec, enable_variable_lengths
from sparsebalance_megatron.megatron.core_attention import AttentionOptions, replace_core_attention
from sparsebalance_megatron.megatron.planned_schedule import ForwardBackward, as_planned
from sparsebalance_megatron.megatron.sequence_groups import data_parallel_size
from sparsebalance_megatron.megatron.settings import RunSettings
from sparsebalance_megatron.megatron.unsupported import check_model
from sparsebalance_megatron.run.forward_step import ForwardStep
from sparsebalance_megatron.run.inputs import Inputs, read_inputs
from sparsebalance_megatron.run.micro_batches import MicroBatchIterator
from sparsebalance_megatron.run.run import IntegrationError, Loop
from sparsebalance_megatron.run.session import Session


class RunHandle:
    """Base of such runs; ``grid`` has the budgets, in blocks, at which coverage is observed."""

    def __init__(
        self, config: SparseBalanceConfig, grid: Sequence[int], transformer_config: Any
    ) -> None:
        self._options = AttentionOptions(config, tuple(grid))
        self._transformer_config = transformer_config

    def layer_spec(self, spec: Any = None, *, vp_stage: int | None = None) -> Any:
        """Give the decoder's layer spec with core attention replaced; for ``GPTModel``.

        Args:
            spec: the trainer's own, left as it is: a ``ModuleSpec`` of a transformer layer, or
                ``TransformerBlockSubmodules``. None is what Megatron chooses for the model's
                config.
            vp_stage: model chunk, with virtual pipeline stages.

        Raises:
            ConfigError: if a layer has no core attention to replace.
        """
        if spec is None:
            spec = default_layer_spec(self._transformer_config, vp_stage)
        return replace_core_attention(spec, self._options)


class TrainerRun(RunHandle):
    """One run on one rank of a trainer that owns its loop; :func:`begin_run` makes it."""

    def __init__(self, inputs: Inputs, device: torch.device, transformer_config: Any) -> None:
        super().__init__(inputs.config, inputs.grid, transformer_config)
        self._session = Session(inputs, device, Loop())
        self._saved_samples: int | None = None
        self._iterates = self._runs_as_planned = False

    @property
    def micro_batches(self) -> int:
        """``num_microbatches`` of training steps; the schedule of :meth:`wrap_schedule` runs as
        many as each step's plan has."""
        return self._session.inputs.job.micro_batches

    def wrap_forward_step(self, forward_step: Callable[..., Any]) -> ForwardStep:
        """Make a forward step of planned, measured micro-batches around the trainer's own.

        Args:
            forward_step: ``(data_iterator, model) -> (output, loss_func)``. Its iterator yields one
                dict: ``tokens``, ``position_ids``, ``labels`` and ``loss_mask``, [1, tokens] or
                None on stages that read none, and ``packed_seq_params``, which the model must be
                given. ``loss_func(output)`` returns (sum of token losses, number of tokens,
                report).

        Returns:
            The ``forward_step_func`` of training steps. Evaluate with the trainer's own.
        """
        session = self._session
        return ForwardStep(
            forward_step, lambda: session.run, session.inputs.settings.seq_length, session.device
        )

    def wrap_schedule(self, forward_backward: ForwardBackward) -> ForwardBackward:
        """Make a schedule that runs steps as planned: with segments, or in fewer micro-batches.

        Call it before :meth:`train_data_iterator`, with the function that Megatron's
        ``get_forward_backward_func`` gives. Without it every step has :attr:`micro_batches`.
        """
        self._runs_as_planned = True
        segments = self._session.inputs.plan_settings.max_segments > 1
        return as_planned(forward_backward, segments=segments)

    def train_data_iterator(
        self, *, consumed_samples: int = 0, vp_stage: int | None = None
    ) -> MicroBatchIterator:
        """Give one model chunk's ``data_iterator`` of training steps; the first call is collective.

        It is endless: after the last sample of an epoch comes the first of the next.

        Args:
            consumed_samples: trained on before, a multiple of ``global_batch_size``.
            vp_stage: model chunk, with virtual pipeline stages.

        Raises:
            IntegrationError: if loaded state goes on from another sample, or steps may have
                segments and no schedule was wrapped.
            StateError: if no step begins there, or loaded state cannot be continued in this run.
        """
        if not self._runs_as_planned:
            max_segments = self._session.inputs.plan_settings.max_segments
            if max_segments > 1:
                raise IntegrationError(
                    f"{flag_name('max_segments')} {max_segments}: Megatron's schedule runs none; "
                    "call wrap_schedule before train_data_iterator"
                )
            self._session.inputs = self._session.inputs.at_fixed_positions()
        if self._saved_samples not in (None, consumed_samples):
            raise IntegrationError(
                f"consumed_samples {consumed_samples}: the loaded state goes on after "
                f"{self._saved_samples} samples; give the number that was saved with it"
            )
        self._iterates = True
        self._session.start(consumed_samples=consumed_samples)
        return self._session.train_iterator(consumed_samples=consumed_samples, vp_stage=vp_stage)

    def end_step(self) -> dict[str, float]:
        """Learn from a training step; collective: once a step, on every rank, after the schedule.

        Returns:
            The step's figures, for the trainer's own log: name -> value, alike on all ranks.

        Raises:
            IntegrationError: if no whole step has run, or its model was not given the plugin's
                ``packed_seq_params``.
            PlanMismatchError: on all ranks alike, if they executed different plans.
        """
        problem = self._session.run.problem(
            "call it once, after the schedule that wrap_schedule gave has run"
            if self._runs_as_planned
            else "call it once, after a schedule with num_microbatches=run.micro_batches has run",
            "packed_seq_params=batch['packed_seq_params']",
        )
        if problem is not None:
            raise IntegrationError(problem)
        return self._session.run.end_step()

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint besides ``consumed_samples``; alike on all ranks."""
        return self._session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a :meth:`state_dict`, before :meth:`train_data_iterator` makes the first
        plan."""
        if self._iterates:
            raise IntegrationError("load_state_dict: call it before train_data_iterator")
        self._saved_samples = int(state["consumed_samples"])
        self._session.load_state_dict(state)
        self._options.config = self._session.inputs.config


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
) -> TrainerRun:
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
        The run, whose methods a trainer calls in this order: ``layer_spec``, ``load_state_dict``,
        ``wrap_schedule``, ``wrap_forward_step``, ``train_data_iterator``; after each step
        ``end_step``.

    Raises:
        ConfigError, DataError, CostTableError: naming the field or file and the remedy.
    """
    device = device or torch.device(torch.cuda.current_device())
    config = checked_config(config, transformer_config, device, longest_tokens=seq_length)
    check_dense_length(config, seq_length)
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
    return TrainerRun(inputs, device, transformer_config)


def checked_config(
    config: SparseBalanceConfig,
    transformer_config: Any,
    device: torch.device,
    *,
    longest_tokens: int,
    owns_data: bool = False,
) -> SparseBalanceConfig:
    """The choices, turned on; refuses what the trainer's loop cannot follow, or the model.

    Args:
        longest_tokens: of a sample.
        owns_data: whether the trainer is a host.
    """
    for name, unusable, remedy in (
        ("dry_run", config.dry_run is not None, "dry-run sparsebalance_megatron.pretrain_gpt"),
        ("eval_attention", config.eval_attention != "sparse", "evaluate with a dense model"),
        ("max_segments", owns_data and config.max_segments > 1, "give 1"),
        ("device", config.device not in ("auto", device.type), "the model's device counts"),
        ("log_dir", owns_data and config.log_dir is not None, "log what end_step returns"),
    ):
        if unusable:
            flag = f"{flag_name(name)} {getattr(config, name)}"
            raise ConfigError(f"{flag}: not for a trainer with its own loop; {remedy}")
    config = replace(config, enabled=True)
    check_model(transformer_config, config, longest_tokens)
    return config
