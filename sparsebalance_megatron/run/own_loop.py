# SPDX-License-Identifier: Apache-2.0
"""Runs of trainers that call Megatron's schedules themselves. Loads no ``megatron.training``.

Times come from hooks in the model's config, put there at the first forward. What belongs to the end
of a step happens in ``end_step``, which the trainer calls, and nowhere else. A host owns its data
as well: it plans (:attr:`HostRun.planner`), packs its sequences as planned, cuts this rank's part
of them (:meth:`HostRun.slice_of`), and lets :meth:`HostRun.attach` put budgets on them.

Shape legend: S samples, L layers, T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebalance_megatron.attention.host_copy import copied_to
from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.fit import with_measured_attention
from sparsebalance_megatron.learn.host_planner import HostJob, HostPlanner
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.megatron.compat import default_layer_spec, enable_variable_lengths
from sparsebalance_megatron.megatron.core_attention import AttentionOptions, replace_core_attention
from sparsebalance_megatron.megatron.hooks import use_true_positions
from sparsebalance_megatron.megatron.kept_attention import KeptAttention
from sparsebalance_megatron.megatron.kernel_check import KernelCheckError, check_kernels
from sparsebalance_megatron.megatron.packed_seq_params import (
    LayoutCache,
    micro_batch_context,
    packed_params,
)
from sparsebalance_megatron.megatron.segmented_schedule import ForwardBackward, with_segments
from sparsebalance_megatron.megatron.sequence_groups import data_parallel_group, data_parallel_size
from sparsebalance_megatron.megatron.settings import RunSettings, host_job, token_multiple
from sparsebalance_megatron.megatron.unsupported import (
    Settings,
    check_model,
    check_segments,
    check_sharing,
)
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan
from sparsebalance_megatron.run.agreement import (
    check_executed_plans,
    check_shared_plan,
    gather_or_raise,
    shown,
)
from sparsebalance_megatron.run.forward_step import ForwardStep
from sparsebalance_megatron.run.inputs import Inputs, read_inputs
from sparsebalance_megatron.run.micro_batches import MicroBatchIterator, SequencePacking
from sparsebalance_megatron.run.run import IntegrationError, Loop, Run
from sparsebalance_megatron.run.session import Session


class TrainerRun:
    """Base of such runs; ``grid`` has the budgets, in blocks, at which coverage is observed."""

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
        self._iterates = self._runs_segments = False

    @property
    def micro_batches(self) -> int:
        """``num_microbatches`` of every training step."""
        return self._session.inputs.job.micro_batches

    def wrap(self, forward_step: Callable[..., Any]) -> ForwardStep:
        """A forward step of planned micro-batches around the trainer's own."""
        return ForwardStep(
            forward_step, lambda: self._session.run, self._session.inputs, self._session.device
        )

    def wrap_schedule(self, forward_backward: ForwardBackward) -> ForwardBackward:
        """See :func:`.integration.wrap_schedule`."""
        self._runs_segments = True
        return with_segments(forward_backward)

    def train_iterator(self, consumed_samples: int, vp_stage: int | None) -> MicroBatchIterator:
        """See :func:`.integration.train_data_iterator`."""
        max_segments = self._session.inputs.policy.max_segments
        if max_segments > 1 and not self._runs_segments:
            raise IntegrationError(
                f"{flag_name('max_segments')} {max_segments}: Megatron's schedule runs none; "
                "call wrap_schedule before train_data_iterator"
            )
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
        """State for a checkpoint besides ``consumed_samples``; alike on all ranks."""
        return self._session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a :meth:`state_dict` before the iterator, which makes the first plan, is asked
        for."""
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
    check_segments(Settings(transformer_config, config))
    cp_size = transformer_config.context_parallel_size
    check_sharing(seq_length, config, context_parallel_size=cp_size)
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
    config: SparseBalanceConfig, device: torch.device, *, owns_data: bool = False
) -> SparseBalanceConfig:
    """The choices, turned on; refuses what the trainer's loop cannot follow."""
    for name, unusable, remedy in (
        ("dry_run", config.dry_run is not None, "dry-run sparsebalance_megatron.pretrain_gpt"),
        ("eval_attention", config.eval_attention != "sparse", "evaluate with a dense model"),
        ("max_segments", owns_data and config.max_segments > 1, "give 1"),
        ("device", config.device not in ("auto", device.type), "the model's device counts"),
        ("log_dir", owns_data and config.log_dir is not None, "log what on_step_end returns"),
    ):
        if unusable:
            flag = f"{flag_name(name)} {getattr(config, name)}"
            raise ConfigError(f"{flag}: not for a trainer with its own loop; {remedy}")
    if device.type == "cuda":
        config = with_measured_attention(config)
    return replace(config, enabled=True)


