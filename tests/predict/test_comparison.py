# SPDX-License-Identifier: Apache-2.0
"""Ways to plan the same batches: comparable numbers, no layout ignored; and layers per stage."""

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import REPOSITORY
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from plan.plan_cases import cost_model
from predict.predict_cases import workload

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.predict.comparison import (
    DEFAULT,
    DYNAMIC,
    EXACT,
    EXACT_WINDOW,
    GIVEN,
    MEGATRON,
    SORTED,
    TableRow,
    compare,
    even_stages,
    given_row,
    rows_of,
    speedup_lines,
    window_lines,
)
from sparsebalance_megatron.predict.outcome import Outcome, predict, unhideable_steps
from sparsebalance_megatron.predict.workload import Workload
from sparsebalance_megatron.selector_registry import POLICIES
from sparsebalance_megatron.view.predictions import ratio_spread

MAIN_ROWS = [MEGATRON, SORTED, EXACT, "fixed budgets", "paper", DEFAULT]
EXACT_FLAGS = {"layer_budgets": "dense:all", "tuning": "off"}


def long_tailed(steps: int = 4) -> Workload:
    uniform = np.random.default_rng(1).random((steps, 16))
    lengths = (1000 - 2000 * np.log1p(-uniform * 0.95)).astype(int)
    return workload(lengths.tolist(), ranks=4, stages=2, config={"base_budget": 16})


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    given = long_tailed()
    return {name: predict(row.of(given)) for name, row in rows_of(given).items()}


def test_dense_attention_in_order_of_arrival_is_the_first(outcomes: dict[str, Outcome]) -> None:
    assert list(outcomes)[:6] == MAIN_ROWS
    assert outcomes[MEGATRON].coverage_mean == outcomes[EXACT].coverage_mean == 1.0
    assert outcomes[EXACT].makespan_ms < outcomes[MEGATRON].makespan_ms


def test_numbers_belong_together(outcomes: dict[str, Outcome]) -> None:
    base = outcomes["fixed budgets"]
    assert base.work_ratio == pytest.approx(1.0)
    for outcome in outcomes.values():
        assert outcome.bound_ratio >= 1.0 - 1e-9
        assert outcome.coverage_mean >= base.coverage_mean - SparseBalanceConfig.coverage_threshold
        assert outcome.plan_ms > 0.0
        assert outcome.makespan_ms == pytest.approx(np.mean(outcome.step_ms))
    assert (np.array(outcomes[DEFAULT].step_ms) <= np.array(base.step_ms) * (1 + 1e-6)).all()
    assert outcomes[DEFAULT].coverage_mean >= base.coverage_mean


def test_curves_stay_the_workloads(outcomes: dict[str, Outcome]) -> None:
    given = long_tailed()
    before = given.coverage.mean_LUK.copy()
    again = predict(given)
    assert replace(again, plan_ms=0.0) == replace(outcomes[DEFAULT], plan_ms=0.0)
    np.testing.assert_array_equal(given.coverage.mean_LUK, before)


def test_no_row_ignores_that_ranks_share_micro_batches() -> None:
    given = workload(ranks=4, cp_size=2, micro_batches=4)
    rows = rows_of(given)
    assert list(rows) == MAIN_ROWS
    for row in rows.values():
        planned = row.of(given)
        assert planned.job == given.job
        assert planned.plan_settings.max_cp_size >= 2
    (step,) = rows[MEGATRON].of(given).planned_steps()
    assert {each.cp_size for each in step.plan.micro_batches} == {2}


