# SPDX-License-Identifier: Apache-2.0
"""Reads and checks everything that a run needs, before anything is built."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.dense_length import with_dense_length
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.data.data_set import Split
from sparsebalance_megatron.data.samples import Blend, SampleIndex, open_samples, read_blends
from sparsebalance_megatron.learn.dealt_samples import DealtSamples
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.learn.step_planner import StepPlanner, kept_dense_length
from sparsebalance_megatron.megatron.compat import megatron_version
from sparsebalance_megatron.megatron.core_attention import AttentionOptions
from sparsebalance_megatron.megatron.settings import RunSettings, device_name
from sparsebalance_megatron.megatron.unsupported import check_model
from sparsebalance_megatron.plan.budgets.by_layer import with_layer_budgets
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.windows import Windows
from sparsebalance_megatron.predict.comparison import WINDOW_STEPS, even_stages, window_lines
from sparsebalance_megatron.predict.workload import Workload
from sparsebalance_megatron.selector_registry import POLICIES, SELECTORS

_LONGEST_VALUE = 80
"""Characters of a value in fingerprints; a longer one stands there as its digest."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of a run, alike on all ranks.

    Attributes:
        valid, test: None where the run does not evaluate on them.
        grid: budgets, in blocks, at which coverage is observed.
        dense_by_costs: whether costs decide up to which length documents are dense, unless a
            checkpoint has.
        layer_lines: how budgets follow from sensitivities, where a file of them is given.
        dealt: the order of training samples; None is that of arrival.
    """

    settings: RunSettings
    plan_settings: PlanSettings
    train: SampleIndex
    valid: SampleIndex | None
    test: SampleIndex | None
    grid: tuple[int, ...]
    cost: CostModel
    dense_by_costs: bool = False
    dense_counted: bool = False
    layer_lines: tuple[str, ...] = ()
    dealt: DealtSamples | None = None

    @property
    def config(self) -> SparseBalanceConfig:
        return self.plan_settings.config

    @property
    def job(self) -> Job:
        """The layout of the largest training step."""
        return self.settings.host_job.layout

    def with_kept_dense_length(self, state: Mapping[str, Any]) -> "Inputs":
        """These inputs, with the length that a saved state keeps, if it does and costs decide."""
        tokens = kept_dense_length(state, self.plan_settings, self.cost)
        if tokens is None or not self.dense_by_costs:
            return self
        return replace(
            self,
            plan_settings=self.plan_settings.with_dense_length(tokens),
            dense_counted=bool(state.get("dense_up_to_counted")),
        )

    def from_step(self, step: int, saved: Any = None, extra_steps: int = 0) -> "Inputs":
        """These inputs for a run that begins, or goes on, with a step, before which there were more
        iterations than steps; see :meth:`.DealtSamples.from_step`."""
        settings = self.settings
        if self.config.window == 1 and saved is None:
            return self
        dealt = DealtSamples.from_step(
            *(self.train, settings.batch_sizes, Windows.of(self.config, settings.seed)),
            step=step,
            warm_up_samples=settings.warm_up_samples,
            end_step=settings.train_iters and settings.train_iters - extra_steps,
            saved=saved,
        )
        return replace(self, dealt=dealt)

    def untrained(self) -> tuple[str, ...]:
        """Lines about training and validation samples without a trained token."""
        lines = [self.train.untrained()]
        if self.valid is not None and (of_validation := self.valid.untrained()):
            lines.append(f"validation: {of_validation}")
        return tuple(filter(None, lines))

    def uneven_stages(self) -> tuple[str, ...]:
        """A line about layers per stage that make up for the output head, where micro-batches may
        have segments, whose pipelines are short enough for it to show. Plans the first step a few
        times, or raises a :class:`.PlanError`."""
        if self.config.max_segments == 1:
            return ()
        stages = even_stages(self.workload(1))
        return () if stages is None else (str(stages),)

    def window_lines(self, extra_steps: int) -> tuple[str, ...]:
        """The iteration from which on samples change places, or what that would give. There were
        ``extra_steps`` more iterations than steps."""
        lines = window_lines(self.workload(WINDOW_STEPS))
        if self.dealt is None:
            return lines
        iteration, steps = self.dealt.begin + extra_steps + 1, self.config.window
        what = f"change places within {steps} steps" if steps > 1 else "keep their order of arrival"
        return (f"from iteration {iteration} on samples {what}", *lines)

    def workload(self, steps: int) -> Workload:
        """The first training steps in order of arrival: what later steps may be like, with windows
        as if the learning rate had no warm-up."""
        batches = first_batches(self.train, self.settings.batch_sizes.size_of(0), steps)
        return workload_of(self.settings, self.config, self.cost, batches)

    def scheduler(self) -> Scheduler:
        """Make the scheduler of a run that has observed nothing yet."""
        config, sizes = self.config, self.settings.batch_sizes
        planner = StepPlanner(
            job=self.job,
            plan_settings=self.plan_settings,
            cost=self.cost,
            coverage=self.settings.host_job.coverage(config),
            dense_counted=self.dense_counted,
        )
        ahead = config.planning == "ahead"
        worker = ThreadPoolExecutor(1, "sparse-balance-plan") if ahead else None
        index = self.dealt or self.train
        return Scheduler(planner, job=self.job, index=index, batch_sizes=sizes, worker=worker)

    def evaluation_scheduler(self, index: SampleIndex, training: Scheduler) -> Scheduler:
        """Make the scheduler of evaluation, with what the training run knows."""
        settings = self.settings
        batch_size = settings.evaluation_batch_size
        samples = settings.evaluation_micro_batch_size * settings.data_parallel_size
        micro_batches = batch_size // samples
        job = replace(self.job, micro_batches=micro_batches)
        dense = self.config.eval_attention == "dense"
        return training.for_evaluation(index, job, batch_size, dense=dense)

    def largest_evaluation_step(self, index: SampleIndex, training: Scheduler) -> PlannedStep:
        """The plan of the evaluation step with most tokens, among those of an epoch."""
        batch_size = self.settings.evaluation_batch_size
        steps = -(-index.counts.samples // batch_size)
        lengths = index.lengths_of(index.global_batch(0, steps * batch_size))
        largest = int(np.reshape(lengths, (steps, batch_size)).sum(axis=1).argmax())
        return self.evaluation_scheduler(index, training).planned(largest)


def attention_options(
    settings: PlanSettings, grid: tuple[int, ...], cost: CostModel
) -> AttentionOptions:
    """Options of the layers of a model that runs such plans."""
    config, most_ranks = settings.config, settings.max_cp_size
    leaves = config.leaves_attention and cost.exchange.heads_serve(most_ranks)
    return AttentionOptions(config, grid, leaves_attention=leaves, shares=most_ranks > 1)


def checked_config(
    config: SparseBalanceConfig,
    transformer_config: Any,
    device: torch.device,
    *,
    longest_tokens: int,
    owns_data: bool = False,
) -> SparseBalanceConfig:
    """The choices, turned on; refuses what the trainer's loop cannot follow, or the model.

    ``longest_tokens``: of a sample. ``owns_data``: whether the trainer is a host.
    """
    for name, unusable, remedy in (
        ("dry_run", config.dry_run is not None, "dry-run sparsebalance_megatron.pretrain_gpt"),
        ("eval_attention", config.eval_attention != "sparse", "evaluate with a dense model"),
        ("max_segments", owns_data and config.max_segments > 1, "give 1"),
        ("device", config.device not in ("auto", device.type), "the model's device counts"),
        ("log_dir", owns_data and config.log_dir is not None, "log what end_step returns"),
    ):
        if unusable:
            flag = f"{flag_name(name)} {getattr(config, name)}"
            raise ConfigError(f"{flag}: not for a trainer with its own loop; {remedy}")
    config = replace(config, enabled=True)
    check_model(transformer_config, config, longest_tokens)
    return config


def samples_of_split(
    settings: RunSettings,
    config: SparseBalanceConfig,
    blend: Blend | None,
    split: Split,
    *,
    lengths_only: bool = False,
) -> SampleIndex | None:
    """The samples of a split, or their lengths alone, from ``.idx`` files; None where it has
    none."""
    if blend is None:
        return None
    return open_samples(
        *(blend, split),
        max_tokens=settings.seq_length,
        overlong=config.overlong,
        seed=settings.seed,
        split_weights=settings.split,
        vocab_size=None if lengths_only else settings.host_job.shape.vocab_size,
        missing_loss_mask="train" if lengths_only else config.missing_loss_mask,
        lengths_only=lengths_only,
    )


def first_batches(index: SampleIndex, size: int, steps: int) -> tuple[tuple[int, ...], ...]:
    """Lengths of the samples of the first steps."""
    return tuple(
        tuple(index.lengths_of(index.global_batch(step * size, size)).tolist())
        for step in range(steps)
    )


def workload_of(
    settings: RunSettings,
    config: SparseBalanceConfig,
    cost: CostModel,
    batches: tuple[tuple[int, ...], ...],
) -> Workload:
    """Global batches of samples of these lengths on a run's job."""
    return Workload.of(
        settings.host_job,
        config,
        batches,
        cost=cost,
        micro_batch_size=settings.micro_batch_size,
        tied_embeddings=settings.tied_embeddings,
        sequence_parallel=settings.sequence_parallel,
        distributed_optimizer=settings.distributed_optimizer,
        sharded_parameters=settings.sharded_parameters,
        seed=settings.seed,
    )


