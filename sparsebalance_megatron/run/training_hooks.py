# SPDX-License-Identifier: Apache-2.0
"""Callables that a script hands to ``megatron.training``: the dataset provider, which is called
once per model chunk, and the forward step, once per micro-batch."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sparsebalance_megatron.attention.repetitions import Repetitions
from sparsebalance_megatron.megatron.arguments import destination
from sparsebalance_megatron.megatron.core_attention import sparse_balance_layer_spec
from sparsebalance_megatron.megatron.hooks import packed_forward_step
from sparsebalance_megatron.megatron.planned_schedule import use_planned_schedule
from sparsebalance_megatron.megatron.training_arguments import (
    DENSE_COUNTED,
    TrainingArguments,
    checked_settings,
)
from sparsebalance_megatron.run.agreement import (
    announce_rank,
    check_neighbor_announced,
    print_rank_0,
)
from sparsebalance_megatron.run.inputs import Inputs, read_inputs
from sparsebalance_megatron.run.micro_batches import MicroBatchIterator
from sparsebalance_megatron.run.trainer import TrainerRun


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
    ) -> None:
        segments = inputs.config.max_segments > 1
        if segments or inputs.plan_settings.plans_positions(inputs.job):
            use_planned_schedule(segments=segments)
        self._arguments = arguments
        self.run = run = TrainerRun(inputs, device, ends_steps=True)
        run.keep_state = arguments.keep_state
        inner = partial(packed_forward_step, arguments.check_for_nan)
        self.forward_step: Callable[[Any, Any], Any] = run.wrap_forward_step(inner)
        self._options = run.options
        self.layer_spec = sparse_balance_layer_spec(self._options)

    def watching_repetitions(self) -> Repetitions:
        """Have the layers of models that are built from here on add up their attention to far
        repetitions."""
        shape, layers = self.run.inputs.settings.host_job.shape, self.run.inputs.job.layers
        found = Repetitions(layers, shape.num_attention_heads, self.run.device)
        # Dense layers read lists of everything, which may be cut.
        config = replace(self._options.config, layer_budgets=None)
        options = replace(self._options, config=config, repetitions=found, leaves_attention=False)
        self.layer_spec = sparse_balance_layer_spec(options)
        return found

    def configure_model(self, model_config: Any) -> None:
        """Put the layer spec into a ``GPTModelConfig``."""

        def layer_spec(*given: Any) -> Any:
            announce_rank()
            return self.layer_spec(*given)

        self._arguments.configure_model(model_config, layer_spec)

    def dataset_provider(
        self, sample_counts: Any, vp_stage: int | None = None
    ) -> tuple[MicroBatchIterator, MicroBatchIterator | None, MicroBatchIterator | None]:
        """Megatron's dataset provider: iterators for ``external`` loading, once checkpoints are
        read."""
        arguments, run = self._arguments, self.run
        check_neighbor_announced()
        print_rank_0(*arguments.other_attention())
        if (state := arguments.take_saved_state()) is not None:
            run.load_state_dict(state)
        consumed, validated = arguments.consumed_samples
        run.start(consumed_samples=consumed, iteration=arguments.iteration)
        train = run.train_data_iterator(consumed_samples=consumed, vp_stage=vp_stage)
        valid, test = (
            None if index is None else run.evaluation_data_iterator(index, samples, vp_stage)
            for index, samples in ((run.inputs.valid, validated), (run.inputs.test, 0))
        )
        return train, valid, test

    # Megatron then calls it on every rank.
    dataset_provider.is_distributed = True  # type: ignore[attr-defined]


def make_training_hooks(
    args: Namespace, device_type: str, report: Callable[[str], None]
) -> TrainingHooks:
    """Check flags, data and cost table, and make the hooks; ``args`` are Megatron's, validated.

    What the checkpoint decides is set in ``args``, so that checkpoints of this run hold it, and
    ``report`` is told where it is otherwise than the default, in a line.
    """
    lines, config, settings = checked_settings(args)
    for line in lines:
        report(f"sparse balance: {line}")
    inputs = read_inputs(settings, config, device_type)
    # Checkpoints hold what was trained with, not where it came from.
    for name in ("layer_budgets", "dense_up_to"):
        setattr(args, destination(name), getattr(inputs.config, name))
    by_costs = inputs.dense_by_costs
    counted = inputs.dense_counted if by_costs else getattr(args, DENSE_COUNTED, False)
    setattr(args, DENSE_COUNTED, counted)
    # What the checkpoint decides is decided.
    inputs = replace(inputs, dense_by_costs=False, dense_counted=counted)
    setattr(args, destination("sensitivity"), None)
    device = torch.device("cpu" if device_type == "cpu" else f"cuda:{args.local_rank}")
    return TrainingHooks(TrainingArguments(args), inputs, device)
