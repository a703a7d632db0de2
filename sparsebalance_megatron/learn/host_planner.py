# SPDX-License-Identifier: Apache-2.0
"""Plans the steps of a host, which gives their samples, and learns from what it measured."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.dense_length import check_dense_length, with_dense_length
from sparsebalance_megatron.cost.exchange import Exchange
from sparsebalance_megatron.cost.fit import configured_cost_model, without_warnings
from sparsebalance_megatron.cost.model import OF_MODEL_ATTENTION, CostModel
from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.step_planner import StepPlanner, kept_dense_length
from sparsebalance_megatron.plan.arrangement import Placement
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job, max_cp_size
from sparsebalance_megatron.plan.settings import PlanSettings


@dataclass(frozen=True, kw_only=True)
class HostJob:
    """A model and how it is trained; plain data, alike in all processes of a host.

    Attributes:
        layout: ranks and pipeline stages. Where a plan chooses the number of micro-batches, its
            ``micro_batches`` is not read.
        global_batch_size: samples of a training step, on average.
        pad_samples_to: tokens that the host pads every sample to a multiple of.
        recompute_all, recompute_attention: what backward computes again (Megatron's
            ``--recompute-granularity`` full, or selective with ``core_attn``).
        neighbours_per_node: ranks of a node that may share a micro-batch; tensor-parallel ranks lie
            in between.
        expert_parallel_size: ranks that divide the experts.
        takes_packed_sequences: whether the model's own attention does, as Transformer Engine's, and
            not Megatron's local one.
        frozen_weights: whether the model's own weights take no gradients, as beside low-rank
            adapters (LoRA).
    """

    layout: Job
    shape: ModelShape
    max_sample_tokens: int
    global_batch_size: int
    pad_samples_to: int = 1
    recompute_all: bool = False
    recompute_attention: bool = False
    neighbours_per_node: int = 8
    expert_parallel_size: int = 1
    frozen_weights: bool = False
    takes_packed_sequences: bool = True

    def __post_init__(self) -> None:
        for name, size in {
            "data_parallel_size": self.layout.data_parallel_size,
            "max_sample_tokens": self.max_sample_tokens,
            "global_batch_size": self.global_batch_size,
            "pad_samples_to": self.pad_samples_to,
            "neighbours_per_node": self.neighbours_per_node,
        }.items():
            if size < 1:
                raise ConfigError(f"host job: {name} {size}: must be at least 1")

    def padded(self, tokens: int) -> int:
        """Tokens of a sample where this host packs it."""
        return -(-tokens // self.pad_samples_to) * self.pad_samples_to

    def cost_model(self, config: SparseBalanceConfig, run: Mapping[str, Any]) -> CostModel:
        """The costs of this job: those of the configured table, else counted operations.

        ``run``: the device and dtype that a table must have been measured for; a process that only
        plans has neither.
        """
        cost = configured_cost_model(
            config, self.shape, run, expert_parallel_size=self.expert_parallel_size
        )
        if self.frozen_weights:
            cost = cost.with_frozen_weights()
        exchange = cost.exchange
        if not exchange.cp_size_slowness:  # none was measured
            exchange = exchange.in_nodes(self.neighbours_per_node)
        within, most_ranks = self._sharing(config)
        if not config.attends_by_lists:
            exchange = replace(exchange, heads_within=within)
        cost = replace(cost, exchange=exchange)
        # Others that are cut or shared run on kernels of this package; see SegmentCost.
        leaves = config.leaves_attention and exchange.heads_serve(most_ranks)
        counted = cost.efficiency
        own = counted is not None and counted.dense < OF_MODEL_ATTENTION and config.model_may_attend
        if self.takes_packed_sequences and (leaves or own):
            cost = cost.with_model_attention
        return cost.with_bandwidth(config.gigabytes_per_second).with_recompute(
            full=self.recompute_all,
            attention_only=self.recompute_attention,
        )

    def plan_settings(self, config: SparseBalanceConfig, micro_batch_tokens: int) -> PlanSettings:
        """What plans may do; ``micro_batch_tokens`` is the token cap of a micro-batch where the
        config names none."""
        cap_tokens = config.max_tokens_per_micro_batch or -(
            -micro_batch_tokens // self.layout.context_parallel_size
        )
        _, largest = self._sharing(config)
        return PlanSettings(
            config=config, max_tokens_per_micro_batch=cap_tokens, max_cp_size=largest
        )

    def _sharing(self, config: SparseBalanceConfig) -> tuple[int, int]:
        """Most ranks between which heads travel, and that share a micro-batch.

        Heads travel between all that share where they can, beyond a node, too: other ways are
        slower for dense documents. Only where they leave all attention to the model do they say how
        many share. Otherwise they travel within a node.
        """
        given, ranks = (
            (self.layout, config, self.neighbours_per_node),
            self.layout.data_parallel_size,
        )
        served = replace(Exchange.of(self.shape), heads_within=ranks)
        largest = max_cp_size(*given)
        if config.leaves_attention and served.heads_serve(most := max_cp_size(*given, served)):
            largest = most
        return ranks if served.heads_serve(largest) else self.neighbours_per_node, largest

    def coverage(self, config: SparseBalanceConfig) -> CoverageCurves:
        """Coverage curves that have observed nothing yet."""
        blocks = -(-self.padded(self.max_sample_tokens) // config.block_size)
        return CoverageCurves(self.layout.layers, blocks)


@dataclass(frozen=True, kw_only=True)
class PlannedLengths:
    """Who runs what in one step, and what that is predicted to take, in ms.

    Attributes:
        samples: [rank][micro-batch] -> numbers of its samples, in the order of running them.
        ms: of the step.
        by_tokens_ms: of the step whose micro-batches have equal tokens, as far as samples allow.
        lower_bound_ms: that no placement is faster than.
    """

    samples: tuple[tuple[tuple[int, ...], ...], ...]
    ms: float
    by_tokens_ms: float
    lower_bound_ms: float


def plan_lengths(
    lengths_tokens: Sequence[int],
    ranks: int,
    stages: int,
    model: ModelShape,
    *,
    layers: int,
    micro_batches: int | None = None,
    config: SparseBalanceConfig | None = None,
) -> PlannedLengths:
    """Place the samples of one step; needs neither torch nor Megatron.

    Args:
        ranks: data-parallel.
        stages: of the pipeline, over which layers are divided evenly.
        micro_batches: of every rank; None is the least number that the token cap allows.
        config: None is mode exact. ``max_tokens_per_micro_batch`` is the token cap, by default the
            tokens of the longest sample; without ``cost_table``, operations of ``counted_device``
            are counted.

    Raises:
        ConfigError, PlanError: naming the argument or the sample and the remedy.
    """
    config = config or SparseBalanceConfig.of_mode("exact")
    job = HostJob(
        layout=Job.even(layers=layers, ranks=ranks, stages=stages),
        shape=model,
        max_sample_tokens=int(max(lengths_tokens, default=1)),
        global_batch_size=len(lengths_tokens),
    )
    with without_warnings():
        cost = job.cost_model(config, {})
    own, by_tokens = (
        HostPlanner(each, job, cost=cost).plan(lengths_tokens, micro_batches=micro_batches).plan
        for each in (config, replace(config, batching="length"))
    )
    return PlannedLengths(
        samples=tuple(
            tuple(each.samples for each in own.for_rank(rank).micro_batches)
            for rank in range(ranks)
        ),
        ms=own.expectation.makespan_ms,
        by_tokens_ms=by_tokens.expectation.makespan_ms,
        lower_bound_ms=own.expectation.lower_bound_ms,
    )


class HostPlanner:
    """Plans from lengths alone; knows no data, no loop and no device, and loads no torch.

    A plan is a pure function of the arguments of :meth:`plan` and of what :meth:`learn` and
    :meth:`load_state_dict` were given, so every process that made the same calls makes the same
    plan. ``steps`` counts what has been learnt from, ``config`` are the choices with the length up
    to which documents are dense, ``step_planner`` plans for a number of micro-batches.

    Args:
        config: the plugin's choices.
        job: of the host: ``run.job`` of one of its ranks, or made where there is none.
        cost: of the job, recomputation included; None is :meth:`.HostJob.cost_model`.
        clock: seconds, for the time that planning takes.

    Raises:
        ConfigError, CostTableError: naming the field or file and the remedy.
    """

    def __init__(
        self,
        config: SparseBalanceConfig,
        job: HostJob,
        *,
        cost: CostModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        for name, without in (("max_segments", 1), ("dry_run", None), ("sensitivity", None)):
            if getattr(config, name) != without:
                raise ConfigError(
                    f"{flag_name(name)} {getattr(config, name)}: not where a host owns data and "
                    "loop; drop it"
                )
        if config.window > 1:
            raise ConfigError(
                f"{flag_name('window')} {config.window}: a host deals its own samples; give them "
                "in the order of sparsebalance_megatron.integration.window_places"
            )
        self.job = job
        cost = job.cost_model(config, {}) if cost is None else cost
        check_dense_length(config, job.max_sample_tokens)
        self._dense_by_costs = config.dense_up_to == "auto"
        config = with_dense_length(config, cost, job.padded(job.max_sample_tokens))
        self.coverage = job.coverage(config)
        self.step_planner = StepPlanner(
            job=job.layout,
            plan_settings=job.plan_settings(config, job.padded(job.max_sample_tokens)),
            cost=cost,
            coverage=self.coverage,
            dense_counted=self._dense_by_costs and cost.efficiency is not None,
            clock=clock,
        )
        self.steps = 0

    @property
    def config(self) -> SparseBalanceConfig:
        return self.step_planner.plan_settings.config

    def plan(
        self,
        lengths_tokens: Sequence[int],
        *,
        micro_batches: int | None = None,
        placement: Placement | None = None,
        pinned_LS: np.ndarray | None = None,
        step: int | None = None,
    ) -> PlannedStep:
        """Plan one step.

        Args:
            lengths_tokens: of its samples; the plan calls them 0 to S - 1.
            micro_batches: of every rank; None is the least number that the token cap allows, or,
                where the plan chooses positions, the number of the shortest step.
            placement: where the host has placed the samples, [rank][position] -> samples; the plan
                then only chooses budgets, and holds the host to no token cap. Ranks that Megatron's
                context parallelism groups count as one.
            pinned_LS: budgets that samples keep, such as ``StepPlan.budgets_LS`` of a plan that
                they were in before; a column of zeros leaves a sample's to the plan.
            step: named in messages; None is :attr:`steps`.

        Raises:
            PlanError: no plan exists, naming the sample or the number that does not fit.
        """
        lengths = self._padded_lengths(lengths_tokens)
        if placement is not None:
            micro_batches = micro_batches or max(map(len, placement), default=0)
        known = self.step_planner.knowledge()
        plan_settings = self.step_planner.plan_settings
        counts = self._micro_batch_counts(lengths, micro_batches)
        tried: list[Sequence[int]] = [counts]
        if micro_batches is not None:
            plan_settings = plan_settings.of_all_positions
        elif plan_settings.plans_positions(self.job.layout):
            # A plan for the most may have fewer; of those that share, only by halves.
            most = counts[-1:]
            tried = [most, counts] if plan_settings.max_cp_size > 1 else [(*most, *counts)]
        found, failures = [], []
        for some in tried:
            for count in some:
                try:
                    planned = self.step_planner.plan(
                        self.steps if step is None else step,
                        lengths,
                        replace(self.job.layout, micro_batches=count),
                        known,
                        placement=placement,
                        pinned_LS=None if pinned_LS is None else np.asarray(pinned_LS, np.int64),
                        plan_settings=plan_settings,
                    )
                except PlanError as error:
                    failures.append(error)
                else:
                    found.append(planned)
                    break
        if not found:
            raise failures[-1]
        return min(found, key=lambda planned: planned.plan.expectation.makespan_ms)

    def _padded_lengths(self, lengths_tokens: Sequence[int]) -> tuple[int, ...]:
        longest = self.job.max_sample_tokens
        for sample, tokens in enumerate(lengths_tokens):
            if not 1 <= tokens <= longest or tokens % 1:
                raise PlanError(
                    f"sample {sample} has {tokens} tokens, must have a whole number from 1 to "
                    f"max_sample_tokens {longest}; raise max_sample_tokens or leave the sample out"
                )
        return tuple(self.job.padded(int(tokens)) for tokens in lengths_tokens)

    def _micro_batch_counts(self, lengths: tuple[int, ...], given: int | None) -> range:
        """Numbers of micro-batches to try, the least first."""
        layout = self.job.layout
        ranks, multiple = layout.data_parallel_size, layout.micro_batches_multiple_of
        if given is not None:
            if given < 1 or given % multiple:
                raise PlanError(
                    f"{given} micro-batches: must be a multiple of the schedule's group of "
                    f"{multiple}"
                )
            return range(given, given + 1)
        plan_settings = self.step_planner.plan_settings
        sharing = plan_settings.max_cp_size
        largest = len(lengths) * sharing // (ranks * multiple) * multiple
        if largest < 1:
            raise PlanError(
                f"{len(lengths)} samples cannot fill {multiple} micro-batches on each of {ranks} "
                "ranks; give the step more samples"
            )
        least = -(-sum(lengths) // (ranks * plan_settings.max_tokens_per_micro_batch))
        smallest = min(-(-max(least, 1) // multiple) * multiple, largest)
        return range(smallest, largest + 1, multiple)

    def learn(self, planned: PlannedStep, measured: StepMeasurement) -> None:
        """Learn from a step of this planner, or of another that knew the same."""
        self.steps += 1
        self.step_planner.learn(planned, measured)

    def state_dict(self) -> dict[str, Any]:
        """State that later plans depend on besides lengths; plain Python types."""
        return self.step_planner.state_dict() | {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> tuple[str, ...]:
        """Take over the state of another planner of this model; see
        :meth:`.StepPlanner.load_state_dict`."""
        afresh = self.step_planner.load_state_dict(state)
        self.steps = int(state["steps"])
        flag, own = flag_name("dense_up_to"), self.config.dense_up_to_tokens
        planner, counted = self.step_planner, bool(state.get("dense_up_to_counted"))
        kept = kept_dense_length(state, planner.plan_settings, planner.cost)
        if self._dense_by_costs and counted and planner.cost.efficiency is None:
            saved = state["dense_up_to_tokens"]
            return (*afresh, f"{flag} is {own} by the cost table; {saved} was counted")
        if kept is None or kept == own:
            return afresh
        if not self._dense_by_costs:
            return (*afresh, f"{flag} is {own}, in the state {kept}")
        planner.plan_settings = planner.plan_settings.with_dense_length(kept)
        planner.dense_counted = counted
        return (*afresh, f"{flag} stays {kept}; by this job's costs it would be {own}")
