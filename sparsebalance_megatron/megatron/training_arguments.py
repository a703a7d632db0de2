# SPDX-License-Identifier: Apache-2.0
"""Megatron's ``args``, as far as a run under ``megatron.training`` needs them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from sparsebalance_megatron.config import flag_name
from sparsebalance_megatron.megatron.arguments import destination
from sparsebalance_megatron.megatron.compat import (
    arguments_of_weights,
    enable_variable_lengths,
    saved_arguments,
)
from sparsebalance_megatron.megatron.sharded_checkpoints import use_sharded_checkpoints
from sparsebalance_megatron.selector_registry import default_first_blocks

STATE_ATTRIBUTE = "sparse_balance_state"
"""Attribute of ``args`` that carries the scheduler's state into checkpoints."""


class TrainingArguments:
    """What a run reads of ``args``, and the state that it leaves there for checkpoints.

    ``check_for_nan`` asks Megatron to stop at a loss that is not finite.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self.check_for_nan = bool(args.check_for_nan_in_loss_and_grad)
        if args.use_torch_fsdp2:
            use_sharded_checkpoints()

    @property
    def iteration(self) -> int | None:
        """Steps trained before; None until Megatron has looked for a checkpoint."""
        return getattr(self._args, "iteration", None)

    @property
    def consumed_train_samples(self) -> int:
        """Training samples of those steps."""
        return int(self._args.consumed_train_samples)

    @property
    def consumed_valid_samples(self) -> int:
        """Validation samples that those steps were evaluated on."""
        return int(self._args.consumed_valid_samples)

    def take_saved_state(self) -> dict[str, Any] | None:
        """The plugin's state in the checkpoint that the run goes on from; None without one, and
        once it was taken."""
        state = getattr(saved_arguments(self._args), STATE_ATTRIBUTE, None)
        if state is None or hasattr(self._args, STATE_ATTRIBUTE):
            return None
        setattr(self._args, STATE_ATTRIBUTE, state)
        return dict(state)

    def keep_state(self, state: Callable[[], dict[str, Any]]) -> None:
        """Have the next checkpoint hold the state, if any is saved."""
        if self._args.save:
            setattr(self._args, STATE_ATTRIBUTE, state())

    def other_attention(self) -> list[str]:
        """Say where a run that starts from weights selects otherwise than the one that trained
        them."""
        return changed_attention(
            None if self.iteration else arguments_of_weights(self._args), self._args
        )

    def configure_model(self, model_config: Any, layer_spec: Callable[..., Any]) -> None:
        """Have a ``GPTModelConfig`` ask ``layer_spec(transformer_config, vp_stage)``."""
        # Megatron parses the flag and leaves the config at its default.
        model_config.rope_scaling_factor = self._args.rope_scaling_factor

        def spec_for_builder(model_config: Any, vp_stage: int | None = None) -> Any:
            return layer_spec(model_config.transformer, vp_stage)

        model_config.transformer_layer_spec = spec_for_builder
        enable_variable_lengths(model_config.transformer)


def trained_first_blocks(trained: Namespace) -> int:
    """First blocks that a run with these arguments read; runs before there was a flag read none."""
    return getattr(trained, destination("first_blocks"), None) or 0


def settle_first_blocks(args: Namespace) -> list[str]:
    """Set the number of first blocks where the flags leave it open, for checkpoints to hold it.

    It is what the run read that the checkpoint comes from, else the selection's default.

    Returns:
        A sentence where the checkpoint decides otherwise than the default.
    """
    name, selection = destination("first_blocks"), getattr(args, destination("selection"))
    default = default_first_blocks(selection)
    if getattr(args, name) is not None or not default:
        return []
    setattr(args, name, default)
    trained = arguments_of_weights(args)
    if (
        trained is None
        or not getattr(trained, destination("enabled"), False)
        or getattr(trained, destination("selection")) != selection
        or (first_blocks := trained_first_blocks(trained)) == default
    ):
        return []
    setattr(args, name, first_blocks)
    return [
        f"{flag_name('first_blocks')} is {first_blocks}, as in the checkpoint, not {default}; give "
        "the flag to change it"
    ]


def settle_dense_length(args: Namespace) -> list[str]:
    """Take the length up to which documents are dense from the checkpoint, where flags leave it
    open and say the same of attention otherwise.

    Returns:
        A sentence where the checkpoint has one.
    """
    name, trained = destination("dense_up_to"), arguments_of_weights(args)
    kept = getattr(trained, name, "auto")
    what = ("enabled", "block_size", "base_budget", "selection")
    if (
        getattr(args, name) != "auto"
        or kept == "auto"
        or any(getattr(trained, each) != getattr(args, each) for each in map(destination, what))
    ):
        return []
    setattr(args, name, kept)
    return [f"{flag_name('dense_up_to')} is {kept}, as in the checkpoint; give the flag to change"]


def changed_attention(trained: Namespace | None, now: Namespace) -> list[str]:
    """Differences between two runs' selections, one sentence each; none without a first run."""
    if trained is None or not getattr(trained, destination("enabled"), False):
        return []
    pairs = {
        name: (getattr(now, destination(name)), getattr(trained, destination(name)))
        for name in ("block_size", "selection", "dense_up_to")
        if hasattr(trained, destination(name))
    } | {"first_blocks": (trained_first_blocks(now), trained_first_blocks(trained))}
    return [
        f"{flag_name(name)} is {ours}; these weights were trained with {theirs}"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs
    ]
