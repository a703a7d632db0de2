# SPDX-License-Identifier: Apache-2.0
"""Operations of every stage of every rank in one step, with their measured times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsebalance_megatron.learn.measurement import Span
from sparsebalance_megatron.log.records import Place, RankStep, StepRecord

_LONGEST_WAIT_S = 60.0
"""For data, of one rank, while others of its step already compute."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of one run: forwards and backwards of every stage, in ms since the step began.

    ``waiting_share``: of the step's time, the mean over stages; None where it was not measured.
    ``remarks``: what is not in it.
    """

    spans: Mapping[Place, Sequence[Span]]
    waiting_share: float | None = None
    remarks: tuple[str, ...] = ()

    @property
    def makespan_ms(self) -> float:
        return max(span.end_ms for spans in self.spans.values() for span in spans)


def measured_timeline(record: StepRecord, ranks: Mapping[Place, RankStep]) -> Timeline | None:
    """What the ranks logged of a step; None where none did.

    Ranks are set side by side by the wall clocks of their hosts, as long as those can be right:
    ranks begin a step together to within what they wait for data, so clocks that lie further apart
    were set wrong, or set anew in the middle of the step.
    """
    starts_s = {
        place: step.start_unix_s
        for place, step in sorted(ranks.items())
        if step.spans and step.start_unix_s is not None
    }
    if not starts_s:
        return None
    remarks = []
    if missing := [place for place in record.places if place not in starts_s]:
        remarks.append(f"{named_places(missing)}: nothing logged of this step")
    longest_ms = max(span.end_ms for place in starts_s for span in ranks[place].spans)
    if max(starts_s.values()) - min(starts_s.values()) > _LONGEST_WAIT_S + longest_ms / 1e3:
        remarks.append("the wall clocks of ranks disagree: all are drawn from the step's start")
        starts_s = dict.fromkeys(starts_s, 0.0)
    first_s, spans = min(starts_s.values()), {}
    for place, start_s in starts_s.items():
        offset_ms = (start_s - first_s) * 1e3
        spans[place] = [
            span._replace(start_ms=offset_ms + span.start_ms, end_ms=offset_ms + span.end_ms)
            for span in ranks[place].spans
        ]
    return Timeline(spans=spans, waiting_share=record.figures.waiting_share, remarks=tuple(remarks))


def named_places(places: Sequence[Place]) -> str:
    shown = ", ".join(f"rank {rank} stage {stage}" for rank, stage in places[:4])
    return shown + (f" and {len(places) - 4} more" if len(places) > 4 else "")
