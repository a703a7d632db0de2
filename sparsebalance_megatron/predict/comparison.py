# SPDX-License-Identifier: Apache-2.0
"""Jobs compared with dense attention: one planned in several ways, or several layouts. And layers
per pipeline stage that make up for the embedding and the output head.

The paper is arXiv:2604.13847.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name, flag_with
from sparsebalance_megatron.cost.memory import GIBIBYTE
from sparsebalance_megatron.cost.model import OF_MODEL_ATTENTION, counted_rates
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.flags import MODES
from sparsebalance_megatron.predict.others import dynamic_context_parallel, sorted_batches
from sparsebalance_megatron.predict.outcome import (
    Outcome,
    memory_at_most,
    predict,
    unhideable_steps,
)
from sparsebalance_megatron.predict.workload import Placer, Workload, WorkloadError
from sparsebalance_megatron.text_table import progress_bar

LEAST_SPEEDUP = 1.01
"""Smaller gains are within the error of predictions and are not named."""
_STEPS = 4
"""Steps that are planned for a layout, at most."""
WINDOW_STEPS = 8
"""Steps that are planned to find what windows would give."""
_TRIED_WINDOW = 4
_LEAST_FLAG_SPEEDUP = 1.05
"""A flag that was not given is named from this speedup on."""
_TRIED_SEGMENTS = 8
_TRIED_CP_SIZE = 4
_MOST_VARIATION = 0.3
"""Deviation over mean of tokens a step, beyond which tokens of some steps weigh much more."""
_MOST_MOVES = 8
"""Layers that move at most; each move plans all batches twice."""

AS_MEGATRON = {"batching": "arrival", "window": 1, "context_parallel": "static", "max_segments": 1}
"""Samples where they arrive, and ranks that share micro-batches as Megatron has them do."""
_CHOSEN = ("batching", "tuning")


class Row(NamedTuple):
    """A way to plan: changes of the configuration with the default batching and tuning, in
    words, and whether the attention is Megatron's, with an exchange that takes no time.
    ``placed_by``: see :class:`.Workload`."""

    changes: Mapping[str, Any]
    meaning: str
    of_megatron: bool = False
    placed_by: Placer | None = None

    def of(self, workload: Workload) -> Workload:
        """The workload, planned this way on the same ranks."""
        changes = {name: getattr(SparseBalanceConfig, name) for name in _CHOSEN} | {**self.changes}
        given, cost, ranks = workload.plan_settings, workload.cost, workload.job.data_parallel_size
        max_cp_size = given.max_cp_size
        if given.max_cp_size == 1:
            changes.pop("context_parallel", None)
        elif "context_parallel" in changes:
            changes["max_context_parallel"] = None
            max_cp_size = workload.job.context_parallel_size
        if self.placed_by is dynamic_context_parallel:
            max_cp_size = ranks & -ranks
        if changes["tuning"] == "anchor":
            # It plans no segments.
            changes["max_segments"] = 1
        config = replace(given.config, **changes)
        settings = replace(given, config=config, max_cp_size=max_cp_size)
        planned = replace(workload, plan_settings=settings, placed_by=self.placed_by)
        beyond = replace(cost, exchange=replace(cost.exchange, heads_within=ranks))
        if cost.exchange.heads_within > 1 and _leaves_attention(replace(planned, cost=beyond)):
            # Heads travel beyond a node, too, where the model's own attention stays for that.
            cost = beyond
        if self.of_megatron or _leaves_attention(replace(planned, cost=cost)):
            cost = cost.with_model_attention
        if self.of_megatron:
            # Its ring is taken to hide behind attention, and to divide work evenly.
            hidden = replace(
                cost.exchange, bytes_per_token=0.0, gradient_bytes_per_token=0.0, loss=0.0
            )
            whole = replace(cost.segments, dense_slowness=1.0)
            cost = replace(cost, exchange=hidden, segments=whole)
        return replace(planned, cost=cost)

    def attention(self, planned: Workload) -> str:
        """What the documents of the workload that :meth:`of` gave are attended to by."""
        settings, exchange = planned.plan_settings, planned.cost.exchange
        heads = exchange.heads_serve(settings.max_cp_size)
        if self.of_megatron or _leaves_attention(planned):
            shares = not self.of_megatron and settings.max_cp_size > 1
            return "the model's own attention" + ", heads divided where ranks share" * shares
        gathers = settings.config.max_segments > 1 or not heads
        counted = planned.cost.efficiency
        dense = "this package's dense attention" + ", over gathered keys" * gathers
        if counted is not None and counted.dense == OF_MODEL_ATTENTION and not gathers:
            dense = "the model's own attention"
        return dense if planned.is_dense else f"lists, and dense documents by {dense}"


def _leaves_attention(planned: Workload) -> bool:
    """Whether attention is left to the model: heads travel, and nothing is cut."""
    settings, exchange = planned.plan_settings, planned.cost.exchange
    return settings.config.leaves_attention and exchange.heads_serve(settings.max_cp_size)


MEGATRON, DYNAMIC, SORTED = "Megatron", "dynamic cp", "sorted"
EXACT, DEFAULT, GIVEN = "exact", "default", "as given"
ROWS: Mapping[str, Row] = {
    MEGATRON: Row(
        {**MODES["exact"], **AS_MEGATRON},
        "dense attention in order of arrival, without the plugin",
        of_megatron=True,
    ),
    DYNAMIC: Row(
        {**MODES["exact"], "max_segments": 1},
        "Megatron's dynamic context parallelism",
        of_megatron=True,
        placed_by=dynamic_context_parallel,
    ),
    SORTED: Row(
        {**MODES["exact"], **AS_MEGATRON},
        "samples divided evenly by tokens squared (Karmarkar-Karp), as a sampler could",
        of_megatron=True,
        placed_by=sorted_batches,
    ),
    EXACT: Row(MODES["exact"], "dense attention, placed by the plan (--sparse-balance-mode exact)"),
    "fixed budgets": Row({"tuning": "off"}, "base budgets for all, placed by the plan"),
    "paper": Row(MODES["paper"], "placed by latency, budgets tuned towards their mean"),
    DEFAULT: Row(MODES["default"], "placed by the plan, budgets raised where ranks would wait"),
}
"""The first is what all others are compared with."""
EXACT_WINDOW = f"windows of {_TRIED_WINDOW}"


def rows_of(workload: Workload) -> dict[str, Row]:
    """The rows of a workload, those of dense attention first, no others if all layers are dense;
    then one with windows, if the workload has none. One that is planned like none of them comes
    last, as it is given. Megatron has dynamic context parallelism without a pipeline alone."""
    settings, job, rows = workload.plan_settings, workload.job, dict(ROWS)
    if job.context_parallel_size == 1 or job.pipeline_stages > 1:
        del rows[DYNAMIC]
    if job.groups.places == 1:
        del rows[SORTED]
    if workload.is_dense:
        rows = {name: row for name, row in rows.items() if row.of_megatron or name == EXACT}
    if settings.config.window == 1 and len(workload.batches) >= _TRIED_WINDOW:
        given = flag_with("window", _TRIED_WINDOW)
        meaning = f"{EXACT}, where samples change places between steps ({given})"
        rows[EXACT_WINDOW] = Row({**MODES["exact"], "window": _TRIED_WINDOW}, meaning)
    if given_row(workload, rows) == GIVEN:
        own = {name: getattr(settings.config, name) for name in _CHOSEN}
        rows[GIVEN] = Row(own, "what these flags train")
    return rows


def given_row(workload: Workload, rows: Mapping[str, Row]) -> str:
    """The row that is planned as the workload itself; :data:`GIVEN` where no other is."""
    settings = workload.plan_settings
    if workload.is_dense:
        all_dense = MODES["exact"]["layer_budgets"]
        settings = replace(settings, config=replace(settings.config, layer_budgets=all_dense))
    planned = {
        name: row.of(workload).plan_settings for name, row in rows.items() if row.placed_by is None
    }
    return next((name for name, each in planned.items() if each == settings), GIVEN)


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One way to plan, or one layout, by its names; without an outcome where it was not planned.
    ``words``: of a command line, that make it differ from other rows."""

    names: tuple[str, ...]
    words: Sequence[str] = ()
    workload: Workload
    outcome: Outcome | None = None

    @cached_property
    def at_most_gib(self) -> float:
        """Memory of the fullest stage, with every micro-batch at the token cap."""
        return max(stage.total_bytes for stage in memory_at_most(self.workload)) / GIBIBYTE

    @property
    def gpu_gib(self) -> float | None:
        """Memory of the device whose times these are; None where unknown."""
        rates = counted_rates(self.workload.cost.device)
        return rates.memory_gib if rates else None

    @property
    def fits(self) -> bool:
        return self.gpu_gib is None or self.at_most_gib <= self.gpu_gib

    @property
    def ms(self) -> float:
        return math.inf if self.outcome is None else self.outcome.makespan_ms


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows of a table; ``refused``: rows that cannot be planned, and why.

    ``given``: what the flags train; of layouts, the fastest that is not Megatron's and not dense,
    if any is.
    """

    rows: tuple[TableRow, ...]
    given: TableRow
    refused: Sequence[tuple[TableRow, str]]

    @property
    def dense(self) -> TableRow:
        """The fastest of dense attention, with the windows of the flags."""
        rows = [row for row in self.rows if row.workload.is_dense and row.names[0] != EXACT_WINDOW]
        return min(rows, key=lambda row: row.ms)

    @property
    def without_plugin(self) -> TableRow:
        """The fastest of Megatron's own rows, else the first row."""
        own = [row for row in self.rows if row.names[-1] == MEGATRON and row.outcome]
        return min(own, key=lambda row: row.ms, default=self.rows[0])


