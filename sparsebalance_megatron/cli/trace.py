# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance trace``: steps of a run as a trace that Perfetto opens."""

from __future__ import annotations

import gzip
import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sparsebalance_megatron.cli.output import (
    check_outputs,
    print_notes,
    refuse_output_over_logs,
    writing,
)
from sparsebalance_megatron.log.reader import read_run_log
from sparsebalance_megatron.log.records import SIDES, StepRecord
from sparsebalance_megatron.view.report.run_report import ReportError, gather
from sparsebalance_megatron.view.report.timeline import Timeline
from sparsebalance_megatron.view.report.trace import Event, Tracer

_DEFAULT_STEPS = 10
_Step = tuple[StepRecord, Mapping[str, Timeline]]
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
    check_outputs({"--output": (arguments.output, (".json", ".gz"))})
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
    count = _write(arguments.output, _events(drawable))
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


def _left_out(steps: Sequence[_Step]) -> Iterator[str]:
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


def _events(steps: Sequence[_Step]) -> Iterator[Event]:
    tracer = Tracer()
    yield from tracer.begin()
    for step, timelines in steps:
        yield from tracer.add(step, timelines)


def _write(path: Path, events: Iterator[Event]) -> int:
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
