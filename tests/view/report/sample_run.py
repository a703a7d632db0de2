# SPDX-License-Identifier: Apache-2.0
"""Logs of a run that never ran: real plans, measured times drawn around the predicted ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from plan.plan_cases import flat

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.learn.prediction import prior_coverage
from sparsebalance_megatron.plan.coverage import CoverageCurves, length_bucket
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.pipeline.orders import schedule_name
from sparsebalance_megatron.plan.pipeline.simulator import Event, simulate
from sparsebalance_megatron.plan.planner import plan_step
from sparsebalance_megatron.plan.step_plan import PlanPolicy, StepPlan
from sparsebalance_megatron.plan.step_problem import PlanInputs
from sparsebalance_megatron.view.simulate.models import MODELS, counted_cost

BLOCK_SIZE, BASE_BUDGET, MAX_TOKENS = 256, 16, 32768
COST = counted_cost(MODELS["qwen2.5-0.5b"], block_size=BLOCK_SIZE)


@dataclass(frozen=True, kw_only=True)
class SampleRun:
    """A run's shape and what it does; ``write`` leaves its logs in a directory."""

    ranks: int = 2
    stages: int = 2
    virtual_stages: int = 1
    micro_batches: int = 4
    tensor_parallel: int = 1
    layers: int = 8
    steps: int = 10
    batching: str = "makespan"
    tuning: str = "makespan"
    noise: float = 0.04
    with_ranks: bool = True

    @property
    def job(self) -> Job:
        parts = np.array_split(np.arange(self.layers), self.stages * self.virtual_stages)
        return Job(
            data_parallel_size=self.ranks,
            micro_batches=self.micro_batches,
            stage_layers=tuple(
                tuple(
                    tuple(parts[chunk * self.stages + stage].tolist())
                    for chunk in range(self.virtual_stages)
                )
                for stage in range(self.stages)
            ),
        )

    def coverage(self) -> CoverageCurves:
        """The prior, a little steeper from layer to layer."""
        curves = prior_coverage(self.layers, MAX_TOKENS // BLOCK_SIZE)
        rise = np.linspace(0.6, 1.4, self.layers)[:, None, None]
        curves.mean_LUK = curves.mean_LUK**rise
        return curves

    def plan(self, step: int) -> StepPlan:
        generator = np.random.default_rng([step, 1])
        size = self.ranks * self.micro_batches
        drawn = np.exp(generator.normal(np.log(5000), 1.1, size))
        config = SparseBalanceConfig(
            block_size=BLOCK_SIZE,
            base_budget=BASE_BUDGET,
            batching=self.batching,
            tuning=self.tuning,
            coverage_target="threshold",
            plan_ms=0.5,
        )
        inputs = PlanInputs(
            lengths_tokens=tuple(int(n) for n in np.clip(drawn, 64, MAX_TOKENS)),
            job=self.job,
            policy=PlanPolicy.from_config(config, 2 * MAX_TOKENS),
            cost=COST,
            scales=StageScales.ones(self.stages, self.virtual_stages),
            coverage=self.coverage(),
        )
        return plan_step(step, inputs)

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        steps: list[dict[str, Any]] = [self.header()]
        by_rank: dict[int, list[dict[str, Any]]] = {}
        for tensor_rank in range(self.tensor_parallel):
            for d in range(self.ranks):
                for p in range(self.stages):
                    header = self.rank_header(d, p, tensor_rank)
                    by_rank[header["world_rank"]] = [header]
        clock_s = 1.7e9
        for iteration in range(1, self.steps + 1):
            plan = self.plan(iteration - 1)
            times = self.measured(plan)
            record = self.step_record(iteration, plan, *times)
            steps.append(record)
            if iteration == 2 or iteration % 10 == 2:
                steps.append(self.coverage_record(iteration))
            for records in by_rank.values():
                records.append(self.rank_record(records[0], iteration, plan, *times, clock_s))
            clock_s += 1.2e-3 * record["predicted"]["makespan_ms"]
        write_lines(directory / "steps.jsonl", steps)
        if self.with_ranks:
            (directory / "ranks").mkdir(exist_ok=True)
            for world_rank, records in by_rank.items():
                write_lines(directory / "ranks" / f"rank-{world_rank:05d}.jsonl", records)
        return directory

    def measured(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng([plan.step, 2])
        expected = plan.expectation
        return tuple(
            times * np.exp(generator.normal(0.0, self.noise, times.shape)) + 0.05
            for times in expected.times_2RPVM
        )  # type: ignore[return-value]

    def header(self) -> dict[str, Any]:
        return {
            "type": "run",
            "config": {
                "block_size": BLOCK_SIZE,
                "base_budget": BASE_BUDGET,
                "coverage_threshold": 0.1,
                "batching": self.batching,
                "tuning": self.tuning,
            },
            "cost_source": "a model of one GPU",
            "grid": list(self.coverage().grid),
            "counts": {"documents": 1},
            "stage_layers": self.job.stage_layers,
            "data_parallel_size": self.ranks,
            "pipeline_stages": self.stages,
            "virtual_stages": self.virtual_stages,
            "micro_batches": self.micro_batches,
            "layers": self.layers,
            "global_batch_size": self.ranks * self.micro_batches,
            "seq_length": MAX_TOKENS,
            "schedule": schedule_name(self.stages, self.virtual_stages),
            "megatron_core": "0.19.2",
            "torch": "2.15.0",
            "device": "a machine that never was",
        }

    def rank_header(self, d: int, p: int, tensor_rank: int) -> dict[str, Any]:
        return {
            "type": "rank",
            "world_rank": (p * self.ranks + d) * self.tensor_parallel + tensor_rank,
            "data_parallel_rank": d,
            "pipeline_rank": p,
            "tensor_parallel_rank": tensor_rank,
            "layers": [list(chunk) for chunk in self.job.stage_layers[p]],
            "host": f"node{p}",
        }

    def step_record(
        self, iteration: int, plan: StepPlan, forward: np.ndarray, backward: np.ndarray
    ) -> dict[str, Any]:
        expected = plan.expectation
        predicted: dict[str, Any] = {
            "makespan_ms": expected.makespan_ms,
            "lower_bound_ms": expected.lower_bound_ms,
            "rank_makespan_ms": list(expected.rank_makespan_ms),
            "rank_busy_ms": _busy(*expected.times_2RPVM),
            "work_ratio": expected.work_ratio,
            "forward_ms": expected.times_2RPVM[0].tolist(),
            "backward_ms": expected.times_2RPVM[1].tolist(),
            **dict.fromkeys(("samples_cut", "samples_raised", "samples_clamped"), 0),
            **dict.fromkeys(("imbalance_micro_batches", "imbalance_rank_sums"), 1.0),
            "imbalance_makespans": 1.0,
            "device_slowness": None,
        }
        schedule_ms = [
            max(event.end_ms for event in events) for events in self.events(forward, backward)
        ]
        return {
            "type": "step",
            "iteration": iteration,
            "iteration_ms": None if iteration == 1 else 1.1 * max(schedule_ms),
            "lm_loss": 2.0 + 8.0 / (1 + 0.2 * iteration),
            "plan_ms": 3.0,
            "host_ms": {"plan": 0.5},
            "plan_wait_ms": 0.5,
            "widths": None,
            "batching": plan.batching,
            "predicted": predicted,
            "measured": {
                "forward_ms": forward.tolist(),
                "backward_ms": backward.tolist(),
                "rank_busy_ms": _busy(forward, backward),
                "schedule_ms": [[ms] * self.stages for ms in schedule_ms],
                **dict.fromkeys(("imbalance_micro_batches", "imbalance_rank_sums"), 1.0),
            },
            "coverage": {
                "mean": expected.coverage_mean,
                "min": expected.coverage_min,
                "base_mean": min(1.0, (expected.coverage_mean or 0.0) + 0.02),
                "unobserved": 0,
            },
            "guarded_samples": 0,
            "tokens": sum(m.tokens for m in plan.micro_batches),
            "padded_tokens": 0,
            "recompute": {"kept": 0, "again": 0, "otherwise": 0},
        }

    def events(self, forward: np.ndarray, backward: np.ndarray) -> tuple[tuple[Event, ...], ...]:
        """What the ranks' pipelines "ran"."""
        return simulate(flat(np.stack([forward, backward])))

    def rank_record(
        self,
        header: dict[str, Any],
        iteration: int,
        plan: StepPlan,
        forward: np.ndarray,
        backward: np.ndarray,
        clock_s: float,
    ) -> dict[str, Any]:
        d, stage = header["data_parallel_rank"], header["pipeline_rank"]
        layers = [layer for chunk in header["layers"] for layer in chunk]
        events = self.events(forward, backward)[d]
        curves = self.coverage()
        micro_batches = []
        for position, micro_batch in enumerate(plan.for_rank(d).micro_batches):
            blocks_S = -(-np.array(micro_batch.lengths_tokens) // BLOCK_SIZE)
            coverage_LS = curves.coverage_LS(blocks_S, micro_batch.budgets_LS)[layers]
            micro_batches.append(
                {
                    "position": position,
                    "width": 1,
                    "member": 0,
                    "samples": [plan.step * 1000 + sample for sample in micro_batch.samples],
                    "lengths_tokens": list(micro_batch.lengths_tokens),
                    "budgets": micro_batch.budgets_LS[layers].tolist(),
                    "coverage": coverage_LS.mean(axis=0).round(5).tolist(),
                    "guarded": 0,
                }
            )
        start_s = 1e-3 * (0.3 * d + 0.1 * stage)
        return {
            "type": "step",
            "iteration": iteration,
            "schedule_start_unix_s": clock_s + start_s,
            "schedule_ms": max(event.end_ms for event in events),
            "micro_batches": micro_batches,
            "spans": [
                [
                    event.direction,
                    event.chunk,
                    event.micro_batch,
                    round(event.start_ms, 4),
                    round(event.end_ms, 4),
                ]
                for event in events
                if event.stage == stage
            ],
        }

    def coverage_record(self, iteration: int) -> dict[str, Any]:
        curves = self.coverage()
        seen = curves.mean_LUK.copy()
        rows: list[Any] = seen.round(5).tolist()
        for layer in rows:
            layer[0] = [None] * len(curves.grid)
        blocks = np.arange(1, curves.max_blocks + 1)
        return {
            "type": "coverage",
            "iteration": iteration,
            "grid": list(curves.grid),
            "bucket_blocks": [
                int(blocks[length_bucket(blocks) == bucket].max())
                for bucket in range(curves.buckets)
            ],
            "curves": rows,
        }


def write_lines(path: Path, records: Sequence[Any]) -> None:
    """One line per record; text is written as it is."""
    text = [each if isinstance(each, str) else json.dumps(each) for each in records]
    path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")


def _busy(forward_RPVM: np.ndarray, backward_RPVM: np.ndarray) -> list[float]:
    return (forward_RPVM + backward_RPVM).sum(axis=(2, 3)).max(axis=1).tolist()
