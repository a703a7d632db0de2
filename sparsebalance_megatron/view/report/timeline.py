# SPDX-License-Identifier: Apache-2.0
"""Operations of every stage of every rank in one step, with their times: predicted, and measured.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches,
U segments, O operations, 2 forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sparsebalance_megatron.learn.measurement import Span
from sparsebalance_megatron.log.records import Place, RankMicroBatch, RankStep, StepRecord
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.orders import Schedule, megatron_order
from sparsebalance_megatron.plan.pipeline.simulator import Event, simulate
from sparsebalance_megatron.plan.step_plan import PlanError

PREDICTED = "the schedule simulated with the predicted times"
SIMULATED = (
    "times are measured, but starts were not logged: the schedule is simulated with the times"
)
MEASURED = "starts and ends by the clocks of the ranks"
_LONGEST_WAIT_S = 60.0
"""For data, of one rank, while others of its step already compute."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of one run: forwards and backwards of every stage, in ms since the step began.

    ``source``: how starts are known, :data:`PREDICTED`, :data:`SIMULATED` or :data:`MEASURED`.
    ``segments``: of the micro-batches of every rank; none where they run whole. ``waited_ms``: of
    all spans together, for other ranks in their layers. ``remarks``: what is not in it.
    ``contents``: what the ranks logged of the step.
    """

    spans: Mapping[Place, Sequence[Span]]
    source: str
    segments: Sequence[Sequence[int]] = ()
    waited_ms: float = 0.0
    remarks: tuple[str, ...] = ()
    contents: Mapping[Place, RankStep] = field(default_factory=dict)

    @property
    def start_unix_s(self) -> float | None:
        """When the first rank began; None where no rank said so."""
        starts_s = [step.start_unix_s for step in self.contents.values() if step.spans]
        return min((start_s for start_s in starts_s if start_s is not None), default=None)

    @property
    def makespan_ms(self) -> float:
        return max(span.end_ms for spans in self.spans.values() for span in spans)

    @property
    def busy_share(self) -> float:
        """Computing time over the time that all stages together have until the step's end."""
        available_ms = self.makespan_ms * len(self.spans)
        busy_ms = sum(span.ms for spans in self.spans.values() for span in spans) - self.waited_ms
        return busy_ms / available_ms if available_ms else 1.0

    def segment_words(self, place: Place, span: Span) -> str:
        """``" segment 2 of 4"``; empty where the micro-batch has one segment."""
        # A rank's own log may say more than the step's.
        known = self.segments[place[0]] if place[0] < len(self.segments) else ()
        segments = known[span.position] if span.position < len(known) else 1
        return f" segment {span.segment + 1} of {segments}" if segments > 1 else ""

    def held(self, place: Place, span: Span) -> RankMicroBatch | None:
        """The micro-batch of a span; None where its rank did not log it."""
        step = self.contents.get(place)
        held = step.micro_batches if step else ()
        return next((each for each in held if each.position == span.position), None)

    def waiting_ms(self) -> Iterator[tuple[Place, float, float]]:
        """Place, start and end of all time until the step's end in which a stage computes
        nothing."""
        end_ms = self.makespan_ms
        for place, spans in self.spans.items():
            free_ms = 0.0
            for span in sorted(spans, key=lambda span: (span.start_ms, span.end_ms)):
                if span.start_ms > free_ms:
                    yield place, free_ms, span.start_ms
                free_ms = max(free_ms, span.end_ms)
            if end_ms > free_ms:
                yield place, free_ms, end_ms


def simulated_timeline(
    record: StepRecord, side: str, schedule: Schedule = megatron_order
) -> Timeline | None:
    """The schedule of the run simulated with the predicted or the measured times.

    Segments take equal parts of a micro-batch where their own times are not known.

    Returns:
        None where a time is missing or negative.
    """
    try:
        events_R = _simulated(record, side, schedule)
    except PlanError:
        return None
    spans: dict[Place, list[Span]] = {place: [] for place in record.places}
    for rank, events in enumerate(events_R):
        for event in events:
            what = event.direction, event.chunk, event.micro_batch
            spans[rank, event.stage].append(
                Span(*what, event.start_ms, event.end_ms, event.segment)
            )
    source = PREDICTED if side == "predicted" else SIMULATED
    return Timeline(
        spans=spans,
        source=source,
        segments=record.segments_RM.tolist(),
        waited_ms=_waited_ms(record, side, spans),
    )


