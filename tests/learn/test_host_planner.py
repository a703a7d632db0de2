# SPDX-License-Identifier: Apache-2.0
"""Planning as a library: no data, no loop, no torch; given placements and pinned budgets."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from harness import REPOSITORY
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_cases import cost_model, coverage_curves, job_shape, random_lengths
from step_cases import SHAPE, step_measurement

from sparsebalance_megatron import __version__
from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig
from sparsebalance_megatron.cost.model import DEFAULT_EFFICIENCY
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.layer_budgets import ALL_DENSE
from sparsebalance_megatron.learn import planned_step
from sparsebalance_megatron.learn.host_planner import HostJob, HostPlanner, plan_lengths
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.step_planner import StateError

BLOCK = 64
LONGEST = 8192


def host_job(
    ranks: int = 2, stages: int = 1, chunks: int = 1, layout: Any = None, **changes: Any
) -> HostJob:
    return HostJob(
        **{
            "layout": replace(job_shape(ranks, 1, stages, chunks), **layout or {}),
            "shape": SHAPE,
            "max_sample_tokens": LONGEST,
            "global_batch_size": 16,
        }
        | changes
    )


def planner(
    job: HostJob | None = None, *, observed: bool = True, counted: bool = False, **choices: Any
) -> HostPlanner:
    values = {"block_size": BLOCK, "base_budget": 8, "plan_ms": 5.0, **choices}
    cost = replace(cost_model(BLOCK), efficiency=DEFAULT_EFFICIENCY if counted else None)
    made = HostPlanner(SparseBalanceConfig(**values), job or host_job(), cost=cost)
    if observed:
        state = made.state_dict()
        curves = coverage_curves(made.coverage.layers, made.coverage.max_blocks)
        made.load_state_dict(state | {"coverage": curves.state_dict()})
    return made


def lengths(count: int = 16, seed: int = 0) -> list[int]:
    return random_lengths(count, seed, longest=LONGEST)


def measurement(planned: Any, curves: Any) -> StepMeasurement:
    """A step that took longer than predicted and lost a little coverage."""
    layers, buckets, grid = curves.mean_LUK.shape
    return step_measurement(
        planned.times_2RPVM * 1.5,
        sums_LUK=np.linspace(0.3, 1.0, grid) * np.ones((layers, buckets, 1)),
        counts_LU=np.ones((layers, buckets)),
        executed_L=np.full(layers, 0.5),
        base_sum=0.52 * layers,
    )


@given(
    seed=st.integers(0, 1000),
    count=st.integers(4, 40),
    ranks=st.sampled_from([1, 2, 4]),
    stages=st.sampled_from([1, 2]),
    chunks=st.sampled_from([1, 2]),
)
def test_every_sample_is_placed_once_under_the_cap(
    seed: int, count: int, ranks: int, stages: int, chunks: int
) -> None:
    multiple = stages if chunks > 1 else 1
    job = host_job(ranks, stages, chunks)
    tokens = lengths(max(count, ranks * multiple), seed)
    plan = planner(job).plan(tokens).plan
    assert sorted(
        sample for micro_batch in plan.micro_batches for sample in micro_batch.samples
    ) == [*range(len(tokens))]
    counts = {len(plan.for_rank(rank).micro_batches) for rank in range(ranks)}
    assert len(counts) == 1 and counts.pop() % multiple == 0
    assert all(micro_batch.tokens <= LONGEST for micro_batch in plan.micro_batches)


def test_no_fewer_micro_batches_would_do() -> None:
    """Two ranks with six samples of three fifths of the cap need three micro-batches each."""
    plan = planner().plan([LONGEST * 3 // 5] * 6).plan
    assert len(plan.for_rank(0).micro_batches) == 3


@given(
    st.integers(1, 200),
    st.integers(1, 6),
    st.sampled_from(["anchor", "raise", "off"]),
    st.sampled_from([0, 1, 3, 200]),
    st.booleans(),
)
def test_any_pins_are_kept(
    base_budget: int, blocks: int, tuning: Any, pin: int, every: bool
) -> None:
    """Also budgets above the blocks of the longest sample, which plans give where base is above."""
    made = planner(
        host_job(max_sample_tokens=blocks * BLOCK),
        base_budget=base_budget,
        tuning=tuning,
        batching="latency" if tuning == "anchor" else "makespan",
    )
    given_lengths = random_lengths(8, base_budget, longest=blocks * BLOCK)
    pinned_LS = made.plan(given_lengths).plan.budgets_LS if pin == 0 else np.full((2, 8), pin)
    pinned_S = np.ones(8, bool) if every else np.arange(8) % 2 == 0
    pinned_LS = np.where(pinned_S, pinned_LS, 0)
    for more in ({}, {"placement": [[range(4)], [range(4, 8)]]}):
        plan = made.plan(given_lengths, pinned_LS=pinned_LS, **more).plan
        assert (plan.budgets_LS[:, pinned_S] == pinned_LS[:, pinned_S]).all()


def test_a_given_placement_stays_and_gets_budgets() -> None:
    made = planner()
    placement = (((0, 1, 2, 3), (4,)), ((5, 6), (7, 8, 9)))
    plan = made.plan(lengths(10), placement=placement).plan
    assert plan.data_parallel_size == 2
    for rank, in_rank in enumerate(placement):
        run = plan.for_rank(rank).micro_batches
        assert tuple(micro_batch.samples for micro_batch in run) == in_rank
    assert (plan.budgets_LS != 8).any()
    above_the_cap = made.plan([LONGEST] * 4, placement=(((0, 1),), ((2, 3),))).plan
    assert [each.tokens for each in above_the_cap.micro_batches] == [2 * LONGEST] * 2
    padding = planner(host_job(pad_samples_to=128))
    padded = padding.plan([100, 128, 129, 300], placement=(((0, 1),), ((2, 3),))).plan
    assert [each.lengths_tokens for each in padded.micro_batches] == [(128, 128), (256, 384)]


def test_planners_that_learnt_the_same_plan_the_same() -> None:
    """One goes on, one is restored from JSON before every step."""
    whole, state = planner(), None
    digests = []
    for step in range(8):
        resumed = planner(observed=False)
        resumed.load_state_dict(json.loads(json.dumps(state or whole.state_dict())))
        planned = whole.plan(lengths(seed=step))
        # The speed of devices is not saved: another process may run on others.
        other = resumed.plan(lengths(seed=step))
        assert other.plan.digest() == planned.plan.digest()
        digests.append(planned.plan.digest())
        whole.learn(planned, measurement(planned, whole.coverage))
        state = whole.state_dict()
    assert len(set(digests)) == 8
    assert whole.steps == 8


@pytest.mark.parametrize("observed", [True, False])
def test_a_plan_travels_between_processes(observed: bool) -> None:
    """As bytes, or pickled; with shared micro-batches, some of them pinned, and device speeds."""
    made = planner(host_job(4), observed=observed, max_context_parallel=4)
    first = made.plan(lengths())
    made.learn(first, measurement(first, made.coverage))
    pinned_LS = made.plan(lengths()).plan.budgets_LS.copy()
    pinned_LS[:, ::2] = 0
    planned = made.plan(lengths(), pinned_LS=pinned_LS)
    assert {micro_batch.cp_size for micro_batch in planned.plan.micro_batches} > {1}
    assert pickle.loads(pickle.dumps(planned)).plan.digest() == planned.plan.digest()
    read = PlannedStep.from_bytes(PlannedStep.from_bytes(planned.to_bytes()).to_bytes())
    assert read.plan.digest() == planned.plan.digest()
    assert read.plan.expectation.makespan_ms == planned.plan.expectation.makespan_ms
    assert np.array_equal(read.times_2RPVM, planned.times_2RPVM)
    assert np.array_equal(read.scales.factors_2RPV, planned.scales.factors_2RPV)
    assert not read.plan.micro_batches[0].budgets_LS.flags.writeable


def test_bytes_that_are_no_plan_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = planner().plan(lengths())
    encoded = planned.to_bytes()
    with pytest.raises(PlanError, match="these bytes are no plan"):
        PlannedStep.from_bytes(encoded[:-1])
    envelope = 8 * (encoded.index(__version__.encode()) + len(__version__))
    for bit in (*range(envelope), *range(envelope, 8 * len(encoded), 7)):
        damaged = bytearray(encoded)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PlanError):
            PlannedStep.from_bytes(bytes(damaged))
    monkeypatch.setattr(planned_step, "__version__", "0.0.0")
    with pytest.raises(PlanError, match="install the same version in all processes"):
        PlannedStep.from_bytes(encoded)


def test_ranks_share_samples_above_the_cap() -> None:
    """One sample needs four ranks; with Megatron's groups of two, a placement of groups stays."""
    tokens = [LONGEST, *[100] * 6]
    cap = {"max_tokens_per_micro_batch": LONGEST // 4}
    plan = planner(host_job(4), max_context_parallel=4, **cap).plan(tokens).plan
    assert next(each.cp_size for each in plan.micro_batches if 0 in each.samples) == 4
    with pytest.raises(PlanError, match="fits in no micro-batch of 2048 tokens per rank"):
        planner(host_job(4), max_context_parallel=2, **cap).plan(tokens)
    groups = planner(host_job(4, layout={"context_parallel_size": 2}))
    given = groups.plan(tokens, placement=(((0,),), ((1, 2, 3, 4, 5, 6),))).plan
    assert [(each.rank, each.cp_size) for each in given.micro_batches] == [(0, 2), (2, 2)]
    with pytest.raises(PlanError, match="the job 2 ranks of 1; context-parallel ranks are not"):
        groups.plan(tokens, placement=(((0,),), ((1, 2),), ((3, 4),), ((5, 6),)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths_tokens": [10, LONGEST + 1]}, "sample 1 has 8193 tokens"),
        ({"lengths_tokens": [10, 0]}, "sample 1 has 0 tokens"),
        ({"lengths_tokens": [10]}, "1 samples cannot fill 1 micro-batches on each of 2 ranks"),
        ({"micro_batches": 3}, "cannot fill 6"),
        ({"micro_batches": 0}, "0 micro-batches: must be"),
        ({"placement": (((0, 1),), ((2, 2),))}, "each of the 4 samples exactly once"),
        ({"placement": (((0, 1, 2, 3),),)}, "placement: ranks have"),
        ({"pinned_LS": np.ones((2, 3))}, "pinned budgets have shape"),
        ({"pinned_LS": np.array([[1] * 4, [0] * 4])}, "at least 1 in every layer, or 0 in all"),
    ],
)
def test_a_mistake_is_told(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planner().plan(**{"lengths_tokens": [10] * 4} | arguments)


def test_lists_of_lengths_are_planned_by_one_call(recwarn: pytest.WarningsRecorder) -> None:
    tokens = lengths(24, 3)
    found = plan_lengths(tokens, 2, 4, SHAPE, layers=8, micro_batches=4)
    assert [len(of_rank) for of_rank in found.samples] == [4, 4]
    placed = sorted(sample for rank in found.samples for each in rank for sample in each)
    assert placed == list(range(24))
    assert found.lower_bound_ms <= found.ms <= found.by_tokens_ms
    assert not recwarn.list
    with pytest.raises(PlanError, match=r"sample 1 has 0\.5 tokens, must have a whole number"):
        plan_lengths([8, 0.5], 1, 1, SHAPE, layers=2)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({"max_segments": 2}, "--sparse-balance-max-segments 2: not where a host"),
        ({"window": 4}, "--sparse-balance-window 4: .*order of .*integration.window_places"),
        ({"max_context_parallel": 4}, "4: must be a power of two that divides the 2 data-parallel"),
        ({"dry_run": 0}, "--sparse-balance-dry-run 0: not where a host"),
        ({"global_batch_size": 0}, "global_batch_size 0: must be at least 1"),
    ],
)
def test_what_no_host_can_have_is_refused(choices: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        job = host_job(**choices) if "global_batch_size" in choices else host_job()
        HostPlanner(SparseBalanceConfig(**choices), job)


@given(seed=st.integers(0, 1000), count=st.integers(8, 24))
def test_ranks_in_lockstep_get_the_number_of_micro_batches_of_the_shortest_step(
    seed: int, count: int
) -> None:
    """Unless the host names one, or all steps are to have the least that fit."""
    job = host_job(4, layout={"lockstep_ranks": 4})
    choices: dict[str, Any] = {"tuning": "off", "max_tokens_per_micro_batch": 4 * LONGEST}
    tokens = lengths(count, seed)
    chosen = planner(job, **choices).plan(tokens)
    given_numbers = []
    for number in range(1, count // 4 + 1):
        planned = planner(job, **choices).plan(tokens, micro_batches=number)
        assert planned.micro_batches == number
        given_numbers.append(planned.plan.expectation.makespan_ms)
    expected = chosen.plan.expectation
    assert expected.makespan_ms <= given_numbers[-1] * (1 + 1e-9)
    # A named number is searched longer.
    assert expected.makespan_ms <= 1.02 * min(given_numbers)
    assert expected.lower_bound_ms <= expected.makespan_ms * (1 + 1e-9)
    fixed = planner(job, positions="fixed", **choices).plan(tokens)
    least = -(-sum(tokens) // (4 * 4 * LONGEST))
    assert fixed.micro_batches >= max(1, least)


@given(st.integers(0, 1000), st.sampled_from([16, 24, 30]))
def test_planned_cp_sizes_take_no_longer_than_in_the_least_number_of_micro_batches(
    seed: int, count: int
) -> None:
    made = planner(host_job(4), context_parallel="dynamic", max_context_parallel=2)
    tokens = lengths(count, seed)
    chosen = made.plan(tokens).plan.expectation.makespan_ms
    least = -(-sum(made.job.padded(each) for each in tokens) // (4 * LONGEST))
    given_number = made.plan(tokens, micro_batches=least).plan.expectation.makespan_ms
    assert chosen <= given_number * (1 + 1e-9)


def test_state_of_another_version_is_refused_and_of_another_model_named() -> None:
    made = planner()
    with pytest.raises(StateError, match="version 0, not"):
        made.load_state_dict(made.state_dict() | {"version": 0})
    other = planner(replace(host_job(), max_sample_tokens=LONGEST * 2), observed=False)
    (afresh,) = other.load_state_dict(made.state_dict())
    assert afresh.startswith("coverage starts afresh: coverage state has budget grid")
    other = planner(observed=False, selection="vertical-slash")
    reason = "starts afresh: selection token-query-head, first blocks 1 measured it"
    assert other.load_state_dict(made.state_dict()) == (f"coverage {reason}",)
    assert not other.coverage.observed_LU.any()
    assert planner(observed=False).load_state_dict(made.state_dict()) == ()


def test_planning_needs_no_torch() -> None:
    """The program of docs/INTEGRATION.md, with torch and Megatron blocked."""
    text = (REPOSITORY / "docs" / "INTEGRATION.md").read_text("utf-8")
    section = text[text.index("### Plans without torch") :]
    example = section.partition("```python\n")[2].partition("\n```\n")[0]
    program = f"""
import sys, warnings
sys.path.insert(0, {str(REPOSITORY)!r})
for name in ("torch", "megatron"):
    sys.modules[name] = None
warnings.simplefilter("error")
{example}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rank 0 runs samples (")


def test_a_state_keeps_the_length_up_to_which_documents_are_dense() -> None:
    """Unless the host names one; either way it says where costs, or the host, differ."""
    kept = planner(dense_up_to=str(20 * BLOCK)).state_dict()
    by_costs = planner(dense_up_to="auto")
    own = by_costs.config.dense_up_to_tokens
    assert own not in (0, 20 * BLOCK)
    (line,) = by_costs.load_state_dict(kept)
    assert line == (
        f"--sparse-balance-dense-up-to stays {20 * BLOCK}; by this job's costs it would be {own}"
    )
    assert by_costs.config.dense_up_to_tokens == 20 * BLOCK
    named = planner(dense_up_to="0")
    (line,) = named.load_state_dict(kept)
    assert line == f"--sparse-balance-dense-up-to is 0, in the state {20 * BLOCK}"
    assert by_costs.plan(lengths()).plan.digest() != named.plan(lengths()).plan.digest()
    counted = planner(dense_up_to="auto", counted=True).state_dict()
    assert counted["dense_up_to_counted"] and not kept["dense_up_to_counted"]
    for state, length in ((counted | {"dense_up_to_tokens": 20 * BLOCK}, own), (kept, 20 * BLOCK)):
        measured = planner(dense_up_to="auto")
        (line,) = measured.load_state_dict(state)
        assert measured.config.dense_up_to_tokens == length
        assert ("was counted" in line) == (length == own)
        assert not measured.state_dict()["dense_up_to_counted"]
    again = planner(dense_up_to="auto", counted=True)
    again.load_state_dict(counted | {"dense_up_to_tokens": 20 * BLOCK})
    assert again.state_dict()["dense_up_to_counted"], "a counted length that is kept"
    for other in ({"base_budget": 3}, {"layer_budgets": "dense:all"}):
        assert planner(dense_up_to="auto", **other).load_state_dict(kept) == ()
    other = planner(dense_up_to="auto", selection="token-kv-head")
    (line,) = other.load_state_dict(kept)
    assert line.startswith("coverage starts afresh: ")
    with pytest.raises(ConfigError, match="-dense-up-to 999999: the longest sample has"):
        planner(dense_up_to="999999")


@pytest.mark.parametrize(
    ("ranks", "cp_size", "heads", "most"),
    [
        *((32, 2, (32, 8), 32), (32, 2, (12, 4), 4), (24, 2, (32, 8), 8), (32, 1, (32, 8), 1)),
        (32, 8, (12, 4), 8),
    ],
)
def test_in_mode_exact_heads_say_how_many_may_share(
    ranks: int, cp_size: int, heads: tuple[int, int], most: int
) -> None:
    """Beyond a node of 8 ranks, too; where they do not serve what is asked for, as elsewhere."""
    shape = replace(SHAPE, num_attention_heads=heads[0], num_query_groups=heads[1])
    job = host_job(ranks, layout={"context_parallel_size": cp_size}, shape=shape)
    exact = SparseBalanceConfig(layer_budgets=ALL_DENSE, tuning="off")
    assert job.plan_settings(exact, 512).max_cp_size == most
    default = job.plan_settings(SparseBalanceConfig(), 512).max_cp_size
    assert default == (1 if cp_size == 1 else 8)
    exchange = job.cost_model(exact, {}).exchange
    assert exchange.heads_within == (8 if heads[0] % cp_size else ranks)


def test_heads_travel_where_more_ranks_share_than_a_node_has() -> None:
    """Where they can; keys and values are gathered otherwise, and dense attention is slower."""
    shape = replace(SHAPE, num_attention_heads=32, num_query_groups=8)
    job = replace(host_job(32, shape=shape), neighbours_per_node=4)
    config = SparseBalanceConfig(max_context_parallel=8)
    even, uneven = (
        replace(job, shape=replace(shape, num_attention_heads=heads)).cost_model(config, {})
        for heads in (32, 12)
    )
    assert even.exchange.heads_serve(8) and not uneven.exchange.heads_serve(8)
    assert even.efficiency == uneven.efficiency
    assert even.segments.dense_slowness == uneven.segments.dense_slowness > 1.5