def test_dynamic_context_parallelism_is_compared_without_a_pipeline() -> None:
    given = workload(ranks=8, stages=1, cp_size=2, micro_batches=2)
    rows = rows_of(given)
    assert list(rows) == [MEGATRON, DYNAMIC, *MAIN_ROWS[1:]]
    found = {name: predict(rows[name].of(given)) for name in (MEGATRON, DYNAMIC, SORTED, EXACT)}
    assert all(each.bound_ratio >= 1.0 - 1e-9 for each in found.values())
    assert found[EXACT].makespan_ms < found[MEGATRON].makespan_ms
    (step,) = rows[DYNAMIC].of(given).planned_steps()
    assert len({each.cp_size for each in step.plan.micro_batches}) > 1
    by = {name: row.attention(row.of(given)) for name, row in rows.items()}
    assert by[DYNAMIC] == "the model's own attention"
    # 14 heads do not divide by 8.
    assert by[EXACT] == "this package's dense attention, over gathered keys"
    narrow = workload(ranks=2, stages=1, cp_size=2, micro_batches=8)
    by_heads = rows[EXACT].attention(rows[EXACT].of(narrow))
    assert by_heads == "the model's own attention, heads divided where ranks share"
    assert by[DEFAULT].startswith("lists, and dense documents by this package's")