def _waited_ms(record: StepRecord, side: str, places: Iterable[Place]) -> float:
    """What these places waited for other ranks within layers."""
    waited_2RPVM = record.passed_2RPVM(side) - record.times_2RPVM(side)
    return float(sum(np.nansum(waited_2RPVM[:, rank, stage]) for rank, stage in places))


def _simulated(record: StepRecord, side: str, schedule: Schedule) -> Sequence[Sequence[Event]]:
    """Events of every rank; raises PlanError where a time is missing or negative."""
    times_2RPVM, segments_RM = record.passed_2RPVM(side), record.segments_RM
    if not record.in_segments:
        return simulate(OperationTimes.of_micro_batches(times_2RPVM, record.cp_sizes_RM, schedule))
    ms_R2PU: Sequence[np.ndarray] = [
        (times_2RPVM[:, rank, :, 0] / segments_M).repeat(segments_M, axis=2)
        for rank, segments_M in enumerate(segments_RM)
    ]
    if side == "predicted" and record.predicted.segment_ms:
        ms_R2PU = record.predicted.segment_ms
    ms_2UP = np.concatenate(ms_R2PU, axis=2).swapaxes(1, 2)
    times = OperationTimes.of_segments(segments_RM.tolist(), ms_2UP, record.cp_sizes_RM)
    # The micro-batches of all ranks, one after another.
    (events,) = simulate(times)
    events_R: list[list[Event]] = [[] for _ in segments_RM]
    for event in events:
        rank, position = divmod(event.micro_batch, segments_RM.shape[1])
        events_R[rank].append(replace(event, micro_batch=position))
    return events_R


def measured_timeline(
    record: StepRecord, ranks: Mapping[Place, RankStep], schedule: Schedule = megatron_order
) -> Timeline | None:
    """True starts where ranks logged them, or else the schedule simulated with measured times.

    Ranks are set side by side by the wall clocks of their hosts, as long as those can be right:
    ranks begin a step together to within what they wait for data, so clocks that lie further apart
    were set wrong, or set anew in the middle of the step.

    Args:
        ranks: what every rank logged of this step.
        schedule: of the run.

    Returns:
        None where neither is complete enough.
    """
    spoken = {place: step for place, step in sorted(ranks.items()) if step.spans}
    if not spoken:
        return simulated_timeline(record, "measured", schedule)
    starts_s = {place: step.start_unix_s for place, step in spoken.items()}
    known_s = [start_s for start_s in starts_s.values() if start_s is not None]
    remarks = []
    if missing := [place for place in record.places if place not in spoken]:
        remarks.append(f"{named_places(missing)}: nothing logged of this step")
    if len(known_s) < len(spoken):
        remarks.append("ranks without a wall-clock time are drawn from the step's start")
    first_s = min(known_s, default=0.0)
    longest_ms = max(span.end_ms for step in spoken.values() for span in step.spans)
    if max(known_s, default=0.0) - first_s > _LONGEST_WAIT_S + longest_ms / 1e3:
        remarks.append("the wall clocks of ranks disagree: all are drawn from the step's start")
        starts_s = dict.fromkeys(spoken, None)
    spans = {}
    for place, step in spoken.items():
        start_s = starts_s[place]
        offset_ms = 0.0 if start_s is None else (start_s - first_s) * 1e3
        spans[place] = [
            span._replace(start_ms=offset_ms + span.start_ms, end_ms=offset_ms + span.end_ms)
            for span in step.spans
        ]
    return Timeline(
        spans=spans,
        source=MEASURED,
        segments=record.segments_RM.tolist(),
        waited_ms=_waited_ms(record, "measured", [each for each in spans if each in record.places]),
        remarks=tuple(remarks),
    )


def named_places(places: Sequence[Place]) -> str:
    """The first four, and how many more there are."""
    shown = ", ".join(f"rank {rank} stage {stage}" for rank, stage in places[:4])
    return shown + (f" and {len(places) - 4} more" if len(places) > 4 else "")
