# SPDX-License-Identifier: Apache-2.0
"""For scripts and trainers that keep their own entry point; docs/INTEGRATION.md shows both uses.

A script around ``megatron.training`` adds flags (:func:`arguments_provider`), asks whether they
turn the plugin on (:func:`is_enabled`), and hands :func:`training_hooks` to ``pretrain``.

A trainer that calls Megatron's schedules itself begins a run (:func:`begin_run`), builds its model
with :func:`sparse_balance_layer_spec`, trains through :func:`wrap_schedule` and
:func:`wrap_forward_step` on :func:`train_data_iterator`, and says when a step has ended
(:func:`on_step_end`).

A host that owns its data as well asks a planner for plans (:func:`planner`), on any process, and
begins a run on its ranks (:func:`begin_host_run`), where :func:`slice_of` cuts a rank's part of a
micro-batch and :func:`attach` gives the model its budgets. A :class:`PlannedStep` travels as bytes.

Importing this module loads neither torch nor Megatron.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparsebalance_megatron.config import ConfigError, flag_name

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebalance_megatron.config import SparseBalanceConfig
    from sparsebalance_megatron.learn.host_planner import HostJob, HostPlanner
    from sparsebalance_megatron.learn.planned_step import PlannedStep
    from sparsebalance_megatron.run.own_loop import HostRun, OwnLoopRun, begin_host_run, begin_run
    from sparsebalance_megatron.run.training_hooks import TrainingHooks

__all__ = [
    "HostJob",
    "PlannedStep",
    "arguments_provider",
    "attach",
    "begin_host_run",
    "begin_run",
    "is_enabled",
    "on_step_end",
    "planner",
    "slice_of",
    "sparse_balance_layer_spec",
    "train_data_iterator",
    "training_hooks",
    "whole_of",
    "wrap_forward_step",
    "wrap_schedule",
]


_ELSEWHERE = {
    "HostJob": "learn.host_planner",
    "PlannedStep": "learn.planned_step",
    "begin_host_run": "run.own_loop",
    "begin_run": "run.own_loop",
}
"""Names whose modules load numpy, or torch and Megatron: loaded when asked for."""


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"sparsebalance_megatron.{_ELSEWHERE[name]}"), name)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End at a ValueError of this package (flags, data, cost tables) with one line and status 2."""
    try:
        yield
    except ValueError as error:
        if type(error).__module__.partition(".")[0] != __name__.partition(".")[0]:
            raise
        print(f"sparse balance: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        from sparsebalance_megatron.supported import what_is_missing

        print(f"sparse balance: error: {what_is_missing(error)}", file=sys.stderr, flush=True)
        sys.exit(2)


def arguments_provider(
    other: Callable[[ArgumentParser], ArgumentParser] | None = None,
) -> Callable[[ArgumentParser], ArgumentParser]:
    """An ``extra_args_provider`` for Megatron's parser that adds ``--sparse-balance-*``.

    Where the command line has ``--sparse-balance``, some of Megatron's defaults change to what the
    plugin needs; explicit flags win.

    Args:
        other: the script's own provider, applied first.
    """
    from sparsebalance_megatron.megatron import cpu
    from sparsebalance_megatron.megatron.arguments import args_provider, check_typed_flags

    enabled = _flag_given()
    own = args_provider(enabled=enabled, on_cpu=cpu.installed(), report=_print_on_first_rank)

    def provide(parser: ArgumentParser) -> ArgumentParser:
        parser = own(parser if other is None else other(parser))
        if enabled:
            with one_line_errors():
                check_typed_flags(parser, sys.argv[1:])
        return parser

    return provide


def is_enabled(args: Namespace) -> bool:
    """Whether the plugin is to train; asks Megatron's validated ``args``."""
    if not _flag_given():
        return False
    from sparsebalance_megatron.megatron.arguments import config_from_args

    with one_line_errors():
        return config_from_args(args).enabled


@one_line_errors()
def training_hooks(args: Namespace) -> TrainingHooks:
    """Replacements for a script's dataset provider, forward step and layer spec; ``args`` are
    validated.

    Flags, data and cost table are checked here; a mistake ends the process with one line and status
    2.

    Returns:
        ``dataset_provider`` and ``forward_step`` for ``pretrain``; ``configure_model`` for the
        model's config (megatron-core 0.19) or ``model_provider`` for ``pretrain`` (0.18).
    """

    import torch

    from sparsebalance_megatron.megatron import cpu
    from sparsebalance_megatron.megatron.arguments import check_supported, config_from_args
    from sparsebalance_megatron.megatron.settings import RunSettings
    from sparsebalance_megatron.run.inputs import read_inputs
    from sparsebalance_megatron.run.training_hooks import TrainingHooks

    config = config_from_args(args)
    device_type = "cpu" if cpu.installed() else "cuda"
    for name, unusable in (
        ("device", config.device not in ("auto", device_type)),
        ("dry_run", config.dry_run is not None),
    ):
        if unusable:
            raise ConfigError(
                f"{flag_name(name)} {getattr(config, name)}: this script leaves no choice; use "
                "`-m sparsebalance_megatron.pretrain_gpt`, or drop the flag"
            )
    check_supported(args, config)
    inputs = read_inputs(RunSettings.from_args(args), config, device_type)
    device = torch.device("cpu" if device_type == "cpu" else f"cuda:{args.local_rank}")
    return TrainingHooks(args, inputs, device)


def planner(config: SparseBalanceConfig, job: HostJob) -> HostPlanner:
    """Make a planner that needs lengths alone; loads neither torch nor Megatron.

    It is an object and not a function because plans get better by what steps measured:
    ``plan(lengths_tokens)`` is pure in its arguments and in that knowledge, which ``state_dict()``
    and ``load_state_dict()`` carry between processes and into checkpoints. A run has one of its
    own, ``run.planner``.

    Args:
        config: the plugin's choices.
        job: of the host: ``run.job`` of one of its ranks, or made where there is none. Its
            ``data_parallel_size`` counts context-parallel ranks too.

    Raises:
        ConfigError, CostTableError: naming the field or file and the remedy.
    """
    from sparsebalance_megatron.learn.host_planner import HostPlanner

    return HostPlanner(config, job)


def slice_of(
    run: HostRun,
    planned: PlannedStep,
    position: int,
    values: Mapping[str, Tensor],
    *,
    padding: float = 0,
) -> dict[str, Tensor]:
    """Tokens of a micro-batch that this rank computes: all, or its part where ranks share it.

    Args:
        position: of the micro-batch among those of this data-parallel rank.
        values: name -> [tokens, ...], of the micro-batch's samples in the plan's order: inputs,
            labels, a loss mask, what else the loss needs. A token's label goes with it: a rank's
            tokens are not neighbours, so shift labels before.
        padding: the value of what is computed besides, where a rank's tokens must be a multiple.

    Returns:
        name -> [tokens of this rank, ...], and ``position_ids``, which begin anew in every sample.

    Raises:
        IntegrationError: if there are more or fewer values than the samples have tokens.
    """
    return run.slice_of(planned, position, values, padding=padding)


def whole_of(
    run: HostRun, planned: PlannedStep, position: int, values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The inverse of :func:`slice_of`, for what the model gives per token, log-probabilities say.

    Collective over the ranks that share the micro-batch.

    Args:
        values: name -> [tokens of this rank, ...], padding included.

    Returns:
        name -> [tokens of the samples, ...], in the plan's order, on every rank that shares them.
        A gradient flows through this rank's part alone. A loss from whole samples is computed on
        all of those ranks; count its value and its tokens on one.
    """
    return run.whole_of(planned, position, values)


def attach(
    run: HostRun,
    planned: PlannedStep,
    position: int,
    packed_seq_params: Any = None,
    *,
    model: Any = None,
    vp_stage: int | None = None,
    learn: bool = True,
) -> Any:
    """``PackedSeqParams`` of a micro-batch that carry its budgets, for the model.

    Called within the host's forward step, on every pipeline stage.

    Args:
        planned: the step, alike on all ranks.
        position: of the micro-batch among those of this data-parallel rank.
        packed_seq_params: None where :func:`slice_of` cuts the model's inputs, which it must where
            ranks share micro-batches. Else those of the host's own sequence, in the thd layout,
            which are copied; its samples are those of the plan's micro-batch, in order, and what
            follows them is padding. Their boundaries are read on the host, which waits for the
            device where they are there.
        model: the chunk that runs; needed where ranks share micro-batches, whose rotary embeddings
            follow the true positions of a rank's tokens.
        vp_stage: model chunk, with virtual pipeline stages.
        learn: whether the pass is part of a training step, measured and observed. A pass that is
            not executes the planned budgets as they are.

    Raises:
        IntegrationError: if the packed sequence is not that of the plan, or a step was not ended.
        PlanMismatchError: if ranks that may share micro-batches were given different plans.
    """
    return run.attach(
        planned, position, packed_seq_params, model=model, vp_stage=vp_stage, learn=learn
    )


def sparse_balance_layer_spec(
    run: OwnLoopRun | HostRun, spec: Any = None, *, vp_stage: int | None = None
) -> Any:
    """The decoder's layer spec with core attention replaced; for ``GPTModel``.

    Args:
        spec: the trainer's own, left as it is: a ``ModuleSpec`` of a transformer layer, or
            ``TransformerBlockSubmodules``. None is what Megatron chooses for the model's config.
        vp_stage: model chunk, with virtual pipeline stages.

    Raises:
        ConfigError: if a layer has no core attention to replace.
    """
    return run.layer_spec(spec, vp_stage)


def wrap_forward_step(run: OwnLoopRun, forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """A forward step of planned, measured micro-batches around the trainer's own.

    Args:
        forward_step: ``(data_iterator, model) -> (output, loss_func)``. Its iterator yields one
            dict: ``tokens``, ``position_ids``, ``labels`` and ``loss_mask``, [1, tokens] or None on
            stages that read none, and ``packed_seq_params``, which the model must be given.
            ``loss_func(output)`` returns (sum of token losses, number of tokens, report).

    Returns:
        The ``forward_step_func`` of training steps. Evaluate with the trainer's own.
    """
    return run.wrap(forward_step)


def wrap_schedule(
    run: OwnLoopRun, forward_backward: Callable[..., list[dict[str, Any]]]
) -> Callable[..., list[dict[str, Any]]]:
    """The function of Megatron's ``get_forward_backward_func``, but steps that are planned in
    segments run in the plugin's schedule. Wrap it before :func:`train_data_iterator` is called.
    """
    return run.wrap_schedule(forward_backward)


def train_data_iterator(
    run: OwnLoopRun, *, consumed_samples: int = 0, vp_stage: int | None = None
) -> Iterator[Any]:
    """The ``data_iterator`` of training steps, for one model chunk; collective at the first call.

    It is endless: after the last sample of an epoch comes the first of the next.

    Args:
        consumed_samples: trained on before, a multiple of ``global_batch_size``.
        vp_stage: model chunk, with virtual pipeline stages.

    Raises:
        IntegrationError: if loaded state goes on from another sample, or steps may have segments
            and no schedule was wrapped.
        StateError: if no step begins there, or loaded state cannot be continued in this run.
    """
    return run.train_iterator(consumed_samples, vp_stage)


def on_step_end(run: OwnLoopRun | HostRun) -> dict[str, float]:
    """Learn from a training step; collective: once per step, on every rank, after the schedule.

    Returns:
        The step's figures, for the trainer's own log: name -> value, alike on all ranks.

    Raises:
        IntegrationError: if no whole step has run, or its model was not given the plugin's
            ``packed_seq_params``.
        PlanMismatchError: on all ranks alike, if they executed different plans.
    """
    return run.end_step()


def _flag_given() -> bool:
    """Megatron's parser reads the same words and accepts no abbreviations."""
    return flag_name("enabled") in sys.argv[1:]


def _print_on_first_rank(message: str) -> None:
    """Process groups do not exist yet; torchrun says which rank this is."""
    if os.environ.get("RANK", "0") == "0":
        print(message, flush=True)