def compare(rows: Sequence[TableRow], given: tuple[str, ...] | None = None) -> Comparison:
    """Plan one job in several ways, of which some are dense. Without a ``given`` row they are
    layouts: those that fit are planned, or all where none does, and the fastest comes first.

    Raises:
        PlanError: the given row, or no dense one, can be planned.
    """
    fitting = [row for row in rows if given or row.fits]
    planned = fitting or rows
    found, refused = list[TableRow](), list[tuple[TableRow, str]]()
    with progress_bar("plan", sum(len(row.workload.batches) for row in planned), "steps") as bar:
        for row in planned:
            try:
                found.append(replace(row, outcome=predict(row.workload, watch=bar.update)))
            except PlanError as error:
                if row.names == given:
                    raise
                refused.append((row, str(error)))
    if not any(row.workload.is_dense for row in found):
        raise PlanError(refused[0][1])
    if given is None:
        found.sort(key=lambda row: row.ms)
        own = [row for row in found if row.names[-1] != MEGATRON] or found
        sparse = [row for row in own if not row.workload.is_dense]
        given = (sparse or own)[0].names
        others = [row for row in rows if fitting and not row.fits]
        found += sorted(others, key=lambda row: row.at_most_gib)
    chosen = next(row for row in found if row.names == given)
    return Comparison(rows=tuple(found), given=chosen, refused=refused)


