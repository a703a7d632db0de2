# SPDX-License-Identifier: Apache-2.0
"""Jobs, cost models and curves that several tests plan with."""

import itertools
from dataclasses import fields, replace

import numpy as np

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.model import CostModel, Direction, Part, StageScales
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.budgets.policy import step_problem
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.orders import megatron_order, most_tokens_in_flight
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms, operations_through_ms
from sparsebalance_megatron.plan.planner import plan_step
from sparsebalance_megatron.plan.segments import joined_2UP
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.step_costs import step_costs
from sparsebalance_megatron.plan.step_plan import StepPlan
from sparsebalance_megatron.plan.step_problem import PlanInputs

DEFAULT_TUNING = SparseBalanceConfig.tuning

FORWARD_MS = {
    Part.ATTENTION: (0.02, 0.005, 2e-5, 2.5e-3, 0.0),
    Part.DENSE_ATTENTION: (0.02, 0.004, 1e-5, 0.0, 1.5e-3),
    Part.ROUTER: (0.01, 0.002, 1e-6, 0.0, 1e-5),
    Part.LINEAR: (0.05, 0.0, 2e-4, 0.0, 0.0),
    Part.EMBEDDING: (0.01, 0.0, 1e-5, 0.0, 0.0),
    Part.HEAD: (0.1, 0.0, 1e-3, 0.0, 0.0),
}


def cost_model(block_size=64):
    cost = CostModel(block_size=block_size, ms_per_unit={}, source="test")
    for part, forward_ms in FORWARD_MS.items():
        cost = with_part(cost, forward_ms, part)
    return cost


def job_shape(ranks, micro_batches, stages=1, chunks=1, layers_per_chunk=2):
    return Job(
        data_parallel_size=ranks,
        micro_batches=micro_batches,
        stage_layers=tuple(
            tuple(
                tuple(
                    range(
                        (v * stages + p) * layers_per_chunk, (v * stages + p + 1) * layers_per_chunk
                    )
                )
                for v in range(chunks)
            )
            for p in range(stages)
        ),
    )


def plan_settings(**changes):
    values = {
        "batching": "makespan",
        "tuning": DEFAULT_TUNING,
        "coverage_threshold": 0.1,
        "base_budget": 8,
        "block_size": 64,
        "max_tokens_per_micro_batch": 1 << 40,
        "plan_ms": 20.0,
        "context_parallel": "static",
        "segment_tokens": 1,
        "dense_up_to": 0,
        "positions": "fixed",
    }
    return changed_settings(None, **values | changes)


def changed_settings(settings, **changes):
    """Other settings, or new ones: fields of the configuration, and limits of a job."""
    names = [each.name for each in fields(PlanSettings) if each.name != "config"]
    limits = {name: changes.pop(name) for name in names if name in changes}
    if settings is None:
        return PlanSettings(config=SparseBalanceConfig(**changes), **limits)
    return replace(settings, config=replace(settings.config, **changes), **limits)


def coverage_curves(layers, max_blocks=2048, *, seed=0, observed=1.0):
    """Random non-decreasing curves, the first step often too small for concavity."""
    generator = np.random.default_rng(seed)
    curves = CoverageCurves(layers, max_blocks, 0.9)
    sharpness = generator.uniform(0.5, 6.0, (*curves.observed_LU.shape, 1))
    rises = generator.random(curves.mean_LUK.shape) / np.arange(1, len(curves.grid) + 1) ** (
        sharpness / 3
    )
    values = np.cumsum(rises, axis=-1) / rises.sum(axis=-1, keepdims=True)
    counts = generator.random(curves.observed_LU.shape) < observed
    curves.observe(values * counts[..., None], counts)
    return curves


def random_lengths(count, seed, *, longest=2**17, kind="spread"):
    generator = np.random.default_rng(seed)
    match kind:
        case "spread":
            lengths = np.exp(generator.uniform(0, np.log(longest), count)).astype(int).clip(1)
        case "equal":
            lengths = np.full(count, 3000)
        case "long":
            lengths = np.r_[longest, generator.integers(1, 200, count - 1)]
        case "tiny":
            lengths = np.ones(count, dtype=int)
        case _:
            raise ValueError(kind)
    return generator.permutation(lengths).tolist()


def step_inputs(
    job, lengths, seed=0, *, cost=None, slowness_RP=None, max_blocks=2048, observed=1.0, **changes
):
    """Inputs of a plan, by name; the changes are of settings."""
    ones_2PV = np.ones((2, job.pipeline_stages, job.virtual_stages))
    return {
        "lengths_tokens": (*lengths,),
        "job": job,
        "plan_settings": plan_settings(**{"max_cp_size": job.context_parallel_size} | changes),
        "cost": cost or cost_model(),
        "scales": StageScales.of(ones_2PV, slowness_RP),
        "coverage": coverage_curves(job.layers, max_blocks, seed=seed, observed=observed),
    }


def changed(inputs, **changes):
    """Inputs of a plan with other settings."""
    return inputs | {"plan_settings": changed_settings(inputs["plan_settings"], **changes)}


def planned(step=0, **inputs):
    """A plan; the lengths may be a list."""
    return plan_step(step, PlanInputs(**inputs | {"lengths_tokens": (*inputs["lengths_tokens"],)}))


def problem_of(inputs):
    """The problem that inputs of a plan pose."""
    return step_problem(PlanInputs(**inputs))


