# SPDX-License-Identifier: Apache-2.0
"""Callables that a script hands to ``megatron.training``, whose loop calls them.

Megatron calls in three places: the dataset provider (once per model chunk), the forward step (per
micro-batch) and, through :class:`MegatronLoop`, ``finalize_model_grads_func`` (per step, on every
rank).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsebalance_megatron.attention.host_copy import copied_to
from sparsebalance_megatron.attention.peaks import PeakHistograms
from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.megatron.arguments import (
    check_supported,
    config_from_args,
    destination,
)
from sparsebalance_megatron.megatron.core_attention import (
    AttentionOptions,
    sparse_balance_layer_spec,
)
from sparsebalance_megatron.megatron.hooks import install_hooks
from sparsebalance_megatron.megatron.planned_schedule import use_planned_schedule
from sparsebalance_megatron.megatron.settings import RunSettings
from sparsebalance_megatron.megatron.training_arguments import (
    TrainingArguments,
    settle_dense_length,
    settle_first_blocks,
)
from sparsebalance_megatron.megatron.unsupported import check_resumed_optimizer
from sparsebalance_megatron.run.forward_step import ForwardStep, packed_forward_step
from sparsebalance_megatron.run.inputs import Inputs, read_inputs
from sparsebalance_megatron.run.micro_batches import MicroBatchIterator
from sparsebalance_megatron.run.run import Loop
from sparsebalance_megatron.run.session import SchedulerMaker, Session, print_rank_0
from sparsebalance_megatron.run.timing import MicroBatchRecorder


class MegatronLoop(Loop):
    """``megatron.training``'s loop: it calls when gradients are final, and logs the reports."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def follow(
        self, model_config: Any, recorder: MicroBatchRecorder, end_step: Callable[[], object]
    ) -> None:
        """Hook the config, which Megatron resets at every step."""
        install_hooks(model_config, recorder, end_step)

    def step_ended(self, reports: list[dict[str, Tensor]], figures: Mapping[str, float]) -> None:
        """Add the figures to what Megatron logs.

        Megatron reads the micro-batches' reports only after the step, so those of the last stage
        can still take what is known at its end. It averages a single value over micro-batches
        alone.
        """
        if not reports:
            return
        values = copied_to(torch.tensor(list(figures.values()), dtype=torch.float), self._device)
        for report in reports:
            report.update(zip(figures, values.unbind(), strict=True))


class TrainingHooks:
    """The arguments of Megatron's ``pretrain`` that differ with ``--sparse-balance``.

    ``forward_step`` is the ``forward_step_func``; ``layer_spec(transformer_config, vp_stage)``
    gives the decoder's spec, which :meth:`configure_model` puts into the model.
    """

    def __init__(
        self,
        arguments: TrainingArguments,
        inputs: Inputs,
        device: torch.device,
        make_scheduler: SchedulerMaker = Inputs.scheduler,
    ) -> None:
        segments = inputs.plan_settings.max_segments > 1
        if segments or inputs.plan_settings.plans_positions_of(inputs.job):
            use_planned_schedule(segments=segments)
        self._arguments = arguments
        self.session = session = Session(
            inputs,
            device,
            MegatronLoop(device),
            lambda: arguments.keep_state(session.state_dict),
            make_scheduler,
        )
        self.forward_step = ForwardStep(
            partial(packed_forward_step, arguments.check_for_nan),
            lambda: session.run,
            inputs.settings.seq_length,
            device,
        )
        self._options = AttentionOptions(inputs.config, inputs.grid)
        self.layer_spec = sparse_balance_layer_spec(self._options)

    def counting_peaks(self) -> PeakHistograms:
        """Have the layers of models that are built from here on count their peaks of attention."""
        peaks = PeakHistograms(self.session.inputs.job.layers, self.session.device)
        self.layer_spec = sparse_balance_layer_spec(replace(self._options, peaks=peaks))
        return peaks

    def configure_model(self, model_config: Any) -> None:
        """Put the layer spec into a ``GPTModelConfig``."""
        self._arguments.configure_model(model_config, self.layer_spec)

    def dataset_provider(
        self, sample_counts: Any, vp_stage: int | None = None
    ) -> tuple[MicroBatchIterator, MicroBatchIterator | None, MicroBatchIterator | None]:
        """Megatron's dataset provider: iterators for ``external`` loading, once checkpoints are
        read."""
        arguments, session = self._arguments, self.session
        for line in arguments.other_attention():
            print_rank_0(f"sparse balance: {line}")
        if (state := arguments.take_saved_state()) is not None:
            session.load_state_dict(state)
        consumed_samples = arguments.consumed_train_samples
        session.start(consumed_samples=consumed_samples, iteration=arguments.iteration)

        def evaluation(index: SampleIndex | None, consumed: int) -> MicroBatchIterator | None:
            if index is None:
                return None
            return session.evaluation_iterator(index, consumed_samples=consumed, vp_stage=vp_stage)

        return (
            session.train_iterator(consumed_samples=consumed_samples, vp_stage=vp_stage),
            evaluation(session.inputs.valid, arguments.consumed_valid_samples),
            evaluation(session.inputs.test, 0),
        )

    # Megatron then calls it on every rank.
    dataset_provider.is_distributed = True  # type: ignore[attr-defined]


def make_training_hooks(
    args: Namespace, device_type: str, report: Callable[[str], None]
) -> TrainingHooks:
    """Check flags, data and cost table, and make the hooks; ``args`` are Megatron's, validated.

    What the checkpoint decides is set in ``args``, so that checkpoints of this run hold it.

    Args:
        device_type: "cpu" or "cuda".
        report: is told what the checkpoint decides otherwise than the default, in a line.

    Raises:
        ConfigError, DataError, CostTableError: naming the flag or file and the remedy.
    """
    for line in (*settle_first_blocks(args), *settle_dense_length(args)):
        report(f"sparse balance: {line}")
    config = config_from_args(args)
    check_supported(args, config)
    check_resumed_optimizer(args)
    inputs = read_inputs(RunSettings.from_args(args), config, device_type)
    # Checkpoints hold what was trained with, not where it came from.
    for name in ("layer_budgets", "dense_up_to"):
        setattr(args, destination(name), getattr(inputs.config, name))
    setattr(args, destination("sensitivity"), None)
    device = torch.device("cpu" if device_type == "cpu" else f"cuda:{args.local_rank}")
    return TrainingHooks(TrainingArguments(args), inputs, device)
