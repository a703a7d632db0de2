# SPDX-License-Identifier: Apache-2.0
"""Operations of every stage of every rank in one step, with their measured times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.learn.measurement import Span
from sparsebalance_megatron.log.records import Place, RankStep, StepRecord

_LONGEST_WAIT_S = 60.0
"""For data, of one rank, while others of its step already compute."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of one run: forwards and backwards of every stage, in ms since the step began.

    ``waited_ms``: of all spans together, for other ranks in their layers. ``remarks``: what is not
    in it.
    """

    spans: Mapping[Place, Sequence[Span]]
    waited_ms: float = 0.0
    remarks: tuple[str, ...] = ()

    @property
    def makespan_ms(self) -> float:
        return max(span.end_ms for spans in self.spans.values() for span in spans)

    @property
    def busy_share(self) -> float:
        """Computing time over the time that all stages together have until the step's end."""
        available_ms = self.makespan_ms * len(self.spans)
        busy_ms = sum(span.ms for spans in self.spans.values() for span in spans) - self.waited_ms
        return busy_ms / available_ms if available_ms else 1.0


def measured_timeline(record: StepRecord, ranks: Mapping[Place, RankStep]) -> Timeline | None:
    """What the ranks logged of a step; None where none did.

    Ranks are set side by side by the wall clocks of their hosts, as long as those can be right:
    ranks begin a step together to within what they wait for data, so clocks that lie further apart
    were set wrong, or set anew in the middle of the step.
    """
    spoken = {place: step for place, step in sorted(ranks.items()) if step.spans}
    if not spoken:
        return None
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
    waiting_2RPVM, waited_ms = record.measured.waiting_2RPVM, 0.0
    if waiting_2RPVM is not None:
        places = [place for place in record.places if place in spans]
        waited_ms = float(sum(np.nansum(waiting_2RPVM[:, rank, stage]) for rank, stage in places))
    return Timeline(spans=spans, waited_ms=waited_ms, remarks=tuple(remarks))


def named_places(places: Sequence[Place]) -> str:
    shown = ", ".join(f"rank {rank} stage {stage}" for rank, stage in places[:4])
    return shown + (f" and {len(places) - 4} more" if len(places) > 4 else "")
