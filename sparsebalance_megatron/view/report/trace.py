# SPDX-License-Identifier: Apache-2.0
"""Steps as Chrome trace events, which Perfetto and chrome://tracing open.

Format: "Trace Event Format", Google; complete events ("X"), counters ("C"), flows ("s", "f"),
metadata ("M").
Times are microseconds with three decimals, so whole nanoseconds: neighbours never overlap.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, 2 forward
and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from sparsebalance_megatron.learn.measurement import DIRECTIONS
from sparsebalance_megatron.log.records import Place, RankMicroBatch, RankStep
from sparsebalance_megatron.log.steps import SIDES, MicroBatchTimes, Step
from sparsebalance_megatron.plan.metrics import imbalance
from sparsebalance_megatron.view.report.timeline import Bar, Timeline
from sparsebalance_megatron.view.report.trace_extras import device_ratios, same_work, waiting_ms

_RUN_PROCESS = 1
_PAUSE_NS = 1_000
"""Between steps that would touch."""
_SET_BACK_NS = 1_000_000_000
"""A step that seems to begin so long before the last has ended: the clock was set back."""

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """One step: its timelines where they are known, and what it held.

    ``start_unix_s``: when the first rank began, None where no rank said so.
    """

    iteration: int
    timelines: Mapping[str, Timeline]
    step: Step | None
    times: MicroBatchTimes | None
    contents: Mapping[Place, RankStep]
    start_unix_s: float | None


@dataclass
class Tracer:
    """Turns steps, given in order, into events.

    Predicted and measured are processes of their own, one per data-parallel rank, with a thread per
    stage. The measured steps keep their distance where the ranks logged when they began, and follow
    one another where not. A predicted step begins with its measured one, or when the predicted step
    before it has ended, if that is later. Arrows join what was predicted and what was measured of
    the same work, from the earlier to the later.
    """

    _ids: dict[tuple[str, int], int] = field(default_factory=dict)
    _threads: dict[tuple[str, Place], int] = field(default_factory=dict)
    _end_ns: dict[str, int] = field(default_factory=dict)
    _flows: int = 0
    _first_unix_s: float | None = None

    def begin(self) -> Iterator[Event]:
        """Metadata that every trace starts with."""
        yield _metadata("process_name", _RUN_PROCESS, 0, name="run")
        yield _metadata("process_sort_index", _RUN_PROCESS, 0, sort_index=0)
        yield _metadata("thread_name", _RUN_PROCESS, _RUN_PROCESS, name="steps")

    def add(self, traced: TracedStep) -> Iterator[Event]:
        """The events of one step."""
        start_ns = self._start(traced)
        longest_ns = 0
        origins_ns: dict[str, int] = {}
        for side in SIDES:
            timeline = traced.timelines.get(side)
            if timeline is None:
                continue
            origin_ns = origins_ns[side] = max(start_ns, self._end_ns.get(side, 0))
            for place in timeline.places:
                yield from self._introduce(side, place)
            for bar in timeline.bars:
                yield self._slice(side, bar, origin_ns, traced)
            for place, from_ms, to_ms in waiting_ms(timeline):
                if _ns(from_ms) < _ns(to_ms):
                    yield _complete(
                        "waiting",
                        "waiting",
                        self._where(side, place),
                        (origin_ns + _ns(from_ms), origin_ns + _ns(to_ms)),
                        {"iteration": traced.iteration, "ms": round(to_ms - from_ms, 4)},
                    )
            length_ns = _ns(timeline.makespan_ms)
            self._end_ns[side] = origin_ns + length_ns + _PAUSE_NS
            if side == "measured" or not longest_ns:
                longest_ns = length_ns
        yield _complete(
            f"iteration {traced.iteration}",
            "step",
            (_RUN_PROCESS, _RUN_PROCESS),
            (start_ns, start_ns + longest_ns),
            _step_arguments(traced),
        )
        yield from self._arrows(traced, origins_ns)
        yield from _counters(traced.step, start_ns)
        yield from self._device_counters(traced, start_ns)
        self._end_ns["run"] = start_ns + longest_ns + _PAUSE_NS

    def _start(self, traced: TracedStep) -> int:
        """The start by the wall clock where it is known, but never before the last step's end.

        Where it was set back, distances are counted anew from this step.
        """
        earliest_ns = max(self._end_ns.get("run", 0), self._end_ns.get("measured", 0))
        if traced.start_unix_s is None:
            return earliest_ns
        if self._first_unix_s is None:
            self._first_unix_s = traced.start_unix_s - earliest_ns * 1e-9
        start_ns = round((traced.start_unix_s - self._first_unix_s) * 1e9)
        if start_ns < earliest_ns - _SET_BACK_NS:
            self._first_unix_s = traced.start_unix_s - earliest_ns * 1e-9
        return max(earliest_ns, start_ns)

    def _introduce(self, side: str, place: Place) -> Iterator[Event]:
        """Name the process and the thread of a stage when they first appear."""
        rank, stage = place
        if (side, rank) not in self._ids:
            process = self._ids[side, rank] = _RUN_PROCESS + 1 + len(self._ids)
            yield _metadata("process_name", process, 0, name=f"{side}, rank {rank}")
            order = 1 + rank + (1_000_000 if side == "measured" else 0)
            yield _metadata("process_sort_index", process, 0, sort_index=order)
        if (side, place) not in self._threads:
            # Perfetto keeps threads apart by their number alone.
            thread = self._threads[side, place] = 1_000_000 + len(self._threads)
            process = self._ids[side, rank]
            yield _metadata("thread_name", process, thread, name=f"stage {stage}")
            yield _metadata("thread_sort_index", process, thread, sort_index=stage)

    def _slice(self, side: str, bar: Bar, origin_ns: int, traced: TracedStep) -> Event:
        chunk = f" chunk {bar.chunk}" if traced.times and traced.times.shape[2] > 1 else ""
        return _complete(
            f"{bar.direction} {bar.position}{chunk}",
            side,
            self._where(side, bar.place),
            (origin_ns + _ns(bar.start_ms), origin_ns + _ns(bar.end_ms)),
            _bar_arguments(bar, traced),
        )

    def _where(self, side: str, place: Place) -> tuple[int, int]:
        """Process and thread."""
        return self._ids[side, place[0]], self._threads[side, place]

    def _arrows(self, traced: TracedStep, origins_ns: Mapping[str, int]) -> Iterator[Event]:
        """Perfetto drops arrows that point back in time, so the earlier slice is the tail."""
        sides = (traced.timelines.get(side) for side in SIDES)
        for bars in same_work(*sides):
            self._flows += 1
            ends = sorted(
                (origins_ns[side] + _ns((bar.start_ms + bar.end_ms) / 2), side, bar.place)
                for side, bar in zip(SIDES, bars, strict=True)
            )
            for phase, (at_ns, side, place) in zip(("s", "f"), ends, strict=True):
                process, thread = self._where(side, place)
                yield {
                    "name": "the same work",
                    "cat": "prediction",
                    "ph": phase,
                    "id": self._flows,
                    "pid": process,
                    "tid": thread,
                    "ts": _us(at_ns),
                    # Binds the arrow to the slice around it, not to the next one.
                    **({"bp": "e"} if phase == "f" else {}),
                }

    def _device_counters(self, traced: TracedStep, start_ns: int) -> Iterator[Event]:
        for (rank, stage), ratio in device_ratios(traced.times):
            if ("measured", rank) in self._ids:
                name = f"measured over predicted, stage {stage}"
                process = self._ids["measured", rank]
                yield _counter(name, process, start_ns, {"ratio": round(ratio, 4)})


def _bar_arguments(bar: Bar, traced: TracedStep) -> Event:
    found: Event = {
        "iteration": traced.iteration,
        "micro_batch": bar.position,
        "chunk": bar.chunk,
        "ms": round(bar.ms, 4),
    }
    for side in SIDES:
        ms = _side_ms(traced.times, side, bar)
        if ms is not None:
            found[f"{side}_ms"] = round(ms, 4)
    held = _micro_batch(traced.contents.get(bar.place), bar.position)
    if held is not None:
        found["tokens"] = held.tokens
        if held.width > 1:
            found["ranks_of_row"], found["member_of_row"] = held.width, held.member
        found["lengths_tokens"] = list(held.lengths_tokens)
        if held.budgets_LS.size:
            found["budgets_blocks_mean"] = held.budgets_LS.mean(axis=0).round(2).tolist()
            found["budgets_blocks_min"] = held.budgets_LS.min(axis=0).astype(int).tolist()
            found["budgets_blocks_max"] = held.budgets_LS.max(axis=0).astype(int).tolist()
        coverage = [value for value in held.coverage_S if value is not None]
        if coverage:
            found["coverage_mean"] = round(sum(coverage) / len(coverage), 5)
    return found


def _side_ms(times: MicroBatchTimes | None, side: str, bar: Bar) -> float | None:
    """The time that the step log has for it; None where there is none."""
    times_2RPVM = None if times is None else times.side(side)
    if times_2RPVM is None:
        return None
    place = (DIRECTIONS.index(bar.direction), *bar.place, bar.chunk, bar.position)
    if any(index >= size for index, size in zip(place, times_2RPVM.shape, strict=True)):
        return None
    ms = float(times_2RPVM[place])
    return ms if isfinite(ms) else None


def _micro_batch(step: RankStep | None, position: int) -> RankMicroBatch | None:
    micro_batches: Sequence[RankMicroBatch] = () if step is None else step.micro_batches
    return next((each for each in micro_batches if each.position == position), None)


def _step_arguments(traced: TracedStep) -> Event:
    found: Event = {"iteration": traced.iteration}
    for side, timeline in traced.timelines.items():
        found[f"{side}_ms"] = round(timeline.makespan_ms, 4)
        found[f"{side}_known_from"] = timeline.source
    names = ("iteration_ms", "lm_loss", "tokens", "lower_bound_ms", "work_ratio")
    values = {name: getattr(traced.step, name, None) for name in names}
    return found | {name: value for name, value in values.items() if value is not None}


def _counters(step: Step | None, start_ns: int) -> Iterator[Event]:
    if step is None:
        return
    predicted_ms, measured_ms = step.predicted_rank_ms, step.measured_rank_ms
    tracks = {
        "coverage": {"executed": step.coverage, "at base budgets": step.coverage_base},
        "imbalance of ranks": {
            "predicted": imbalance(predicted_ms) if predicted_ms else None,
            "measured": imbalance(measured_ms) if measured_ms else None,
        },
    }
    for name, values in tracks.items():
        known = {key: value for key, value in values.items() if value is not None}
        if known:
            yield _counter(name, _RUN_PROCESS, start_ns, known)


def _counter(name: str, process: int, at_ns: int, values: Event) -> Event:
    return {"name": name, "ph": "C", "pid": process, "ts": _us(at_ns), "args": values}


def _complete(
    name: str, category: str, where: tuple[int, int], span_ns: tuple[int, int], arguments: Event
) -> Event:
    start_ns, end_ns = span_ns
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": where[0],
        "tid": where[1],
        "ts": _us(start_ns),
        "dur": _us(end_ns - start_ns),
        "args": arguments,
    }


def _metadata(kind: str, process: int, thread: int, **arguments: Any) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _ns(ms: float) -> int:
    return round(ms * 1e6)


def _us(ns: int) -> float:
    return ns / 1_000