def read_costs(settings: RunSettings, config: SparseBalanceConfig, device_type: str) -> CostModel:
    """Read the cost table, which must be of ``device_type``, or count."""
    job = settings.host_job
    run = {"dtype": settings.dtype}
    if config.dry_run is None:  # else not necessarily where training will run
        run["device"] = device_name(device_type)
    return job.cost_model(config, run)


def read_inputs(settings: RunSettings, config: SparseBalanceConfig, device_type: str) -> Inputs:
    """Read the index and the cost table, which must be of ``device_type``, and lay out the job."""
    blends = read_blends(settings.data_flags)
    if blends["train"] is None:
        raise ConfigError("no --train-data-path: nothing to train on; give its data sets")
    train = samples_of_split(settings, config, blends["train"], "train")
    if train is None:
        raise ConfigError(f"--split {settings.split}: no document is left for training")
    valid = test = None
    if settings.eval_iters:
        valid = samples_of_split(settings, config, blends["valid"], "valid")
        test = samples_of_split(settings, config, blends["test"], "test")
        if valid is None:
            given = (
                f"with --split {settings.split}: no document is left for validation; give it a "
                "weight"
                if blends["valid"]
                else "without --valid-data-path: there is nothing to validate on; give it"
            )
            raise ConfigError(f"--eval-iters {settings.eval_iters} {given}, or use --eval-iters 0")
    lengths_tokens = train.lengths_of(np.arange(train.counts.samples))
    job, cost = settings.host_job, read_costs(settings, config, device_type)
    dense_by_costs = config.dense_up_to == "auto"
    config = with_dense_length(config, cost, job.max_sample_tokens)
    config, layer_lines = with_layer_budgets(config, job.layout, lengths_tokens, cost)
    return Inputs(
        settings=settings,
        plan_settings=job.plan_settings(config, settings.micro_batch_size * job.max_sample_tokens),
        train=train,
        valid=valid,
        test=test,
        grid=job.coverage(config).grid,
        cost=cost,
        dense_by_costs=dense_by_costs,
        dense_counted=dense_by_costs and cost.efficiency is not None,
        layer_lines=layer_lines,
    ).from_step(0)