def speedup_lines(given: TableRow, with_flags: Callable[[str], Workload]) -> Iterator[str]:
    """Which flags make the given row's steps 5 % shorter or more, where they fit the memory of the
    device.

    Args:
        with_flags: the job with more flags. Raises a ConfigError or a WorkloadError where training
            refuses them; such flags are not named.
    """
    assert given.outcome is not None
    for flags in _tried_flags(given):
        try:
            workload = with_flags(flags)
            row = TableRow(names=(flags,), workload=workload.of_steps(_STEPS))
            step_ms = predict(row.workload).step_ms
        except (ConfigError, PlanError, WorkloadError):
            continue
        speedup = sum(given.outcome.step_ms[: len(step_ms)]) / sum(step_ms)
        if row.fits and speedup >= _LEAST_FLAG_SPEEDUP:
            yield (
                f"with {flags} they are predicted to be {speedup:.2f} times as fast, of at most "
                f"{row.at_most_gib:,.1f} GiB"
            )


def _tried_flags(given: TableRow) -> Iterator[str]:
    """Flags that may help where ranks wait or do more than they have to: to share samples that take
    longer than all work would, spread evenly; to cut them; and where ranks share micro-batches, to
    hold more tokens, so that fewer have to be shared."""
    outcome, settings = given.outcome, given.workload.plan_settings
    assert outcome is not None
    lost = max(outcome.bubble_share, outcome.bound_ratio - 1.0)
    if lost < _LEAST_FLAG_SPEEDUP - 1.0:
        return
    if settings.max_cp_size > 1:
        yield flag_with("max_tokens_per_micro_batch", 2 * settings.max_tokens_per_micro_batch)
    elif unhideable_steps(given.workload):
        yield flag_with("max_context_parallel", _TRIED_CP_SIZE)
    if given.workload.job.pipeline_stages > 1 and settings.config.max_segments == 1:
        yield flag_with("max_segments", _TRIED_SEGMENTS)


class EvenStages(NamedTuple):
    """``layers``: of each stage. ``speedup``: predicted, over the job's own layers per stage."""

    layers: tuple[int, ...]
    speedup: float

    @property
    def layout(self) -> str:
        """The value of Megatron's ``--pipeline-model-parallel-layout``.

        >>> EvenStages((10, 9, 7), speedup=1.05).layout
        'Et*10|t*9|t*7L'
        """
        return f"E{'|'.join(f't*{layers}' for layers in self.layers)}L"

    def __str__(self) -> str:
        return (
            f"stages do unequal work: with --pipeline-model-parallel-layout '{self.layout}' steps "
            f"are predicted to be {self.speedup:.2f} times as fast; a dry run shows its memory"
        )