class HostRun(TrainerRun):
    """One run on one rank; see :mod:`sparsebalance_megatron.integration` for its life.

    It is the :class:`.run.Samples` of its own :class:`.run.Run`. ``job`` is what a planner in
    another process needs; ``planner`` knows what the steps of this run have taught.
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
        self.coverage = self.planner.coverage
        super().__init__(config, self.coverage.grid, transformer_config)
        self._config = config
        self._device = device
        self._boundaries = LayoutCache()
        self._attached: PlannedStep | None = None
        self._packing = SequencePacking.of_run(
            config,
            largest_cp_size=self.planner.max_cp_size,
            pad_to_multiple_of=token_multiple(transformer_config),
            neighbours_per_node=job.neighbours_per_node,
        )
        self._run = Run(job, self, Loop(), device, agreement=self._packing.agreement)

    def planned(self, step: int) -> PlannedStep:
        """The step that the host runs."""
        assert self._attached is not None, "attach has set it"
        return self._attached

    def plan_following(self, step: int) -> None:
        """The host asks for its next plan itself."""

    def finish_step(self, step: int, measured: StepMeasurement) -> None:
        """Learn from a step; losses are the host's, so all of its tokens count."""
        planned = self.planned(step)
        tokens = sum(micro_batch.tokens for micro_batch in planned.plan.micro_batches)
        self.planner.learn(planned, replace(measured, tokens=tokens))

    def plan_as_placed(
        self,
        lengths_tokens: Sequence[Sequence[int]],
        *,
        pinned_LS: np.ndarray | None = None,
    ) -> PlannedStep:
        """Budgets for a step whose samples the host has placed; collective over its data ranks.

        Every pipeline and tensor-parallel rank calls it with what its data-parallel rank runs.

        Args:
            lengths_tokens: of the samples of each of this rank's micro-batches, in order; as many
                micro-batches on all ranks. Context-parallel ranks give the same.
            pinned_LS: budgets that this rank's samples keep, in the same order; see
                :meth:`.HostPlanner.plan`.
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

    def slice_of(
        self,
        planned: PlannedStep,
        position: int,
        values: Mapping[str, Tensor],
        *,
        padding: float,
    ) -> dict[str, Tensor]:
        """See :func:`.integration.slice_of`."""
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

    def whole_of(
        self, planned: PlannedStep, position: int, values: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """See :func:`.integration.whole_of`."""
        micro_batch, _ = self._own(planned, position)
        held = replace(self._packing.held(micro_batch), device=self._device)
        return {name: held.whole(part)[: micro_batch.tokens] for name, part in values.items()}

    def _own(self, planned: PlannedStep, position: int) -> tuple[MicroBatchPlan, str]:
        """A micro-batch of this rank, and its place for messages."""
        step, rank = planned.plan.step, self._run.place.data_parallel_rank
        place = f"step {step}, rank {rank}, micro-batch {position}"
        ranks = planned.plan.data_parallel_size
        if ranks != self.job.data_parallel_size:
            raise IntegrationError(
                f"{place}: the plan is for {ranks} data-parallel ranks, the run has "
                f"{self.job.data_parallel_size}; plan with run.job"
            )
        own = planned.plan.for_rank(rank).micro_batches
        if not 0 <= position < len(own):
            raise IntegrationError(f"{place}: the plan has {len(own)} micro-batches for this rank")
        return own[position], place

    def attach(
        self,
        planned: PlannedStep,
        position: int,
        packed_seq_params: Any,
        *,
        model: Any,
        vp_stage: int | None,
        learn: bool,
    ) -> Any:
        """See :func:`.integration.attach`."""
        micro_batch, place = self._own(planned, position)
        agreement, step = self._packing.agreement, planned.plan.step
        if agreement is not None:
            if packed_seq_params is not None or model is None:
                raise IntegrationError(
                    f"{place}: ranks share micro-batches; give None as packed_seq_params and the "
                    "model, whose inputs slice_of cuts"
                )
            use_true_positions(model)
        context = micro_batch_context(
            micro_batch,
            self._packing.cu_seqlens(micro_batch)
            if packed_seq_params is None
            else self._checked_boundaries(packed_seq_params, micro_batch, place),
            block_size=self._config.block_size,
            observe=learn,
            device=self._device,
            step=step if learn else -1,
            position=position,
            chunk=vp_stage or 0,
            sequence=self._packing.slice(micro_batch),
        )
        if learn:
            self._run.check_ended(planned)
            self._attached = planned
            self._run.install(self._transformer_config)
            self._run.begin_micro_batch(context)
        elif agreement is not None and position == context.chunk == 0:
            # Every pass begins here; that of a training step is checked by its run.
            check_shared_plan(step, planned.plan.digest(), agreement)
        if packed_seq_params is None:
            longest_tokens = self.job.padded(self.job.max_sample_tokens)
            return packed_params(context, max_seqlen_tokens=longest_tokens, device=self._device)
        carrier = copy.copy(packed_seq_params)
        carrier.micro_batch, carrier.kept = context, KeptAttention(context.recompute)
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
        """See :func:`.integration.on_step_end`."""
        run = self._run
        problem = run.problem(
            "attach each micro-batch of the plan once per model chunk, on every pipeline stage",
            "what attach returns",
        )
        if problem is None and not run.timed:
            problem = (
                "on_step_end: no forward was timed; give begin_host_run the config object that the "
                "model holds"
            )
        digest = b"" if run.running is None else run.running.plan.digest()
        failing = check_executed_plans(problem is not None, digest, self._device)
        if failing:
            other = f"on_step_end: ranks {shown(failing)} have a problem of their own to report"
            raise IntegrationError(problem or other)
        return run.end_step()

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint; alike on all ranks, between a step's end and the next."""
        return self.planner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> tuple[str, ...]:
        """Take over a state between steps; see :meth:`.HostPlanner.load_state_dict`."""
        if self._run.seen:
            raise IntegrationError("load_state_dict: call it before a step's first micro-batch")
        return self.planner.load_state_dict(state)


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
        device: where the model runs; None is the current CUDA device.

    Raises:
        ConfigError, CostTableError: naming the field or file and the remedy.
        KernelCheckError: on all ranks alike, if a kernel is wrong on a rank's device.
    """
    device = device or torch.device(torch.cuda.current_device())
    config = trainer_config(config, device, owns_data=True)
    checked = copy.copy(transformer_config)
    checked.calculate_per_token_loss |= scales_own_loss
    check_model(checked, config)
    # Plans refuse samples above the cap, and placements that are given may hold them.
    cp_size = transformer_config.context_parallel_size
    check_sharing(0, config, context_parallel_size=cp_size)
    job = host_job(
        transformer_config,
        vocab_size=vocab_size,
        data_parallel_size=data_parallel_size() * cp_size,
        max_sample_tokens=max_sample_tokens,
        global_batch_size=global_batch_size,
        pad_samples_to=pad_samples_to,
        frozen_weights=frozen_weights,
    )
    dtype = str(transformer_config.params_dtype).removeprefix("torch.")
    gather_or_raise(lambda: check_kernels(config, job.shape, dtype, device), KernelCheckError)
    enable_variable_lengths(transformer_config)
    return HostRun(config, job, transformer_config, device)
