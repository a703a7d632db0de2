# SPDX-License-Identifier: Apache-2.0
"""Run training steps in the order, and the number of micro-batches, that their plans have.

:func:`as_planned` wraps the function that Megatron's ``get_forward_backward_func`` returns. A
plan may have fewer micro-batches than the batch sizes make, on all ranks alike; Megatron's schedule
then runs so many. Samples, learning rate and logs go on counting by the batch sizes, and the loss
is one of all tokens, so that only the balancing losses of experts that Megatron logs need scaling.

A step in which some micro-batch of some data-parallel rank has several segments, or whose job has
an order of its own, runs in :func:`run_in_order` on all ranks, which does for training what
Megatron's ``forward_backward_pipelining_without_interleaving`` does. Shapes follow from the plan,
so stages never send them, and the host never waits for a shape.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    deallocate_output_tensor,
    forward_step,
)
from megatron.core.utils import get_model_config

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.plan.pipeline.orders import Operation, PipelineOrder

ForwardBackward = Callable[..., list[dict[str, Any]]]
"""Megatron's function of keywords that runs all forwards and backwards of a step."""


class StepShape(NamedTuple):
    """What a data iterator knows of the next step; it yields segments in the sequence's order.

    ``micro_batches``: of every rank. ``order``: in which this rank's pipeline runs them; None is
    that of Megatron's schedule, which then runs the step. ``segment_tokens``: of each segment of
    each of this rank's micro-batches, padding included.
    """

    micro_batches: int
    order: PipelineOrder | None = None
    segment_tokens: Sequence[Sequence[int]] = ()


def as_planned(megatrons: ForwardBackward, *, segments: bool) -> ForwardBackward:
    """``megatrons``, but training steps run as their plans say, whose micro-batches may have
    ``segments``.

    Evaluation runs as Megatron says, and in one piece: no backward holds activations there.
    """

    @functools.wraps(megatrons)
    def forward_backward(**keywords: Any) -> list[dict[str, Any]]:
        if keywords.get("forward_only"):
            return megatrons(**keywords)
        iterators = keywords["data_iterator"]
        # The chunks of a rank walk through the same plans.
        iterator: Any = iterators[0] if isinstance(iterators, list) else iterators
        if getattr(iterator, "replaying", False):
            if segments:
                raise RuntimeError(
                    "Megatron runs a step with segments again, which cannot be; use "
                    "--sparse-balance-max-segments 1 to find the fault"
                )
            return _run(megatrons, len(iterator.saved_microbatches), keywords)
        # Megatron wraps iterators to run steps again.
        step: StepShape = getattr(iterator, "iterable", iterator).next_step()
        if step.order is None:
            return _run(megatrons, step.micro_batches, keywords)
        (model,) = keywords["model"] if isinstance(keywords["model"], list) else [keywords["model"]]
        return run_in_order(
            step.order,
            step.segment_tokens,
            forward_step_func=keywords["forward_step_func"],
            data_iterator=iterator,
            model=model,
            force_all_reduce=bool(keywords.get("force_all_reduce")),
        )

    return forward_backward


def _run(
    megatrons: ForwardBackward, micro_batches: int, keywords: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run a step of so many micro-batches in Megatron's schedule."""
    counted = keywords["num_microbatches"]
    if micro_batches == counted:
        return megatrons(**keywords)
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    metrics = get_moe_metrics_tracker().metrics
    before = {name: metric.values.clone() for name, metric in metrics.items()}
    reports = megatrons(**keywords | {"num_microbatches": micro_batches})
    # What experts add is divided by the number that the batch sizes make when Megatron logs it.
    for name, metric in metrics.items():
        earlier = before.get(name, 0.0)
        metric.values.sub_(earlier).mul_(counted / micro_batches).add_(earlier)
    return reports


def use_planned_schedule(*, segments: bool) -> None:
    """Have ``megatron.training``'s loop run steps as planned; once, before it trains."""
    from megatron.training import training

    inner = training.get_forward_backward_func

    def forward_backward_func(*arguments: Any, **keywords: Any) -> ForwardBackward:
        return as_planned(inner(*arguments, **keywords), segments=segments)

    training.get_forward_backward_func = forward_backward_func


def run_in_order(
    order: PipelineOrder,
    segment_tokens: Sequence[Sequence[int]],
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any],
    model: torch.nn.Module,
    force_all_reduce: bool = False,
) -> list[dict[str, Any]]:
    """Run the forwards and backwards of one step on this stage, and reduce gradients.

    Args:
        order, segment_tokens: see :class:`StepShape`; equal on all stages. Micro-batches run
            forward as the iterator yields them.
        forward_step_func: Megatron's forward step, called once per segment in the order of the
            sequence; its loss function returns a sum, a count of tokens and a report.
        model: this stage's only chunk.
        force_all_reduce: reduce gradients to all ranks, for Megatron's checks.

    Returns:
        The report of every segment on the last stage, else an empty list.
    """
    config = get_model_config(model)
    timers = config.timers
    if timers is not None:
        timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    stage = _Stage(order, segment_tokens, forward_step_func, data_iterator, model, config)
    # Gradients are reduced as the last backward makes them ready. With a grad_sync_func only the
    # first stage does so; others reduce all of them after it, in the pipeline's idle time.
    late = config.grad_sync_func is not None and not stage.is_first
    with contextlib.ExitStack() as no_sync:
        no_sync.enter_context((config.no_sync_func or contextlib.nullcontext)())
        stage.run(before_last_backward=(lambda: None) if late else no_sync.close)
    if late:
        config.grad_sync_func(model.parameters())
    if config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func(
            [model],
            stage.loss_tokens if config.calculate_per_token_loss else None,
            force_all_reduce=force_all_reduce,
        )
    if timers is not None:
        timers("forward-backward").stop()
    return stage.reports


