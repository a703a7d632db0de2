# SPDX-License-Identifier: Apache-2.0
"""Megatron's ``args``, as far as a run under ``megatron.training`` needs them."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from sparsebalance_megatron.config import SparseBalanceConfig, flag_name
from sparsebalance_megatron.errors import one_line_refusals
from sparsebalance_megatron.layer_budgets import ALL_DENSE
from sparsebalance_megatron.megatron.arguments import config_from_args, destination
from sparsebalance_megatron.megatron.compat import (
    arguments_of_weights,
    enable_variable_lengths,
    saved_state,
)
from sparsebalance_megatron.megatron.fsdp2_checkpoints import use_sharded_checkpoints
from sparsebalance_megatron.megatron.settings import RunSettings
from sparsebalance_megatron.megatron.unsupported import check_resumed, check_supported
from sparsebalance_megatron.selector_registry import default_first_blocks

DENSE_COUNTED = destination("dense_up_to_counted")
"""Attribute of args: whether the length up to which documents are dense was counted."""
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
    def consumed_samples(self) -> tuple[int, int]:
        """Training samples of those steps, and validation samples."""
        return self._args.consumed_train_samples, self._args.consumed_valid_samples

    def take_saved_state(self) -> dict[str, Any] | None:
        """The plugin's state in the checkpoint that the run goes on from; None without one, and
        once it was taken."""
        if not self._args.load or not self.iteration or hasattr(self._args, STATE_ATTRIBUTE):
            return None
        saved = saved_state(self._args.load, self.iteration).get("args")
        if (state := getattr(saved, STATE_ATTRIBUTE, None)) is None:
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


def checked_settings(args: Namespace) -> tuple[list[str], SparseBalanceConfig, RunSettings]:
    """What flags say, once Megatron has completed them, and a sentence for each where the
    checkpoint decides otherwise than the default."""
    lines = settle_attention(args)
    config = config_from_args(args)
    check_supported(args, config)
    check_resumed(args)
    with one_line_refusals():
        return lines, config, RunSettings.from_args(args)


def trained_first_blocks(trained: Namespace) -> int:
    """First blocks that a run with these arguments read; runs before there was a flag read none."""
    return getattr(trained, destination("first_blocks"), None) or 0


def trained_dense_length(trained: Namespace) -> str:
    """Up to which length documents were dense in a run with these arguments: none before there was
    a flag."""
    length: str = getattr(trained, destination("dense_up_to"), "0")
    return length


def settle_attention(args: Namespace) -> list[str]:
    """Set what flags leave open of attention, for checkpoints to hold it; see
    :func:`checked_settings`.

    First blocks are those of the checkpoint that the run starts from, where it was trained with
    this selection, else the selection's default. The length up to which documents are dense is the
    checkpoint's, where flags say the same of attention otherwise and not all documents are dense;
    one that was counted gives way to a cost table.
    """
    trained, lines = arguments_of_weights(args), []

    def was(name: str) -> Any:
        return getattr(trained, destination(name), None)

    def now(name: str) -> Any:
        return getattr(args, destination(name))

    def keep(name: str, value: Any) -> None:
        setattr(args, destination(name), value)

    def agree(*names: str) -> bool:
        return all(was(name) == now(name) for name in ("enabled", "selection", *names))

    default = default_first_blocks(now("selection"))
    if now("first_blocks") is None and default:
        kept = trained_first_blocks(trained) if trained is not None and agree() else default
        keep("first_blocks", kept)
        if kept != default:
            lines.append(
                f"{flag_name('first_blocks')} is {kept}, as in the checkpoint, not {default}; give "
                "the flag to change it"
            )
    length = "auto" if trained is None else trained_dense_length(trained)
    some_sparse = ALL_DENSE not in (was("layer_budgets"), now("layer_budgets"))
    is_open = now("dense_up_to") is None
    keep("dense_up_to", now("dense_up_to") or "auto")
    if is_open and length != "auto" and some_sparse and agree("block_size", "base_budget"):
        flag, counted = flag_name("dense_up_to"), getattr(trained, DENSE_COUNTED, False)
        if counted and now("cost_table") is not None:
            lines.append(f"{flag} is the cost table's; the checkpoint's {length} was counted")
        else:
            keep("dense_up_to", length)
            setattr(args, DENSE_COUNTED, counted)
            lines.append(f"{flag} is {length}, as in the checkpoint; give the flag to change")
    by_layer = was("layer_budgets")
    if now("sensitivity") and by_layer and not args.finetune and agree("block_size"):
        keep("sensitivity", None)
        keep("layer_budgets", by_layer)
        lines.append(
            f"base budgets by sensitivity are {by_layer}, as in the checkpoint; --finetune "
            "computes them anew"
        )
    return lines


def changed_attention(trained: Namespace | None, now: Namespace) -> list[str]:
    """Differences between two runs' selections, one sentence each; none without a first run."""
    if trained is None or not getattr(trained, destination("enabled"), False):
        return []
    pairs = {
        name: tuple(getattr(run, destination(name), None) or "absent" for run in (now, trained))
        for name in ("block_size", "selection", "base_budget", "layer_budgets")
    } | {
        "first_blocks": (trained_first_blocks(now), trained_first_blocks(trained)),
        "dense_up_to": (trained_dense_length(now), trained_dense_length(trained)),
    }
    return [
        f"{flag_name(name)} is {ours}; these weights were trained with {theirs}"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs
    ]