def fingerprint(inputs: Inputs) -> dict[str, str]:
    """Facts that all ranks must share for their plans to agree: flag or file -> value or digest."""
    flags = {
        f"flag {name}": str(value)
        for name, value in asdict(inputs.config).items()
        if name not in ("log_dir", "cost_table")
    }
    # A blend's share to as many digits as weights have.
    sources = {
        f"source {number}": f"{Path(source.prefix).name}, weight {weight:.9g}, samples "
        f"{source.digest[:16]}"
        for number, (source, weight) in enumerate(inputs.train.sources, start=1)
    }
    others = {
        "job shape": str(inputs.job),
        "pipeline order": getattr(inputs.job.order, "__qualname__", str(inputs.job.order)),
        "ranks that may share a micro-batch": str(inputs.plan_settings.max_cp_size),
        "training samples": inputs.train.digest(),
        "cost model": str(inputs.cost),
        "selector of another package": SELECTORS.source_of(inputs.config.selection) or "none",
        "policy of another package": POLICIES.source_of(inputs.config.tuning) or "none",
        "megatron-core": megatron_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "scipy": version("scipy"),
    }
    return {
        name: value
        if len(value) <= _LONGEST_VALUE
        else f"digest {hashlib.sha256(value.encode()).hexdigest()[:12]}"
        for name, value in (flags | sources | others).items()
    }
