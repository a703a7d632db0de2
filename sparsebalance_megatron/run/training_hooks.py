# SPDX-License-Identifier: Apache-2.0
"""Callables that a script hands to ``megatron.training``, whose loop calls them.

Megatron calls in three places: the dataset provider (once per model chunk), the forward step (per
micro-batch) and, through :class:`MegatronLoop`, ``finalize_model_grads_func`` (per step, on every
rank).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsebalance_megatron.attention.host_copy import copied_to
from sparsebalance_megatron.config import flag_name
from sparsebalance_megatron.megatron.arguments import destination
from sparsebalance_megatron.megatron.compat import (
    arguments_of_weights,
    enable_variable_lengths,
    model_provider,
    saved_arguments,
    use_layer_spec,
)
from sparsebalance_megatron.megatron.core_attention import (
    AttentionOptions,
    sparse_balance_layer_spec,
)
from sparsebalance_megatron.megatron.hooks import install_hooks
from sparsebalance_megatron.megatron.segmented_schedule import use_segments
from sparsebalance_megatron.run.forward_step import ForwardStep, packed_forward_step
from sparsebalance_megatron.run.inputs import Inputs
from sparsebalance_megatron.run.micro_batches import MicroBatchIterator
from sparsebalance_megatron.run.run import Loop
from sparsebalance_megatron.run.samples import make_scheduler
from sparsebalance_megatron.run.session import SchedulerMaker, Session, print_rank_0
from sparsebalance_megatron.run.timing import MicroBatchRecorder

STATE_ATTRIBUTE = "sparse_balance_state"
"""Attribute of Megatron's ``args`` that carries the scheduler's state into checkpoints."""


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
    gives the decoder's spec, which :meth:`configure_model` or :attr:`model_provider` puts into the
    model.
    """

    def __init__(
        self,
        args: Namespace,
        inputs: Inputs,
        device: torch.device,
        make_scheduler: SchedulerMaker = make_scheduler,
    ) -> None:
        if inputs.policy.max_segments > 1:
            use_segments()
        self._args = args
        self.session = session = Session(
            inputs, device, MegatronLoop(device), self._keep_state, make_scheduler
        )
        self.forward_step = ForwardStep(
            partial(packed_forward_step, args.check_for_nan_in_loss_and_grad),
            lambda: session.run,
            inputs,
            device,
        )
        options = AttentionOptions.from_config(inputs.config, inputs.grid)
        self.layer_spec = sparse_balance_layer_spec(options)

    def configure_model(self, model_config: Any) -> None:
        """Put the layer spec into a ``GPTModelConfig`` (megatron-core 0.19)."""
        use_layer_spec(self._args, model_config, self.layer_spec)
        enable_variable_lengths(model_config.transformer)

    @property
    def model_provider(self) -> Callable[..., Any]:
        """A ``model_provider`` whose models have the layer spec (megatron-core 0.18)."""
        return model_provider(self._args, self.layer_spec, variable_lengths=True)

    def dataset_provider(
        self, sample_counts: Any, vp_stage: int | None = None
    ) -> tuple[MicroBatchIterator, MicroBatchIterator | None, MicroBatchIterator | None]:
        """Megatron's dataset provider: iterators for ``external`` loading, once checkpoints are
        read."""
        args, inputs = self._args, self.session.inputs
        self._restore_state()
        samples = self.session.start(
            consumed_samples=args.consumed_train_samples, iteration=getattr(args, "iteration", None)
        )
        train = samples.train_iterator(vp_stage, consumed_samples=args.consumed_train_samples)
        valid = test = None
        if inputs.valid is not None:
            valid = samples.evaluation_iterator(
                inputs.valid, vp_stage, consumed_samples=args.consumed_valid_samples
            )
        if inputs.test is not None:
            test = samples.evaluation_iterator(inputs.test, vp_stage, consumed_samples=0)
        return train, valid, test

    # Megatron then calls it on every rank.
    dataset_provider.is_distributed = True  # type: ignore[attr-defined]

    def _restore_state(self) -> None:
        if not getattr(self._args, "iteration", 0):
            for line in changed_attention(arguments_of_weights(self._args), self._args):
                print_rank_0(f"sparse balance: {line}")
        saved = saved_arguments(self._args)
        state = getattr(saved, STATE_ATTRIBUTE, None)
        if state is not None and not hasattr(self._args, STATE_ATTRIBUTE):
            self.session.load_state_dict(state)
            setattr(self._args, STATE_ATTRIBUTE, state)

    def _keep_state(self) -> None:
        if self._args.save:
            setattr(self._args, STATE_ATTRIBUTE, self.session.state_dict())


def changed_attention(trained: Namespace | None, now: Namespace) -> list[str]:
    """Say where a run that starts from weights selects otherwise than the run that trained them."""
    if trained is None or not getattr(trained, destination("enabled"), False):
        return []
    return [
        f"{flag_name(name)} is {getattr(now, destination(name))}; these weights were trained with "
        f"{getattr(trained, destination(name))}"
        for name in ("block_size", "selection")
        if getattr(trained, destination(name)) != getattr(now, destination(name))
    ]