def planned_no_slower(given, *others):
    """The plan of these inputs: always the same one, above its bound, no slower than those of other
    settings, and with no less coverage than at fixed budgets."""
    plan = planned(**given)
    assert plan.digest() == planned(**given).digest()
    expected = plan.expectation
    assert expected.lower_bound_ms <= expected.makespan_ms * (1 + 1e-9)
    for changes in others:
        other = planned(**changed(given, **changes)).expectation
        assert expected.makespan_ms <= other.makespan_ms * (1 + 1e-8), changes
        assert other.lower_bound_ms <= other.makespan_ms * (1 + 1e-9)
        if changes == {"tuning": "off"} and expected.coverage_mean is not None:
            assert expected.coverage_mean >= other.coverage_mean - 1e-9
    return plan


def check_segment_ms(plan):
    """Segments of a rank add up to its micro-batches."""
    expected = plan.expectation
    for rank, ms_2PU in enumerate(expected.segment_ms):
        segments_M = [micro_batch.segments for micro_batch in plan.for_rank(rank).micro_batches]
        ms_2PM = np.add.reduceat(ms_2PU, np.cumsum([0, *segments_M[:-1]]), axis=2)
        np.testing.assert_allclose(ms_2PM, expected.times_2RPVM[:, rank, :, 0], rtol=1e-12)


def with_part(cost, forward_ms, part=Part.EXPERTS):
    """A cost model with a part whose backward takes twice as long."""
    both = forward_ms, tuple(2 * ms for ms in forward_ms)
    rows = {(part, direction): row for direction, row in zip(Direction, both, strict=True)}
    return replace(cost, ms_per_unit=cost.ms_per_unit | rows)


def costs_without_constants(job, samples):
    """Costs of samples alone: micro-batches and sequences cost nothing."""
    scales = StageScales.ones(job.pipeline_stages, job.virtual_stages)
    costs = step_costs([1] * samples, job, cost_model(), scales)
    nothing_2CF = np.zeros_like(costs.layer_2CF)
    nothing = dict.fromkeys(("layer_2CF", "outside_2CF", "experts_2CF"), nothing_2CF)
    return replace(costs, **nothing)


def placed(micro_batch_of_S, job, cp_sizes_RM=None):
    """Samples at places ``rank * M + position``, by default with no shared micro-batches."""
    ranks, positions = job.data_parallel_size, job.micro_batches
    samples = [[[] for _ in range(positions)] for _ in range(ranks)]
    for sample, place in enumerate(micro_batch_of_S):
        samples[place // positions][place % positions].append(sample)
    return Arrangement(
        samples=tuple(tuple(tuple(each) for each in rank) for rank in samples),
        cp_sizes_RM=np.ones((ranks, positions), int) if cp_sizes_RM is None else cp_sizes_RM,
    )


def flat(times_2RPVM, schedule=megatron_order, cp_sizes_RM=None):
    """Times of operations, from those of micro-batches, by default not shared by ranks."""
    _, ranks, _, _, positions = times_2RPVM.shape
    cp_sizes_RM = np.ones((ranks, positions), int) if cp_sizes_RM is None else cp_sizes_RM
    return OperationTimes.of_micro_batches(times_2RPVM, cp_sizes_RM, schedule)


def makespans_of_cuts(pipelines):
    """[R] ms until each pipeline ends, of micro-batches or rows in segments, in order."""
    segments_RM = [[len(cut.tokens_U) for cut in cuts] for cuts in pipelines]
    ms_2UP = joined_2UP(itertools.chain.from_iterable(pipelines))
    return makespans_ms(OperationTimes.of_segments(segments_RM, ms_2UP))


def longest_through(times):
    """[R, P, V, M] ms of the longest chain through either operation of each micro-batch."""
    through_2PVMR = operations_through_ms(times).reshape(*times.graph.shape_2PVM, -1)
    return np.moveaxis(through_2PVMR.max(axis=0), -1, 0)


def random_cp_sizes(ranks, positions, most_ranks, seed):
    """[ranks, positions] of aligned powers of two."""
    generator = np.random.default_rng(seed)
    cp_sizes = np.ones((ranks, positions), int)
    for m in range(positions):
        rank = 0
        while rank < ranks:
            able = [
                w for w in (1, 2, 4, 8) if w <= most_ranks and rank % w == 0 and rank + w <= ranks
            ]
            cp_size = int(generator.choice(able))
            cp_sizes[rank : rank + cp_size, m] = cp_size
            rank += cp_size
    return cp_sizes


def shared_times(shape, cp_sizes_RM, seed):
    """[2, R, P, V, M] of (ranks, positions, stages, chunks), equal where ranks share a position."""
    ranks, positions, stages, chunks = shape
    times = np.random.default_rng(seed).uniform(0.1, 5.0, (2, ranks, stages, chunks, positions))
    first_RM = np.arange(ranks)[:, None] - np.arange(ranks)[:, None] % cp_sizes_RM
    for m in range(positions):
        times[..., m] = times[..., m][:, first_RM[:, m]]
    return times


def tokens_in_flight(plan: StepPlan, rank: int, block_size: int, stages: int) -> float:
    """Most tokens of a rank's first stage whose backward has not ended."""
    own = plan.for_rank(rank).micro_batches
    tokens_U = np.concatenate([each.segment_tokens(block_size) / each.cp_size for each in own])
    order = plan.schedule_of(rank)(stages, len(own), 1)
    return float(most_tokens_in_flight(order, tokens_U)[0])
