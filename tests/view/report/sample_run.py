# SPDX-License-Identifier: Apache-2.0
"""Logs of a run that never ran: real plans, measured times drawn around the predicted ones."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from plan.pipeline.events import simulate
from plan.plan_cases import flat, job_shape
from predict.predict_cases import SHAPE
from record_cases import header_of
from step_cases import finished_step, step_measurement

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.model import CostModel, StageScales
from sparsebalance_megatron.learn.measurement import RankPlace, Span, StepTimes
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.log.records import (
    FinishedStep,
    RankStep,
    Record,
    encode,
    rank_header,
    rank_step,
    step_record,
)
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.planner import plan_step
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.step_plan import StepPlan
from sparsebalance_megatron.plan.step_problem import PlanInputs
from sparsebalance_megatron.predict.workload import prior_coverage

BLOCK_SIZE, MAX_TOKENS = 256, 32768


@dataclass(frozen=True, kw_only=True)
class SampleRun:
    """A run's shape and what it does; ``write`` leaves its logs in a directory."""

    ranks: int = 2
    stages: int = 2
    micro_batches: int = 4
    layers: int = 8
    steps: int = 10
    batching: str = "makespan"
    tuning: str = "raise"
    noise: float = 0.04

    @property
    def job(self) -> Job:
        layers = self.layers // self.stages
        return job_shape(self.ranks, self.micro_batches, self.stages, layers_per_chunk=layers)

    @property
    def choices(self) -> dict[str, Any]:
        own = {"batching": self.batching, "tuning": self.tuning}
        return own | {"block_size": BLOCK_SIZE, "base_budget": 16}

    def plan(self, step: int) -> StepPlan:
        generator = np.random.default_rng([step, 1])
        size = self.ranks * self.micro_batches
        drawn = np.exp(generator.normal(np.log(5000), 1.1, size)).clip(64, MAX_TOKENS)
        config = SparseBalanceConfig(**self.choices, plan_ms=0.5)
        inputs = PlanInputs(
            lengths_tokens=tuple(map(int, drawn)),
            job=self.job,
            plan_settings=PlanSettings(config=config, max_tokens_per_micro_batch=2 * MAX_TOKENS),
            cost=CostModel.analytic(SHAPE, BLOCK_SIZE),
            scales=StageScales.ones(self.stages, 1),
            coverage=prior_coverage(self.layers, MAX_TOKENS // BLOCK_SIZE),
        )
        return plan_step(step, inputs)

    def write(self, directory: Path) -> Path:
        steps = [self.finished(iteration) for iteration in range(1, self.steps + 1)]
        header = structs.replace(
            header_of(self.job), config=self.choices, device="a machine that never was"
        )
        _write(directory / "steps.jsonl", [header, *map(step_record, steps)])
        for number, (stage, rank) in enumerate(np.ndindex(self.stages, self.ranks)):
            place = RankPlace(
                data_parallel_rank=rank,
                pipeline_rank=stage,
                tensor_parallel_rank=0,
                world_rank=number,
                world_size=self.stages * self.ranks,
            )
            own = [self.rank_record(step, place) for step in steps]
            lines = [rank_header(place, self.job, f"node{stage}"), *own]
            _write(directory / f"ranks/rank-{number:05d}.jsonl", lines)
        return directory

    def finished(self, iteration: int) -> FinishedStep:
        plan = self.plan(iteration - 1)
        expected = plan.expectation
        generator = np.random.default_rng([plan.step, 2])
        noise = np.exp(generator.normal(0.0, self.noise, expected.times_2RPVM.shape))
        times_2RPVM = expected.times_2RPVM * noise + 0.05
        schedule_ms = [max(event.end_ms for event in ran) for ran in simulate(flat(times_2RPVM))]
        mean, ones_L = expected.coverage_mean or 0.0, np.ones(self.layers)
        measured = step_measurement(
            times_2RPVM,
            schedule_ms=np.repeat(np.array(schedule_ms)[:, None], self.stages, axis=1),
            counts_L=ones_L,
            executed_L=mean * ones_L,
            base_sum=self.layers * min(1.0, mean + 0.02),
            minimum=expected.coverage_min or 0.0,
        )
        tokens = sum(each.tokens for each in plan.micro_batches)
        planned = PlannedStep(
            plan=plan,
            samples=plan.step * 1000 + np.arange(self.ranks * self.micro_batches),
            scales=StageScales.ones(self.stages, 1),
            plan_ms=3.0,
            wait_ms=0.5,
        )
        return finished_step(
            planned,
            replace(measured, lm_loss=2.0 + 8.0 / (1 + 0.2 * iteration), tokens=tokens),
            iteration=iteration,
            iteration_ms=None if iteration == 1 else 1.1 * max(schedule_ms),
        )

    def rank_record(self, step: FinishedStep, place: RankPlace) -> RankStep:
        rank, stage = place.data_parallel_rank, place.pipeline_rank
        ran = simulate(flat(step.measured.times_2RPVM))[rank]
        finished = replace(
            step,
            times=StepTimes(
                schedule_ms=max(event.end_ms for event in ran),
                start_unix_s=1.7e9 + step.iteration + 1e-3 * (0.3 * rank + 0.1 * stage),
                spans=tuple(
                    Span(each.direction, each.chunk, each.micro_batch, each.start_ms, each.end_ms)
                    for each in ran
                    if each.stage == stage
                ),
            ),
        )
        return rank_step(finished, place, self.job)


def _write(path: Path, records: Sequence[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(encode, records)))


def write_lines(path: Path, records: Sequence[Any]) -> None:
    """One line per record; text is written as it is."""
    text = [each if isinstance(each, str) else json.dumps(each) for each in records]
    path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
