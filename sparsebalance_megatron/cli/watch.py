# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance watch``: a run in progress, a row per step."""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

from sparsebalance_megatron.command_entry import Ended
from sparsebalance_megatron.log.reader import RunLogError, read_rank_logs, read_run_log
from sparsebalance_megatron.log.records import RunHeader, StepRecord
from sparsebalance_megatron.plan.job import lockstep_notice
from sparsebalance_megatron.text_table import shown_ms, wrapped
from sparsebalance_megatron.view.report.numbers import is_dense, split_time, tokens_per_second
from sparsebalance_megatron.view.report.words import slowest_device, slowest_text

_PAUSE_S = 2.0
_TAIL_BYTES = 4 << 20


def add_flags(parser: ArgumentParser) -> None:
    parser.description = (
        "Print a row for every step of a run that writes into --sparse-balance-log-dir, and which "
        "device is slowest. It ends with the run, or by Ctrl-C."
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN_DIR", help="the log directory")
    parser.add_argument("--once", action="store_true", help="show the last step, and end")


def run(arguments: Namespace) -> int:
    if arguments.once:
        read_run_log(arguments.run_directory, last_bytes=_TAIL_BYTES)
    watch = Watch(arguments.run_directory)
    try:
        while True:
            for line in watch.look():
                print(line, flush=True)
            if arguments.once or watch.ended:
                break
            time.sleep(_PAUSE_S)
    except KeyboardInterrupt as interrupt:  # Ctrl-C is the way to end it
        if isinstance(interrupt, Ended):
            raise
    return 0


_RECENT_STEPS = 10
"""What is said of devices and times looks at so many: single steps are noisy."""
_BAR_CHARACTERS, _COLUMNS = 6, 80
_WIDTHS = {
    **{"iteration": 13, "step, ms": 9, "tokens/s": 8, "loss": 7, "coverage": 8, "imbalance": 9},
    **{"waiting": 7, "to go": 5, "": 1},
}
_LEGEND = (
    "tokens/s: a GPU; imbalance: max/mean of what ranks compute;\n"
    "waiting: share of the step, the dots of the bar; to go: minutes"
)


class Watch:
    """Follows a run's step log; ``ended`` once its last iteration is there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ended = False
        self._iteration: int | None = None
        self._said: set[object] = set()

    def look(self) -> Iterator[str]:
        """Lines on what is new since the last look; of the steps at the first look, the last."""
        try:
            log = read_run_log(self.directory, last_bytes=_TAIL_BYTES)
        except RunLogError:
            if self._is_new("no step"):
                yield f"{self.directory}: no step is logged yet"
            return
        header, last, shown = log.header, log.steps[-1].iteration, self._iteration
        recent = log.steps[-_RECENT_STEPS:]
        recent_ms = [step.iteration_ms for step in recent if step.iteration_ms]
        typical_ms = median(recent_ms) if recent_ms else None
        if shown is None:
            lockstep_ranks = header.job.lockstep_ranks if header else 1
            yield from wrapped(lockstep_notice(lockstep_ranks) or "", columns=_COLUMNS)
            yield from (_LEGEND, _line({name: name for name in step_cells(recent[-1], header)}))
        new = [step for step in log.steps if shown is not None and step.iteration > shown]
        for step in new or (recent[-1:] if last != shown else ()):
            yield _line(step_cells(step, header, typical_ms))
        self._iteration = last
        if (slowest := slowest_device(recent)) and self._is_new(slowest[0]):
            yield slowest_text(*slowest, read_rank_logs(self.directory))
        if header and header.iterations is not None and last >= header.iterations:
            self.ended = True
            yield f"{last} of {header.iterations}, ended"

    def _is_new(self, what: object) -> bool:
        is_new = what not in self._said
        self._said.add(what)
        return is_new


def step_cells(
    step: StepRecord, header: RunHeader | None, typical_ms: float | None = None
) -> dict[str, str]:
    """A step's cells by their headings; ``typical_ms``: of recent steps. Dense attention, which
    reads everything, has no coverage."""
    split, iteration, left, bar = split_time([step]), str(step.iteration), "", ""
    waiting = split.waiting_ms / split.step_ms if split else None
    if waiting is not None:
        dots = round(waiting * _BAR_CHARACTERS)
        bar = "#" * (_BAR_CHARACTERS - dots) + "." * dots
    if header and header.iterations is not None:
        iteration += f" of {header.iterations}"
        if typical_ms is not None:
            left = f"{max(0, header.iterations - step.iteration) * typical_ms / 60e3:,.0f}"
    cells = {
        "iteration": iteration,
        "step, ms": _shown(step.iteration_ms, shown_ms),
        "tokens/s": _shown(tokens_per_second([step], header), "{:,.0f}".format),
        "loss": _shown(step.lm_loss, "{:.4g}".format),
        "coverage": _shown(step.figures.coverage, "{:.3f}".format),
        "imbalance": _shown(step.figures.imbalance, "{:.2f}".format),
        "waiting": _shown(waiting, "{:.0%}".format),
        "to go": left,
        "": bar,
    }
    if header and is_dense(header.config):
        del cells["coverage"]
    return cells


def _line(cells: Mapping[str, str]) -> str:
    """A row in at most 80 characters: the bar gives way to wide numbers."""
    return " ".join(text.rjust(_WIDTHS[name]) for name, text in cells.items())[:_COLUMNS].rstrip()


def _shown(value: float | None, layout: Callable[[float], str]) -> str:
    return "-" if value is None else layout(value)
