# SPDX-License-Identifier: Apache-2.0
"""Runs of hosts that own their data as well as their loop.

A host plans (:attr:`HostRun.planner`), cuts this rank's part of its sequences as planned
(:meth:`HostRun.cut`), and lets :meth:`HostRun.attach` put budgets on them.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebalance_megatron.attention.device import copied_to
from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.learn.host_planner import HostJob, HostPlanner
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.megatron.compat import enable_variable_lengths
from sparsebalance_megatron.megatron.core_attention import (
    replace_core_attention,
    sparse_balance_layer_spec,
)
from sparsebalance_megatron.megatron.kernel_check import KernelCheckError, check_kernels
from sparsebalance_megatron.megatron.packed_seq_params import LayoutCache, local_micro_batches
from sparsebalance_megatron.megatron.sequence_groups import (
    data_parallel_group,
    make_sequence_groups,
)
from sparsebalance_megatron.megatron.settings import dtype_name, host_job, token_multiple
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan
from sparsebalance_megatron.run.agreement import check_shared_plan, gather_or_raise, shown
from sparsebalance_megatron.run.inputs import attention_options, checked_config
from sparsebalance_megatron.run.micro_batches import SequencePacking
from sparsebalance_megatron.run.run import IntegrationError, Run


class HostRun:
    """One run on one rank of a host that owns its data; :func:`begin_host_run` makes it.

    ``job`` is what a planner in another process needs; ``planner`` knows what the steps of this run
    have taught.
    """

    def __init__(
        self,
        config: SparseBalanceConfig,
        job: HostJob,
        transformer_config: Any,
        device: torch.device,
    ) -> None:
        self.job = job
        self.planner = HostPlanner(config, job)
        planner = self.planner.step_planner
        settings, cost = planner.plan_settings, planner.cost
        self._options = attention_options(settings, planner.coverage.grid, cost)
        self._transformer_config = transformer_config
        self._device = device
        self._boundaries = LayoutCache()
        self._packing = SequencePacking(
            block_size=config.block_size,
            pad_to_multiple_of=token_multiple(transformer_config),
            groups=make_sequence_groups(settings.max_cp_size, heads=cost.exchange),
        )
        self._run = Run(
            *(job.layout, self.planner.coverage, self._learn, device),
            agreement=self._packing.agreement,
            leaves_attention=self._options.leaves_attention,
        )

    def _learn(self, planned: PlannedStep, measured: StepMeasurement) -> None:
        """Learn from a step; losses are the host's, so all of its tokens count."""
        tokens = sum(micro_batch.tokens for micro_batch in planned.plan.micro_batches)
        self.planner.learn(planned, replace(measured, tokens=tokens))

    def layer_spec(self, spec: Any = None, *, vp_stage: int | None = None) -> Any:
        """Give the decoder's layer spec; see :meth:`.TrainerRun.layer_spec`."""
        if spec is None:
            return sparse_balance_layer_spec(self._options)(self._transformer_config, vp_stage)
        return replace_core_attention(spec, self._options)

    def plan_as_placed(
        self,
        lengths_tokens: Sequence[Sequence[int]],
        *,
        pinned_LS: np.ndarray | None = None,
    ) -> PlannedStep:
        """Budgets for a step whose samples the host has placed; collective over its data ranks.

        Every pipeline, tensor-parallel and context-parallel rank calls it with what its
        data-parallel rank runs.

        Args:
            lengths_tokens: of the samples of each of this rank's micro-batches, in order; as many
                micro-batches on all ranks.
            pinned_LS: of this rank's samples in the same order; see :meth:`.HostPlanner.plan`.
        """
        group = data_parallel_group()
        own = [[int(length) for length in row] for row in lengths_tokens]
        if pinned_LS is None:
            pinned_LS = np.zeros((self.planner.coverage.layers, sum(map(len, own))), np.int64)
        everybody: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(everybody, (own, pinned_LS), group=group)
        gathered = [rows for rows, _ in everybody]
        lengths = [length for rank in gathered for row in rank for length in row]
        numbers = iter(range(len(lengths)))
        placement = tuple(
            tuple(tuple(next(numbers) for _ in row) for row in rank) for rank in gathered
        )
        pinned_LS = np.concatenate([pinned for _, pinned in everybody], axis=1)
        return self.planner.plan(lengths, placement=placement, pinned_LS=pinned_LS)

    def cut(
        self,
        planned: PlannedStep,
        position: int,
        values: Mapping[str, Tensor],
        *,
        padding: float = 0,
    ) -> dict[str, Tensor]:
        """Cut out the tokens of a micro-batch that this rank computes: all, or its part where ranks
        share it.

        Args:
            position: of the micro-batch among those of this data-parallel rank.
            values: name -> [tokens, ...], of the micro-batch's samples in the plan's order: inputs,
                labels, a loss mask, what else the loss needs. Shift labels before: a rank's tokens
                are not neighbours.
            padding: the value of tokens that are computed besides.

        Returns:
            name -> [tokens of this rank, ...], and ``position_ids``, which begin anew in every
            sample.

        Raises:
            IntegrationError: if there are more or fewer values than the samples have tokens.
        """
        micro_batch, place = self._own(planned, position)
        for name, values_T in values.items():
            if len(values_T) != micro_batch.tokens:
                raise IntegrationError(
                    f"{place}: {name} has {len(values_T)} tokens, the samples of the plan "
                    f"{micro_batch.tokens}; give a value for each, in the plan's order"
                )
        held = self._packing.held(micro_batch)
        cut = {name: held.cut(values_T, padding) for name, values_T in values.items()}
        return cut | {"position_ids": copied_to(held.positions_T, self._device)}

    def whole(
        self, planned: PlannedStep, position: int, values: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Put together what the model gives per token, log-probabilities say: the inverse of
        :meth:`cut`, collective over the ranks that share the micro-batch.

        Args:
            values: name -> [tokens of this rank, ...], padding included.

        Returns:
            name -> [tokens of the samples, ...], in the plan's order. A gradient flows through this
            rank's part alone. A loss from whole samples is computed on all of those ranks; count
            its value and its tokens on one.
        """
        micro_batch, _ = self._own(planned, position)
        held = replace(self._packing.held(micro_batch), device=self._device)
        return {name: held.whole(part)[: micro_batch.tokens] for name, part in values.items()}

    def _own(self, planned: PlannedStep, position: int) -> tuple[MicroBatchPlan, str]:
        """A micro-batch of this rank, and its place for messages."""
        step, rank = planned.plan.step, self._run.place.data_parallel_rank
        place = f"step {step}, rank {rank}, micro-batch {position}"
        ranks = planned.plan.data_parallel_size
        if ranks != self.job.layout.data_parallel_size:
            raise IntegrationError(
                f"{place}: the plan is for {ranks} data-parallel ranks, the run has "
                f"{self.job.layout.data_parallel_size}; plan with run.job"
            )
        own = planned.plan.for_rank(rank).micro_batches
        if not 0 <= position < len(own):
            raise IntegrationError(f"{place}: the plan has {len(own)} micro-batches for this rank")
        return own[position], place

    def attach(
        self,
        planned: PlannedStep,
        position: int,
        packed_seq_params: Any = None,
        *,
        model: Any = None,
        vp_stage: int | None = None,
        learn: bool = True,
    ) -> Any:
        """Give the ``PackedSeqParams`` of a micro-batch that carry its budgets, for the model.

        Called within the host's forward step, on every pipeline stage.

        Args:
            planned: the step, alike on all ranks.
            position: of the micro-batch among those of this data-parallel rank.
            packed_seq_params: None where :meth:`cut` cuts the model's inputs, which it must where
                ranks share micro-batches. Else those of the host's own sequence, in the thd layout,
                which are copied; its samples are those of the plan's micro-batch, in order, and
                what follows them is padding. The host waits for boundaries that are on the device.
            model: the chunk that runs; needed where ranks share micro-batches, to rotate by the
                true positions of a rank's tokens, and with expert parallelism, to measure own
                times: without it device speeds are not learnt.
            vp_stage: model chunk, with virtual pipeline stages.
            learn: whether the pass is part of a training step, measured and observed. A pass that
                is not executes the planned budgets as they are.

        Raises:
            IntegrationError: if the packed sequence is not that of the plan, or a step was not
                ended.
            PlanMismatchError: if ranks that may share micro-batches were given different plans.
        """
        plan, place = self._own(planned, position)
        agreement, step = self._packing.agreement, planned.plan.step
        if agreement is not None and (packed_seq_params is not None or model is None):
            raise IntegrationError(
                f"{place}: ranks share micro-batches; give None as packed_seq_params and the "
                "model, whose inputs cut cuts"
            )
        cu_seqlens = (
            self._packing.cu_seqlens(plan)
            if packed_seq_params is None
            else self._checked_boundaries(packed_seq_params, plan, place)
        )
        (micro_batch,) = local_micro_batches(
            plan,
            cu_seqlens,
            self._packing.slices(plan),
            block_size=self._packing.block_size,
            observe=learn,
            device=self._device,
            step=step if learn else -1,
            chunk=vp_stage or 0,
        )
        if learn:
            self._run.install(self._transformer_config, model)
        elif agreement is not None and position == micro_batch.chunk == 0:
            # Every pass begins here; that of a training step is checked by its run.
            check_shared_plan(step, planned.plan.digest(), agreement)
        params = self._run.begin_micro_batch(micro_batch, model, planned if learn else None)
        if packed_seq_params is None:
            return params
        carrier = copy.copy(packed_seq_params)
        carrier.micro_batch = micro_batch
        return carrier

    def _checked_boundaries(
        self, packed_seq_params: Any, micro_batch: MicroBatchPlan, place: str
    ) -> tuple[int, ...]:
        """Boundaries of the host's packed sequence, padding behind its samples included."""
        if packed_seq_params.qkv_format != "thd":
            raise IntegrationError(f"{place}: needs PackedSeqParams in the thd layout")
        # Where samples are padded, these are the places of their tokens.
        padded = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
        cu_seqlens = packed_seq_params.cu_seqlens_q if padded is None else padded
        boundaries = self._boundaries.boundaries_of(cu_seqlens)
        expected = (0, *accumulate(micro_batch.lengths_tokens))
        if boundaries[: len(expected)] != expected:
            given = np.diff(boundaries)[: len(micro_batch.samples)].tolist()
            raise IntegrationError(
                f"{place}: the sequence's samples have {shown(given)} tokens, those of the plan "
                f"{shown(micro_batch.lengths_tokens)}; pack the micro-batch's samples in its "
                "order, and give pad_samples_to if sequences pad every sample"
            )
        return boundaries

    def end_step(self) -> dict[str, float]:
        """Learn from a training step; see :meth:`.TrainerRun.end_step`."""
        return self._run.end_whole_step()

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint; alike on all ranks, between a step's end and the next."""
        return self.planner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> tuple[str, ...]:
        """Take over a state between steps; see :meth:`.HostPlanner.load_state_dict`."""
        if self._run.seen:
            raise IntegrationError("load_state_dict: call it before a step's first micro-batch")
        notes = self.planner.load_state_dict(state)
        self._options.config = self.planner.config
        return notes


def begin_host_run(
    config: SparseBalanceConfig,
    transformer_config: Any,
    *,
    vocab_size: int,
    max_sample_tokens: int,
    global_batch_size: int,
    pad_samples_to: int = 1,
    frozen_weights: bool = False,
    scales_own_loss: bool = False,
    lockstep_ranks: int | None = None,
    device: torch.device | None = None,
) -> HostRun:
    """Begin a run on a rank of a host that owns data and loop; once Megatron's groups exist.

    Args:
        config: the plugin's choices; ``enabled`` is taken for granted.
        transformer_config: the object that the model will hold, before the model is built. Its
            pipeline stages will exchange sequences of any length: ``variable_seq_lengths`` is set.
        vocab_size: rows of the embedding, padding included.
        max_sample_tokens: the longest sample.
        global_batch_size: samples of a training step, on average.
        pad_samples_to: tokens that the host's sequences pad every sample to a multiple of.
        frozen_weights: whether only adapters are trained, so that backward is shorter.
        scales_own_loss: whether the host's loss does not depend on which samples share a
            micro-batch, nor on which ranks hold their tokens, although the model's config does not
            set ``calculate_per_token_loss``.
        lockstep_ranks: neighbouring data-parallel and context-parallel ranks that begin every layer
            together; None is as many as Megatron's expert group has.
        device: where the model runs; None is the current CUDA device.

    Raises:
        ConfigError, CostTableError: naming the field or file and the remedy.
        KernelCheckError: on all ranks alike, if a kernel is wrong on a rank's device.
    """
    device = device or torch.device(torch.cuda.current_device())
    checked = copy.copy(transformer_config)
    checked.calculate_per_token_loss |= scales_own_loss
    # Plans refuse samples above the cap, and placements that are given may hold them.
    config = checked_config(config, checked, device, longest_tokens=0, owns_data=True)
    job = host_job(
        transformer_config,
        vocab_size=vocab_size,
        data_parallel_size=data_parallel_group().size() * transformer_config.context_parallel_size,
        max_sample_tokens=max_sample_tokens,
        global_batch_size=global_batch_size,
        pad_samples_to=pad_samples_to,
        frozen_weights=frozen_weights,
        lockstep_ranks=lockstep_ranks,
    )
    what = config, job.shape, dtype_name(transformer_config), device
    gather_or_raise(lambda: check_kernels(*what), KernelCheckError)
    enable_variable_lengths(transformer_config)
    return HostRun(config, job, transformer_config, device)
