# SPDX-License-Identifier: Apache-2.0
"""Steps as Chrome trace events, which Perfetto and chrome://tracing open.

Format: "Trace Event Format", Google; complete events ("X"), counters ("C"), metadata ("M").
Times are microseconds with three decimals, so whole nanoseconds: neighbours never overlap.

Shape legend: M micro-batches, 2 forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

import numpy as np

from sparsebalance_megatron.learn.measurement import DIRECTIONS, Span
from sparsebalance_megatron.log.records import SIDES, Place, RankMicroBatch, StepRecord
from sparsebalance_megatron.view.report.timeline import Timeline

_RUN_PROCESS = 1
_PAUSE_NS = 1_000
"""Between steps that would touch."""
_SET_BACK_NS = 1_000_000_000
"""A step that seems to begin so long before the last has ended: the clock was set back."""

Event = dict[str, Any]
Thread = tuple[int, int]
"""Numbers of a process and of a thread in it."""


class Tracer:
    """Turns steps, given in order, into events.

    Predicted and measured are processes of their own, one per data-parallel rank, with a thread per
    stage. The measured steps keep their distance where the ranks logged when they began, and follow
    one another where not. A predicted step begins with its measured one, or when the predicted step
    before it has ended, if that is later.
    """

    def __init__(self) -> None:
        self._threads: dict[tuple[str, Place], Thread] = {}
        self._end_ns: dict[str, int] = {}
        self._first_unix_s: float | None = None

    def begin(self) -> Iterator[Event]:
        """Metadata that every trace starts with."""
        yield _metadata("process_name", _RUN_PROCESS, 0, name="run")
        yield _metadata("process_sort_index", _RUN_PROCESS, 0, sort_index=0)
        yield _metadata("thread_name", _RUN_PROCESS, _RUN_PROCESS, name="steps")

    def add(self, record: StepRecord, timelines: Mapping[str, Timeline]) -> Iterator[Event]:
        """The events of one step.

        Args:
            timelines: at least one, by side.
        """
        start_ns = self._start(next(iter(timelines.values())).start_unix_s)
        longest_ns = 0
        for side, timeline in timelines.items():
            origin_ns = max(start_ns, self._end_ns.get(side, 0))
            yield from self._side(side, timeline, origin_ns, record)
            length_ns = _ns(timeline.makespan_ms)
            self._end_ns[side] = origin_ns + length_ns + _PAUSE_NS
            if side == "measured" or not longest_ns:
                longest_ns = length_ns
        span_ns = (start_ns, start_ns + longest_ns)
        name = f"iteration {record.iteration}"
        arguments = _step_arguments(record, timelines)
        yield _complete(name, "step", (_RUN_PROCESS, _RUN_PROCESS), span_ns, arguments)
        yield from self._counters(record, start_ns)
        self._end_ns["run"] = start_ns + longest_ns + _PAUSE_NS

    def _start(self, start_unix_s: float | None) -> int:
        """The start by the wall clock where it is known, but never before the last step's end.

        Where it was set back, distances are counted anew from this step.
        """
        earliest_ns = max(self._end_ns.get("run", 0), self._end_ns.get("measured", 0))
        if start_unix_s is None:
            return earliest_ns
        if self._first_unix_s is None:
            self._first_unix_s = start_unix_s - earliest_ns * 1e-9
        start_ns = round((start_unix_s - self._first_unix_s) * 1e9)
        if start_ns < earliest_ns - _SET_BACK_NS:
            self._first_unix_s = start_unix_s - earliest_ns * 1e-9
        return max(earliest_ns, start_ns)

    def _side(
        self, side: str, timeline: Timeline, origin_ns: int, record: StepRecord
    ) -> Iterator[Event]:
        """Computing and waiting, as predicted or as measured."""
        for place, spans in timeline.spans.items():
            yield from self._introduce(side, place)
            for span in spans:
                chunk = f" chunk {span.chunk}" if record.shape[2] > 1 else ""
                yield _complete(
                    f"{span.direction} {span.position}{chunk}{timeline.segment_words(place, span)}",
                    side,
                    self._threads[side, place],
                    (origin_ns + _ns(span.start_ms), origin_ns + _ns(span.end_ms)),
                    _span_arguments(place, span, record, timeline),
                )
        for place, from_ms, to_ms in timeline.waiting_ms():
            if _ns(from_ms) < _ns(to_ms):
                yield _complete(
                    *("waiting", "waiting", self._threads[side, place]),
                    (origin_ns + _ns(from_ms), origin_ns + _ns(to_ms)),
                    {"iteration": record.iteration, "ms": round(to_ms - from_ms, 4)},
                )

    def _introduce(self, side: str, place: Place) -> Iterator[Event]:
        """Name the process and the thread of a stage when they first appear."""
        if (side, place) in self._threads:
            return
        rank, stage = place
        process = _process(side, rank)
        if all(known != side or of[0] != rank for known, of in self._threads):
            yield _metadata("process_name", process, 0, name=f"{side}, rank {rank}")
            order = 1 + rank + (1_000_000 if side == "measured" else 0)
            yield _metadata("process_sort_index", process, 0, sort_index=order)
        # Perfetto keeps threads apart by their number alone.
        thread = 1_000_000 + len(self._threads)
        self._threads[side, place] = (process, thread)
        yield _metadata("thread_name", process, thread, name=f"stage {stage}")
        yield _metadata("thread_sort_index", process, thread, sort_index=stage)

    def _counters(self, record: StepRecord, start_ns: int) -> Iterator[Event]:
        """Coverage and imbalance of the step."""
        figures = record.figures
        coverage = {"executed": figures.coverage, "at base budgets": figures.coverage_base}
        imbalances = {"predicted": figures.imbalance_predicted, "measured": figures.imbalance}
        tracks = [("coverage", coverage), ("imbalance of ranks", imbalances)]
        for name, values in tracks:
            known = {
                key: value for key, value in values.items() if value is not None and isfinite(value)
            }
            if known:
                at = {"pid": _RUN_PROCESS, "ts": _us(start_ns)}
                yield {"name": name, "ph": "C", **at, "args": known}


def _process(side: str, rank: int) -> int:
    return _RUN_PROCESS + 1 + len(SIDES) * rank + SIDES.index(side)


def _span_arguments(place: Place, span: Span, record: StepRecord, timeline: Timeline) -> Event:
    found: Event = {
        "iteration": record.iteration,
        "micro_batch": span.position,
        "chunk": span.chunk,
        "ms": round(span.ms, 4),
    }
    if record.in_segments:
        found["segment"] = span.segment
    index = (*place, span.chunk, span.position)
    if all(each < size for each, size in zip(index, record.shape, strict=True)):
        # Of the whole micro-batch.
        for side in SIDES:
            ms = float(record.passed_2RPVM(side)[DIRECTIONS.index(span.direction)][index])
            if isfinite(ms):
                found[f"{side}_ms"] = round(ms, 4)
        own_ms = float(record.times_2RPVM("measured")[DIRECTIONS.index(span.direction)][index])
        if record.waits_in_layers and isfinite(own_ms):
            found["own_ms"] = round(own_ms, 4)
    held = timeline.held(place, span)
    return found | _held_arguments(held, place) if held else found


def _held_arguments(held: RankMicroBatch, place: Place) -> Event:
    found: Event = {"tokens": held.tokens, "lengths_tokens": list(held.lengths_tokens)}
    if held.cp_size > 1:
        found |= {"cp_size": held.cp_size, "member": place[0] - held.rank}
    if held.budgets_LS.size:
        found["budgets_blocks_mean"] = held.budgets_LS.mean(axis=0).round(2).tolist()
        found["budgets_blocks_min"] = held.budgets_LS.min(axis=0).astype(int).tolist()
        found["budgets_blocks_max"] = held.budgets_LS.max(axis=0).astype(int).tolist()
    coverage = [value for value in held.coverage or () if value is not None]
    if coverage:
        found["coverage_mean"] = round(float(np.mean(coverage)), 5)
    return found


def _step_arguments(record: StepRecord, timelines: Mapping[str, Timeline]) -> Event:
    found: Event = {"iteration": record.iteration}
    for side, timeline in timelines.items():
        found[f"{side}_ms"] = round(timeline.makespan_ms, 4)
        found[f"{side}_known_from"] = timeline.source
    values = {name: getattr(record, name) for name in ("iteration_ms", "lm_loss", "tokens")}
    values |= {name: getattr(record.figures, name) for name in ("lower_bound_ms", "work_ratio")}
    return found | {name: value for name, value in values.items() if value is not None}


def _complete(
    name: str, category: str, where: Thread, span_ns: tuple[int, int], arguments: Event
) -> Event:
    (pid, tid), (start_ns, end_ns) = where, span_ns
    slice_ = {"name": name, "cat": category, "ph": "X", "pid": pid, "tid": tid}
    return slice_ | {"ts": _us(start_ns), "dur": _us(end_ns - start_ns), "args": arguments}


def _metadata(kind: str, process: int, thread: int, **arguments: Any) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _ns(ms: float) -> int:
    return round(ms * 1e6)


def _us(ns: int) -> float:
    return ns / 1_000
