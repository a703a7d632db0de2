# SPDX-License-Identifier: Apache-2.0
"""What every stage of every rank did in one step, and when: as predicted, and as measured.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, 2 forward
and backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.log.records import Place, RankStep
from sparsebalance_megatron.log.steps import MicroBatchTimes
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.orders import Schedule, megatron_order
from sparsebalance_megatron.plan.pipeline.simulator import simulate
from sparsebalance_megatron.plan.step_plan import PlanError

PREDICTED = "the schedule simulated with the predicted times"
SIMULATED = (
    "times are measured, but starts were not logged: the schedule is simulated with the times"
)
MEASURED = "starts and ends by the clocks of the ranks"
_LONGEST_WAIT_S = 60.0
"""For data, of one rank, while others of its step already compute."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A forward or a backward of one chunk for one micro-batch, in ms since the step began."""

    place: Place
    direction: str
    chunk: int
    position: int
    start_ms: float
    end_ms: float

    @property
    def ms(self) -> float:
        return self.end_ms - self.start_ms


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of one run.

    ``source``: how starts are known, :data:`PREDICTED`, :data:`SIMULATED` or :data:`MEASURED`.
    ``remarks``: what is not in it.
    """

    bars: tuple[Bar, ...]
    source: str
    remarks: tuple[str, ...] = ()

    @property
    def makespan_ms(self) -> float:
        return max(bar.end_ms for bar in self.bars)

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(sorted({bar.place for bar in self.bars}))

    @property
    def busy_share(self) -> float:
        """Computing time over the time that all stages together have until the step's end."""
        available_ms = self.makespan_ms * len(self.places)
        return sum(bar.ms for bar in self.bars) / available_ms if available_ms else 1.0


def predicted_timeline(
    times: MicroBatchTimes,
    schedule: Schedule = megatron_order,
) -> Timeline | None:
    """The schedule of the run simulated with predicted times; None where a log has totals only."""
    if times.predicted_2RPVM is None:
        return None
    return _simulated(times.predicted_2RPVM, PREDICTED, times.cp_sizes_RM, schedule)


def measured_timeline(
    times: MicroBatchTimes | None,
    ranks: Mapping[Place, RankStep],
    expected: Iterable[Place] = (),
    schedule: Schedule = megatron_order,
) -> Timeline | None:
    """True starts where ranks logged them, or else the schedule simulated with measured times.

    Args:
        times: of the step log, if there is one.
        ranks: what every rank logged of this step.
        expected: all stages of all ranks, to say which are missing.
        schedule: of the run.

    Returns:
        None where neither is complete enough.
    """
    if any(step.spans for step in ranks.values()):
        return _measured(ranks, expected)
    if times is None:
        return None
    return _simulated(times.measured_2RPVM, SIMULATED, times.cp_sizes_RM, schedule)


def _simulated(
    times_2RPVM: np.ndarray, source: str, cp_sizes_RM: np.ndarray, schedule: Schedule
) -> Timeline | None:
    """None where a time is missing or negative."""
    try:
        events_R = simulate(OperationTimes.of_micro_batches(times_2RPVM, cp_sizes_RM, schedule))
    except PlanError:
        return None
    return Timeline(
        bars=tuple(
            Bar(
                place=(rank, event.stage),
                direction=event.direction,
                chunk=event.chunk,
                position=event.micro_batch,
                start_ms=event.start_ms,
                end_ms=event.end_ms,
            )
            for rank, events in enumerate(events_R)
            for event in events
        ),
        source=source,
    )


def _measured(ranks: Mapping[Place, RankStep], expected: Iterable[Place]) -> Timeline:
    """Ranks are set side by side by the wall clocks of their hosts, as long as those can be right.

    Ranks begin a step together to within what they wait for data: clocks that lie further apart
    were set wrong, or set anew in the middle of the step.
    """
    spoken = {place: step for place, step in ranks.items() if step.spans}
    origins_s = {place: step.start_unix_s for place, step in spoken.items()}
    known_s = [start for start in origins_s.values() if start is not None]
    remarks = []
    if missing := sorted(set(expected) - set(spoken)):
        remarks.append(f"{named_places(missing)}: nothing logged of this step")
    if len(known_s) < len(spoken):
        remarks.append("ranks without a wall-clock time are drawn from the step's start")
    first_s = min(known_s, default=0.0)
    longest_ms = max((span.end_ms for step in spoken.values() for span in step.spans), default=0.0)
    if max(known_s, default=0.0) - first_s > _LONGEST_WAIT_S + longest_ms / 1e3:
        remarks.append("the wall clocks of ranks disagree: all are drawn from the step's start")
        origins_s = dict.fromkeys(spoken, None)
    offsets_ms = {
        place: 0.0 if start_s is None else (start_s - first_s) * 1e3
        for place, start_s in origins_s.items()
    }
    return Timeline(
        bars=tuple(
            Bar(
                place=place,
                direction=span.direction,
                chunk=span.chunk,
                position=span.position,
                start_ms=offsets_ms[place] + span.start_ms,
                end_ms=offsets_ms[place] + span.end_ms,
            )
            for place, step in sorted(spoken.items())
            for span in step.spans
        ),
        source=MEASURED,
        remarks=tuple(remarks),
    )


def named_places(places: Sequence[Place]) -> str:
    """The first four, and how many more there are."""
    shown = ", ".join(f"rank {rank} stage {stage}" for rank, stage in places[:4])
    return shown + (f" and {len(places) - 4} more" if len(places) > 4 else "")
