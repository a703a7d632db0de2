# SPDX-License-Identifier: Apache-2.0
"""A run on one rank of a host that owns its data and its loop. Loads no ``megatron.training``.

The host plans (:attr:`HostRun.planner`), packs its rows as planned, and lets :meth:`HostRun.attach`
put budgets on them; :meth:`HostRun.end_step` learns from what was measured.

Shape legend: S samples, L layers, P pipeline stages, V virtual stages, M micro-batches.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.learn.host_job import HostJob
from sparsebalance_megatron.learn.host_planner import HostPlanner
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.megatron.compat import default_layer_spec, enable_variable_lengths
from sparsebalance_megatron.megatron.core_attention import AttentionOptions, replace_core_attention
from sparsebalance_megatron.megatron.layout_cache import LayoutCache
from sparsebalance_megatron.megatron.packed_seq_params import MicroBatchContext, micro_batch_context
from sparsebalance_megatron.megatron.settings import host_job
from sparsebalance_megatron.megatron.timers import install_hooks
from sparsebalance_megatron.megatron.unsupported import check_model
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan
from sparsebalance_megatron.profiling.clocks import CudaEventClock, HostClock
from sparsebalance_megatron.training.data_iterator import LocalMicroBatch
from sparsebalance_megatron.training.observed_coverage import ObservedCoverage
from sparsebalance_megatron.training.own_loop import IntegrationError, NoTimers
from sparsebalance_megatron.training.run import backward_order, rank_place
from sparsebalance_megatron.training.step_monitor import step_figures
from sparsebalance_megatron.training.step_reducer import PlanMismatchError, StepReducer
from sparsebalance_megatron.training.timing import MicroBatchRecorder

_DIGEST_BYTES = 6


class HostRun:
    """One run on one rank; see :mod:`sparsebalance_megatron.integration` for its life.

    Attributes:
        job: of the host, as a planner in another process needs it.
        planner: knows what the steps of this run have taught.
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
        self._config = config
        self._transformer_config = transformer_config
        self._device = device
        self._place = rank_place()
        self._boundaries = LayoutCache()
        self._recorder = MicroBatchRecorder(
            HostClock() if device.type == "cpu" else CudaEventClock(),
            virtual_stages=len(job.stage_layers[0]),
            backward_order=partial(backward_order, job.layout(1), self._place.pipeline_rank),
        )
        self._reducer = StepReducer(
            job.layout(1),
            self._place,
            buckets=self.planner.coverage.buckets,
            grid_size=len(self.planner.coverage.grid),
            group=None,
            device=device,
        )
        self._begin_step()

    def _begin_step(self) -> None:
        self._planned: PlannedStep | None = None
        self._seen: list[tuple[LocalMicroBatch, MicroBatchContext]] = []
        self._recorder.begin_step()

    def layer_spec(self, spec: Any, vp_stage: int | None) -> Any:
        """``spec``, or Megatron's own for the model's config, with core attention replaced."""
        if spec is None:
            spec = default_layer_spec(self._transformer_config, vp_stage)
        grid = self.planner.coverage.grid
        return replace_core_attention(spec, AttentionOptions.from_config(self._config, grid))

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
                micro-batches on all ranks.
            pinned_LS: budgets that this rank's samples keep, in the same order; see
                :meth:`.HostPlanner.plan`.

        Raises:
            PlanError: on all ranks alike.
        """
        group = parallel_state.get_data_parallel_group()
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

    def attach(
        self,
        planned: PlannedStep,
        position: int,
        packed_seq_params: Any,
        *,
        vp_stage: int | None,
        learn: bool,
    ) -> Any:
        """See :func:`.integration.attach`."""
        step, rank = planned.plan.step, self._place.data_parallel_rank
        place = f"step {step}, rank {rank}, micro-batch {position}"
        ranks = planned.plan.data_parallel_size
        if ranks != self.job.data_parallel_size:
            raise IntegrationError(
                f"{place}: the plan is for {ranks} data-parallel ranks, the run has "
                f"{self.job.data_parallel_size}; plan with run.job"
            )
        run = planned.plan.for_rank(rank).micro_batches
        if not 0 <= position < len(run):
            raise IntegrationError(f"{place}: the plan has {len(run)} micro-batches for this rank")
        slot, chunk = run[position], vp_stage or 0
        boundaries = self._checked_boundaries(packed_seq_params, slot, place)
        context = micro_batch_context(
            slot,
            boundaries,
            block_size=self._config.block_size,
            observe=learn,
            device=self._device,
            step=step if learn else -1,
        )
        if learn:
            self._follow(planned, position, chunk, boundaries, slot, context)
        carrier = copy.copy(packed_seq_params)
        carrier.micro_batch = context
        return carrier

    def _checked_boundaries(
        self, packed_seq_params: Any, slot: MicroBatchPlan, place: str
    ) -> tuple[int, ...]:
        """Boundaries of the host's row, padding behind its samples included."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise IntegrationError(f"{place}: needs PackedSeqParams in the thd layout")
        # Where samples are padded, these are the places of their tokens.
        padded = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
        cu_seqlens = packed_seq_params.cu_seqlens_q if padded is None else padded
        boundaries = self._boundaries.boundaries_of(cu_seqlens)
        expected = (0, *accumulate(slot.lengths_tokens))
        if boundaries[: len(expected)] != expected:
            given = _lengths(boundaries)[: len(slot.samples)]
            raise IntegrationError(
                f"{place}: the row's samples have {_shown(given)} tokens, those of the plan "
                f"{_shown(slot.lengths_tokens)}; pack the slot's samples in its order, and give "
                "pad_samples_to if rows pad every sample"
            )
        return boundaries

    def _follow(
        self,
        planned: PlannedStep,
        position: int,
        chunk: int,
        boundaries: tuple[int, ...],
        slot: MicroBatchPlan,
        context: MicroBatchContext,
    ) -> None:
        """The forward of a training step begins: watch it, and keep its context."""
        config = self._transformer_config
        if config.timers is None:
            config.timers = NoTimers()
        if self._planned is None:
            self._planned = planned
            self._recorder.expect(planned.micro_batches)
        elif self._planned.plan.digest() != planned.plan.digest():
            raise IntegrationError(
                f"a micro-batch of step {planned.plan.step} begins, but on_step_end was not called "
                f"for step {self._planned.plan.step}, which another plan was made for; call it "
                "once per step on every rank"
            )
        install_hooks(config, self._recorder, lambda: None)
        self._recorder.bind_forward(chunk, position)
        micro_batch = LocalMicroBatch(
            step=planned.plan.step,
            position=position,
            chunk=chunk,
            training=True,
            plan=slot,
            cu_seqlens=boundaries,
            sequence=None,
            row=None,
        )
        self._seen.append((micro_batch, context))

    def end_step(self) -> dict[str, float]:
        """See :func:`.integration.on_step_end`."""
        self._recorder.wait()
        times = self._recorder.times()
        self._agree(self._problem(bool(times.spans)))
        assert self._planned is not None
        planned = self._planned
        measured = self._reducer.reduce(
            times=times,
            observed=ObservedCoverage.gather(self._seen),
            loss_and_tokens=None,
            recompute=self._recompute_totals(),
            digest=planned.plan.digest(),
        ).without_waiting(planned.plan.slots)
        planned_tokens = sum(slot.tokens for slot in planned.plan.slots)
        measured = replace(measured, tokens=planned_tokens)
        self.planner.learn(planned, measured)
        unobserved = {"unobserved": measured.coverage.unobserved}
        figures = step_figures(planned.plan.expectation, measured, unobserved)
        self._begin_step()
        return figures

    def _recompute_totals(self) -> torch.Tensor | None:
        """What recomputation did, summed over this rank's micro-batches."""
        counts = [context.recompute for _, context in self._seen]
        totals = [each.totals().to(self._device) for each in counts if each.again or each.changed]
        return torch.stack(totals).sum(dim=0) if totals else None

    def _problem(self, timed: bool) -> str | None:
        """What is wrong with the step as this rank ran it."""
        if self._planned is None:
            return "on_step_end: no micro-batch was attached since the last step"
        stage = self.job.stage_layers[self._place.pipeline_rank]
        expected = self._planned.micro_batches * len(stage)
        if len(self._seen) != expected:
            return (
                f"on_step_end after {len(self._seen)} micro-batches, expected {expected}: attach "
                "each of the plan's once per model chunk, on every pipeline stage"
            )
        blind = sum(
            len(context.observations) < len(stage[micro_batch.chunk])
            for micro_batch, context in self._seen
        )
        if blind:
            return (
                f"step {self._planned.plan.step}: {blind} of {expected} forward steps never "
                "reached the plugin's attention; build the model with sparse_balance_layer_spec "
                "and give it what attach returns"
            )
        if not timed:
            return (
                f"step {self._planned.plan.step}: no forward was timed; give begin_host_run the "
                "config object that the model holds"
            )
        return None

    def _agree(self, problem: str | None) -> None:
        """Fail on all ranks alike if one of them has a problem or executed another plan."""
        digest = b"" if self._planned is None else self._planned.plan.digest()[:_DIGEST_BYTES]
        own = torch.tensor(
            [int(problem is not None), int.from_bytes(digest, "big")], device=self._device
        )
        gathered = [torch.empty_like(own) for _ in range(self._place.world_size)]
        torch.distributed.all_gather(gathered, own)
        of_ranks = torch.stack(gathered).tolist()
        failing = [rank for rank, (failed, _) in enumerate(of_ranks) if failed]
        if failing:
            other = f"on_step_end: ranks {_shown(failing)} have a problem of their own to report"
            raise IntegrationError(problem or other)
        differing = [rank for rank, (_, of) in enumerate(of_ranks) if of != of_ranks[0][1]]
        if differing:
            raise PlanMismatchError(
                f"ranks {_shown(differing)} executed another plan than rank 0; make plans from the "
                "same lengths in the same order on all ranks, or on one that sends them"
            )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; alike on all ranks, between a step's end and the next."""
        return self.planner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> tuple[str, ...]:
        """Take over :meth:`state_dict` of an earlier run; see :meth:`.HostPlanner.load_state_dict`.

        Raises:
            IntegrationError: within a step.
            StateError: if it was written by another version.
        """
        if self._seen:
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
            pipeline stages will exchange rows of any length: ``variable_seq_lengths`` is set.
        vocab_size: rows of the embedding, padding included.
        max_sample_tokens: the longest sample.
        global_batch_size: samples of a training step, on average.
        pad_samples_to: tokens that the host's rows pad every sample to a multiple of.
        frozen_weights: whether only adapters are trained, so that backward is shorter.
        scales_own_loss: whether the host's loss does not depend on which samples share a
            micro-batch, although the model's config does not set ``calculate_per_token_loss``.
        device: where the model runs; None is the current CUDA device.

    Raises:
        ConfigError, CostTableError: naming the field or file and the remedy.
    """
    device = device or torch.device(torch.cuda.current_device())
    config = replace(config, enabled=True)
    for name, unusable, remedy in (
        ("log_dir", config.log_dir is not None, "log what on_step_end returns"),
        ("eval_attention", config.eval_attention != "sparse", "evaluate with a dense model"),
        ("device", config.device not in ("auto", device.type), "the model's device counts"),
    ):
        if unusable:
            flag = f"{flag_name(name)} {getattr(config, name)}"
            raise ConfigError(f"{flag}: not where a host owns data and loop; {remedy}")
    if transformer_config.context_parallel_size > 1:
        raise ConfigError(
            f"--context-parallel-size {transformer_config.context_parallel_size}: a host's rows "
            "lie on one rank each; use 1"
        )
    checked = copy.copy(transformer_config)
    checked.calculate_per_token_loss |= scales_own_loss
    check_model(checked, config)
    job = host_job(
        transformer_config,
        vocab_size=vocab_size,
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        max_sample_tokens=max_sample_tokens,
        global_batch_size=global_batch_size,
        pad_samples_to=pad_samples_to,
        frozen_weights=frozen_weights,
    )
    enable_variable_lengths(transformer_config)
    return HostRun(config, job, transformer_config, device)


def _lengths(boundaries: Sequence[int]) -> tuple[int, ...]:
    return tuple(end - start for start, end in pairwise(boundaries))


def _shown(values: Sequence[int]) -> str:
    listed = ", ".join(map(str, values[:8]))
    return f"{listed}, ..." if len(values) > 8 else listed