def test_a_policy_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least budgets are faster, and lose no more coverage than the threshold allows."""
    information = tmp_path / "policies-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: policies\nVersion: 1.0\n")
    entries = "floor = floor:FLOOR\nclass = floor:FloorPolicy\n"
    (information / "entry_points.txt").write_text(f"[{POLICIES.group}]\n{entries}")
    for folder in (tmp_path, REPOSITORY / "examples" / "selectors"):
        monkeypatch.syspath_prepend(str(folder))
    given = workload(config={"tuning": "floor", "base_budget": 16, "dense_up_to": "0"})
    rows = rows_of(given)
    assert given_row(given, rows) == GIVEN
    fixed, floor = predict(rows["fixed budgets"].of(given)), predict(rows[GIVEN].of(given))
    assert floor.makespan_ms < fixed.makespan_ms
    assert fixed.coverage_mean and floor.coverage_mean
    assert fixed.coverage_mean - 0.1 <= floor.coverage_mean < fixed.coverage_mean
    with pytest.raises(ConfigError, match=r"flor: must be one of off, anchor, raise, class, floor"):
        SparseBalanceConfig(tuning="flor")
    with pytest.raises(ConfigError, match=r"without an instance \(it is a class\)"):
        predict(workload(config={"tuning": "class"}))


def test_rows_of_segments() -> None:
    given = workload(config={"max_segments": 4, "segment_tokens": 256})
    rows = rows_of(given)
    assert rows[MEGATRON].of(given).plan_settings.config.max_segments == 1
    assert rows[DEFAULT].of(given) == given


@pytest.mark.parametrize(
    ("config", "row"),
    [
        ({}, DEFAULT),
        ({"tuning": "off"}, "fixed budgets"),
        ({"batching": "latency", "tuning": "anchor"}, "paper"),
        ({"batching": "length"}, GIVEN),
        (EXACT_FLAGS, EXACT),
        ({"layer_budgets": "dense:0-23", "tuning": "off"}, EXACT),
        (EXACT_FLAGS | {"batching": "arrival"}, MEGATRON),
        (EXACT_FLAGS | {"batching": "latency"}, GIVEN),
    ],
)
def test_the_row_of_the_flags_plans_as_they_do(config: dict[str, str], row: str) -> None:
    given = workload(config=config)
    rows = rows_of(given)
    assert given_row(given, rows) == row
    is_dense = "layer_budgets" in config
    main = MAIN_ROWS[:3] if is_dense else MAIN_ROWS
    assert list(rows) == [*main, *[GIVEN] * (row == GIVEN)]
    planned, own = (
        next(each.planned_steps()).plan.digest() for each in (rows[row].of(given), given)
    )
    assert planned == own


def test_unhideable_steps_are_counted() -> None:
    given = workload(((8192, *[300] * 7), (1000,) * 8), ranks=2, stages=1)
    assert unhideable_steps(given) == 1
    lengths = (8192, *[1000] * 7)
    assert unhideable_steps(workload((lengths,), ranks=2, stages=1, micro_batches=4)) == 1
    shared = workload((lengths,), ranks=2, stages=1, micro_batches=8, cp_size=2)
    assert unhideable_steps(shared) == 0, "both ranks share every sample"


BATCHES = ((900, 4000, 2500, 800, 1200, 600, 3000, 700),) * 2


def with_head(head_ms_per_token: float, stages: int = 3) -> Workload:
    """Twelve layers, an output head that takes so long, and no embedding."""
    given = workload(
        BATCHES,
        layers=12,
        ranks=1,
        stages=stages,
        micro_batches=8,
        config={"tuning": "off", "block_size": 64},
    )
    ends = {
        (part, direction): (0.0, 0.0, ms, 0.0, 0.0)
        for part, ms in ((Part.HEAD, head_ms_per_token), (Part.EMBEDDING, 0.0))
        for direction in Direction
    }
    cost = cost_model()
    return replace(given, cost=replace(cost, ms_per_unit=cost.ms_per_unit | ends))


def predicted_ms(given: Workload, layers: tuple[int, ...]) -> float:
    edges = pairwise(accumulate(layers, initial=0))
    stages = tuple((tuple(range(*ends)),) for ends in edges)
    steps = replace(given, job=replace(given.job, stage_layers=stages)).planned_steps()
    return sum(step.plan.expectation.makespan_ms for step in steps)


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    given = with_head(head_ms_per_token=2e-3)
    found = even_stages(given)
    assert found is not None
    assert sum(found.layers) == 12 and found.layers[-1] < 4
    gained = predicted_ms(given, (4, 4, 4)) / predicted_ms(given, found.layers)
    assert found.speedup == pytest.approx(gained)
    assert found.speedup > 1.01
    layout = PipelineParallelLayerLayout.from_str(found.layout, 3).layout
    names = [[each.name for each in stage[0]] for stage in layout]
    assert [stage.count("decoder") for stage in names] == list(found.layers)
    assert even_stages(with_head(2e-3, stages=1)) is None
    assert even_stages(with_head(0.0)) is None


def few_long(steps: int, long_tokens: int, **choices: Any) -> Workload:
    """Two samples a rank, of which one of a step is long."""
    lengths = np.random.default_rng(2).integers(500, 900, (steps, 8))
    lengths[:, 3] = long_tokens
    flags = EXACT_FLAGS | choices
    return workload(lengths.tolist(), ranks=4, stages=1, micro_batches=2, config=flags)


def test_windows_are_planned_as_given_and_beside() -> None:
    given, chosen = few_long(8, 8000), few_long(8, 8000, window=4)
    assert chosen.batches == given.batches != chosen.dealt_batches
    rows = rows_of(given)
    assert EXACT_WINDOW not in rows_of(chosen) and EXACT_WINDOW not in rows_of(few_long(3, 8000))
    found = compare(
        [TableRow(names=(name,), workload=row.of(given)) for name, row in rows.items()], (EXACT,)
    )
    by_name = {row.names[0]: row for row in found.rows}
    assert by_name[EXACT_WINDOW].outcome == replace(
        predict(chosen), plan_ms=by_name[EXACT_WINDOW].outcome.plan_ms
    )
    assert found.dense.names in ((EXACT,), (SORTED,)), "other samples in a step are no baseline"
    gained = by_name[EXACT].ms / by_name[EXACT_WINDOW].ms
    (line,) = window_lines(given)
    assert "samples of up to 8,000 tokens" in line and f"{gained:.2f} times as fast" in line
    assert rows_of(chosen)[MEGATRON].of(chosen).dealt_batches == given.batches
    # Windows are compared, whose samples are the same, and not steps.
    one_by_one, dealt = (np.array(by_name[name].outcome.step_ms) for name in (EXACT, EXACT_WINDOW))
    ratios = one_by_one.reshape(2, 4).sum(axis=1) / dealt.reshape(2, 4).sum(axis=1)
    spread = ratio_spread(by_name[EXACT], by_name[EXACT_WINDOW])
    assert spread == pytest.approx((ratios.min(), ratios.max()))


def test_flags_that_make_steps_shorter_are_named_with_what_they_give() -> None:
    """Each is planned; one that training refuses, that gives nothing or that does not fit, is not
    named."""

    def lines(given: Workload, refused: str = "nothing", **shape: Any) -> list[str]:
        def with_flags(flags: str) -> Workload:
            name, value = flags.removeprefix("--sparse-balance-").split()
            if name == refused:
                raise ConfigError("refused")
            config = replace(given.plan_settings.config, **{name.replace("-", "_"): int(value)})
            return workload(given.batches, config=vars(config), **shape)

        row = TableRow(names=(EXACT,), workload=given, outcome=predict(given))
        return list(speedup_lines(row, with_flags))

    one_stage = {"ranks": 4, "stages": 1, "micro_batches": 2}
    given = few_long(3, 8000)
    (line,) = lines(given, **one_stage)
    shared = workload(given.batches, config=EXACT_FLAGS | {"max_context_parallel": 4}, **one_stage)
    gained = predict(given).makespan_ms / predict(shared).makespan_ms
    assert gained > 1.5 and f"max-context-parallel 4 they are predicted to be {gained:.2f}" in line
    assert lines(given, refused="max-context-parallel", **one_stage) == []
    assert lines(few_long(3, 600), **one_stage) == []
    # Ranks have to share every sample that one of them cannot hold.
    tight = {"ranks": 4, "stages": 1, "micro_batches": 8, "cap_tokens": 2048}
    shares = EXACT_FLAGS | {"max_context_parallel": 4}
    given = workload([[3000] * 16] * 2, config=shares, **tight)
    (line,) = lines(given, **tight)
    assert "max-tokens-per-micro-batch 4096" in line


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_flags_that_allow_more_never_make_steps_slower(seed: int, exact: bool) -> None:
    """Counted rates of dense documents do not depend on what no micro-batch does."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(200, 3000, (1, 16))
    lengths[0, :2] = generator.integers(3000, 8192, 2)
    base = EXACT_FLAGS if exact else {"dense_up_to": "2048"}
    tried: dict[str, tuple[int | None, ...]] = {
        "max_segments": (1, 2, 8),
        "max_context_parallel": (None, 2, 4, 8),
    }
    for name, values in tried.items():
        changes = [base | {"segment_tokens": 512, name: value} for value in values]
        shape = {"ranks": 8, "stages": 2, "micro_batches": 2, "neighbours_per_node": 4}
        ms = [
            predict(workload(lengths.tolist(), config=each, **shape)).makespan_ms
            for each in changes
        ]
        assert all(after <= before for before, after in pairwise(ms)), (name, ms)


def test_windows_that_give_nothing_are_not_named_and_uneven_tokens_are() -> None:
    assert window_lines(few_long(8, 1000)) == ()
    assert window_lines(few_long(3, 8000)) == ()
    assert window_lines(few_long(8, 8000, batching="arrival")) == ()
    assert window_lines(few_long(8, 1000, window=4)) == ()
    # A window's step of four long samples would exceed the cap of two micro-batches.
    batches, flags = few_long(8, 8000).batches, EXACT_FLAGS | {"window_share": 0.5}
    shape = {"ranks": 2, "stages": 1, "micro_batches": 1, "cap_tokens": 11_000}
    assert window_lines(workload(batches, config=flags, **shape)) == ()
    assert window_lines(workload(batches, config=flags, **shape | {"cap_tokens": 40_000}))
    (line,) = window_lines(few_long(8, 8000, window=4))
    assert line.startswith("tokens a step vary by") and "--global-batch-size" in line