class _Stage:
    """One stage's operations of one step, with the tensors that wait for their backward."""

    def __init__(
        self,
        order: PipelineOrder,
        segment_tokens: Sequence[Sequence[int]],
        forward_step_func: Callable[..., Any],
        data_iterator: Iterator[Any],
        model: torch.nn.Module,
        config: Any,
    ) -> None:
        self._forward_step_func = forward_step_func
        self._data_iterator, self._model, self._config = data_iterator, model, config
        self._segment_tokens = segment_tokens
        # The receiver knows every shape, so none is sent.
        known_shapes = copy.copy(config)
        known_shapes.variable_seq_lengths = False
        self._ranks = P2PCommunicator(
            pp_group=parallel_state.get_pipeline_model_parallel_group(), config=known_shapes
        )
        self.is_first, self._is_last = self._ranks.is_pp_first_stage, self._ranks.is_pp_last_stage
        self._order = order.by_stage[self._ranks.current_stage]
        self._awaiting_backward: dict[tuple[int, ...], tuple[Any, Any]] = {}
        self._forwards_run = 0
        self.loss_tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
        self.reports: list[dict[str, Any]] = []

    def run(self, *, before_last_backward: Callable[[], None]) -> None:
        """Run all operations, which end with a backward. What one gives leaves, and what the
        following one takes comes, before that begins: at once where both pass between the same two
        stages, so that neither stage waits for the other to receive."""
        received = self._ranks.recv_forward(self._shape(self._order[0]), self.is_first)
        for operation, following in zip(self._order, (*self._order[1:], None), strict=True):
            if following is None:
                before_last_backward()
            is_forward = operation.direction is Direction.FORWARD
            result = (self._forward if is_forward else self._backward)(operation, received)
            received = self._exchange(is_forward, result, following)
            if is_forward:
                deallocate_output_tensor(result, self._config.deallocate_pipeline_outputs)

    def _forward(self, operation: Operation, input_: Any) -> Any:
        """Run it; its hidden states, or the loss."""
        output, loss_tokens = forward_step(
            self._forward_step_func,
            self._data_iterator,
            self._model,
            sum(map(len, self._segment_tokens)),
            input_,
            self.reports,
            self._config,
            parallel_state.get_context_parallel_world_size(),
            is_first_microbatch=self._forwards_run == 0,
            current_microbatch=self._forwards_run,
            is_last_stage=self._is_last,
        )
        self.loss_tokens += loss_tokens
        self._forwards_run += 1
        self._awaiting_backward[operation[1:]] = input_, output
        return output

    def _backward(self, operation: Operation, gradient: Any) -> Any:
        """Run it; the gradient of what it received."""
        return backward_step(*self._awaiting_backward.pop(operation[1:]), gradient, self._config)

    def _exchange(self, is_forward: bool, result: Any, following: Operation | None) -> Any:
        """Send what an operation gave; what the following one takes."""
        ranks = self._ranks
        if following is None:
            return ranks.send_backward(result, self.is_first)
        shape, to_forward = self._shape(following), following.direction is Direction.FORWARD
        if is_forward and not to_forward:
            return ranks.send_forward_recv_backward(result, shape, self._is_last)
        if to_forward and not is_forward:
            return ranks.send_backward_recv_forward(result, shape, self.is_first)
        if is_forward:
            ranks.send_forward(result, self._is_last)
            return ranks.recv_forward(shape, self.is_first)
        ranks.send_backward(result, self.is_first)
        return ranks.recv_backward(shape, self._is_last)

    def _shape(self, operation: Operation) -> tuple[int, int, int]:
        """Shape of the hidden states between stages: (tokens of this rank, 1, hidden size)."""
        tokens = self._segment_tokens[operation.micro_batch][operation.segment]
        if self._config.sequence_parallel:
            tokens //= self._config.tensor_model_parallel_size
        return tokens, 1, self._config.hidden_size
