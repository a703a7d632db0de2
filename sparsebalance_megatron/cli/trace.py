# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance trace``: steps of a run as a trace that Perfetto opens."""

from __future__ import annotations

import gzip
import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.cli.output import (
    print_notes,
    refuse_output_over_logs,
    writing,
)
from sparsebalance_megatron.learn.measurement import DIRECTIONS, Span
from sparsebalance_megatron.log.reader import read_run_log
from sparsebalance_megatron.log.records import SIDES, Place, StepRecord
from sparsebalance_megatron.view.report.run_report import ReportError, gather
from sparsebalance_megatron.view.report.timeline import Timeline

_DEFAULT_STEPS = 10
_PAUSE_NS = 1_000
"""Between steps."""
_RUN_PROCESS = 1
_FIRST_PROCESS = {"predicted": 2, "measured": 1_000_002}

Event = dict[str, Any]
Thread = tuple[int, int]
"""Numbers of a process and of a thread in it."""
Step = tuple[StepRecord, Mapping[str, Timeline]]
"""A step with its timelines, by side."""


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``trace``."""
    parser.description = (
        "Write steps as Chrome trace events, predicted and measured side by side; open "
        "the file in ui.perfetto.dev or chrome://tracing."
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--steps",
        type=_range,
        metavar="A:B",
        help=f"iterations A to B, both included; default: the last {_DEFAULT_STEPS}",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("trace.json"),
        metavar="FILE",
        help="compressed if it ends in .gz; default: trace.json",
    )


def run(arguments: Namespace) -> int:
    """Read, write, say what was left out."""
    refuse_output_over_logs(arguments.output, arguments.run_directory)
    log = read_run_log(arguments.run_directory)
    wanted = log.steps[-_DEFAULT_STEPS:]
    if arguments.steps is not None:
        first, last = arguments.steps
        wanted = tuple(step for step in log.steps if first <= step.iteration <= last)
        if not wanted:
            raise ReportError(
                f"--steps {first}:{last}: not in {arguments.run_directory}, whose iterations are "
                f"{log.steps[0].iteration} to {log.steps[-1].iteration}; choose some of them"
            )
    evidence = gather(log, {step.iteration for step in wanted})
    steps = [(step, evidence.timelines(step.iteration)) for step in wanted]
    drawable = [(step, timelines) for step, timelines in steps if timelines]
    if not drawable:
        raise ReportError(
            f"{arguments.run_directory}: iterations {wanted[0].iteration} to "
            f"{wanted[-1].iteration} have neither predicted nor measured times of micro-batches"
        )
    count = _write(arguments.output, trace_events(drawable))
    print_notes([*evidence.problems, *_left_out(steps)])
    print(
        f"{len(drawable)} steps, {count:,} events written to {arguments.output}; open it in "
        "ui.perfetto.dev or chrome://tracing"
    )
    return 0


def _range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if colon and first.isdigit() and last.isdigit() and int(first) <= int(last):
        return int(first), int(last)
    raise ArgumentTypeError(f"{text!r}: expected A:B, two iterations with A not above B")


def _left_out(steps: Sequence[Step]) -> Iterator[str]:
    for side in SIDES:
        without = [step.iteration for step, timelines in steps if side not in timelines]
        if without:
            yield (
                f"{len(without)} of {len(steps)} steps have no {side} times of all micro-batches, "
                f"first iteration {without[0]}; their {side} slices are left out"
            )
    for step, timelines in steps:
        for timeline in timelines.values():
            yield from (f"iteration {step.iteration}: {remark}" for remark in timeline.remarks)


def trace_events(steps: Iterable[Step]) -> Iterator[Event]:
    """Chrome trace events of steps, which follow one another.

    Format: "Trace Event Format", Google; complete events ("X") and metadata ("M"). Times are
    microseconds with three decimals, so whole nanoseconds: neighbours never overlap. Predicted and
    measured times are processes of their own, one per data-parallel rank, with a thread per stage;
    both begin a step together.
    """
    run = (_RUN_PROCESS, _RUN_PROCESS)
    yield from _introduced(run, "run", "steps")
    threads: dict[tuple[str, Place], Thread] = {}
    start_ns = 0
    for record, timelines in steps:
        for side, timeline in timelines.items():
            for (rank, stage), spans in timeline.spans.items():
                # Perfetto keeps threads apart by their number alone.
                new = (_FIRST_PROCESS[side] + rank, _RUN_PROCESS + 1 + len(threads))
                thread = threads.setdefault((side, (rank, stage)), new)
                if thread is new:
                    yield from _introduced(thread, f"{side}, rank {rank}", f"stage {stage}")
                for span in spans:
                    chunk = f" chunk {span.chunk}" if record.shape[2] > 1 else ""
                    segment = timeline.segment_words((rank, stage), span)
                    yield _slice(
                        f"{span.direction} {span.position}{chunk}{segment}",
                        thread,
                        (start_ns + _ns(span.start_ms), start_ns + _ns(span.end_ms)),
                        {"cat": side, "args": _details(record, timeline, (rank, stage), span)},
                    )
        makespans_ms = {side: timeline.makespan_ms for side, timeline in timelines.items()}
        longest_ms = max(makespans_ms.values())
        end_ns = start_ns + _ns(makespans_ms.get("measured", longest_ms))
        known = {name: getattr(record, name) for name in ("iteration_ms", "lm_loss", "tokens")}
        known |= {f"{side}_ms": round(ms, 4) for side, ms in makespans_ms.items()}
        details = {"iteration": record.iteration, **known}
        yield _slice(
            *(f"iteration {record.iteration}", run, (start_ns, end_ns)),
            {"cat": "step", "args": details},
        )
        start_ns += _ns(longest_ms) + _PAUSE_NS


def _details(record: StepRecord, timeline: Timeline, place: Place, span: Span) -> Event:
    """What is known of an operation: its times on both sides, its samples and their budgets."""
    found: Event = {"iteration": record.iteration, "ms": round(span.ms, 4)}
    index = (DIRECTIONS.index(span.direction), *place, span.chunk, span.position)
    if all(each < size for each, size in zip(index[1:], record.shape, strict=True)):
        # Of the whole micro-batch.
        passed_ms = {f"{side}_ms": float(record.passed_2RPVM(side)[index]) for side in SIDES}
        own_ms = float(record.times_2RPVM("measured")[index])
        passed_ms |= {"own_ms": own_ms} if record.waits_in_layers else {}
        found |= {name: round(ms, 4) for name, ms in passed_ms.items() if np.isfinite(ms)}
    held = timeline.held(place, span)
    if held is not None:
        found |= {"cp_size": held.cp_size, "lengths_tokens": list(held.lengths_tokens)}
        if held.budgets_LS.size:
            found["budgets_blocks_mean"] = held.budgets_LS.mean(axis=0).round(2).tolist()
    return found


def _introduced(thread: Thread, process_name: str, thread_name: str) -> Iterator[Event]:
    """The names of a process and of a thread in it."""
    for kind, name in (("process_name", process_name), ("thread_name", thread_name)):
        yield {
            **{"name": kind, "ph": "M", "pid": thread[0], "tid": thread[1]},
            "args": {"name": name},
        }


def _slice(name: str, thread: Thread, span_ns: tuple[int, int], more: Event) -> Event:
    (process, number), (start_ns, end_ns) = thread, span_ns
    times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
    return {"name": name, "ph": "X", "pid": process, "tid": number, **times, **more}


def _ns(ms: float) -> int:
    return round(ms * 1e6)


def _write(path: Path, events: Iterable[Event]) -> int:
    """One event per line; the number of events."""
    count = 0
    opened = gzip.open if path.suffix == ".gz" else open
    with writing(path), opened(path, "wt", encoding="utf-8") as stream:
        stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for event in events:
            stream.write(",\n" * bool(count) + json.dumps(event))
            count += 1
        stream.write("\n]}\n")
    return count