def even_stages(workload: Workload) -> EvenStages | None:
    """Move layers off the busiest stage or the last while the predicted steps get shorter.

    None where that gains less than :data:`LEAST_SPEEDUP`, and with virtual stages.

    Raises:
        PlanError: a batch has no placement under the policy's cap.
    """
    workload = workload.of_steps(_STEPS)
    job, stages = workload.job, workload.job.pipeline_stages
    if stages == 1 or job.virtual_stages > 1:
        return None
    layers_P = np.array([len(chunk) for (chunk,) in job.stage_layers])
    first_ms, busy_P = _step_ms(workload, layers_P)
    best_ms, best_P = first_ms, layers_P
    for _ in range(_MOST_MOVES):
        moved = [_moved(best_P, source, busy_P) for source in {int(busy_P.argmax()), stages - 1}]
        tried = [(*_step_ms(workload, layers_P), layers_P) for layers_P in moved if layers_P.all()]
        ms, busy_P, layers_P = min(
            tried, key=lambda each: each[0], default=(best_ms, busy_P, best_P)
        )
        if ms >= best_ms:
            break
        best_ms, best_P = ms, layers_P
    if first_ms / best_ms < LEAST_SPEEDUP:
        return None
    return EvenStages(tuple(best_P.tolist()), first_ms / best_ms)


def _moved(layers_P: np.ndarray, source: int, busy_P: np.ndarray) -> np.ndarray:
    """One layer less on a stage, one more on the stage of the others with the least work."""
    others_P = np.where(np.arange(len(busy_P)) == source, np.inf, busy_P)
    moved_P = layers_P.copy()
    moved_P[source] -= 1
    moved_P[others_P.argmin()] += 1
    return moved_P


def _step_ms(workload: Workload, layers_P: np.ndarray) -> tuple[float, np.ndarray]:
    """Time of all steps, and of each stage's work in them, with so many layers per stage."""
    edges = [0, *np.cumsum(layers_P).tolist()]
    stages = tuple((tuple(range(*ends)),) for ends in itertools.pairwise(edges))
    job = replace(workload.job, stage_layers=stages)
    expected = [step.plan.expectation for step in replace(workload, job=job).planned_steps()]
    busy_P = sum(each.times_2RPVM.sum(axis=(0, 1, 3, 4)) for each in expected)
    return sum(each.makespan_ms for each in expected), np.asarray(busy_P)


def window_lines(workload: Workload) -> tuple[str, ...]:
    """What windows would give where there are none, if that is 5 % or more, and all steps can be
    planned; where there are, that tokens a step vary much."""
    settings = workload.plan_settings
    chosen = settings.config.window
    if chosen > 1:
        if (varying := _variation(workload)) <= _MOST_VARIATION:
            return ()
        return (
            f"tokens a step vary by {varying:.0%} with {flag_with('window', chosen)}: few samples "
            "hold most tokens, and those of short ones weigh more; raise --global-batch-size, or "
            f"use {flag_name('max_context_parallel')} or {flag_name('max_segments')} instead",
        )
    steps = min(WINDOW_STEPS, len(workload.batches) // _TRIED_WINDOW * _TRIED_WINDOW)
    workload = replace(workload, batches=workload.batches[:steps])
    if settings.config.batching == "arrival" or not steps or not unhideable_steps(workload):
        return ()
    config = replace(settings.config, window=_TRIED_WINDOW)
    dealt = replace(workload, plan_settings=replace(settings, config=config))
    try:
        speedup = _planned_ms(workload) / _planned_ms(dealt)
    except PlanError:
        return ()
    if speedup < _LEAST_FLAG_SPEEDUP:
        return ()
    return (
        f"steps wait for single samples of up to {max(map(max, workload.batches)):,} tokens: with "
        f"{flag_with('window', _TRIED_WINDOW)} they are predicted to be {speedup:.2f} "
        f"times as fast, their tokens to vary by {_variation(dealt):.0%} instead of "
        f"{_variation(workload):.0%}; other samples then share an optimizer step",
    )


def _planned_ms(workload: Workload) -> float:
    return sum(step.plan.expectation.makespan_ms for step in workload.planned_steps())


def _variation(workload: Workload) -> float:
    """Standard deviation over mean of tokens a step."""
    tokens = [sum(batch) for batch in workload.dealt_batches]
    return float(np.std(tokens) / np.mean(tokens))
