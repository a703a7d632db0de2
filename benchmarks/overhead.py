# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs a training step beside the attention itself, on the quickstart's model.

Trains as scripts/quickstart.sh does, with balancing, step log, rank logs and TensorBoard on, and
measures from outside everything that the plugin does where training waits for it:

- forward_step: the forward step without the model: waiting for the plan, reading and packing
  documents (which any data loader does too), layout, hooks; and taking the loss.
- end_step: after Megatron's gradient reduction until it goes on: the plugin's own reduction,
  learning, log line, logs, scalars. Ranks first meet at a barrier that only this benchmark adds, so
  that waiting for a slower rank is not counted; it is reported as waited_for_ranks.
- timers: reading the clock around every forward and backward.

The sum is held against the iteration, per step, for the rank that pays most. Beside it stand what
runs in the background (planning the next step, writing logs), what the attention modules spend on
observing coverage, and the plugin's own account (``host_ms`` of the step log).
A comparison of whole iterations with and without would not show the cost: iterations vary by more.

    python benchmarks/overhead.py --json benchmarks/results/overhead.json

Needs two idle cores, and the packages that the quickstart installs. --quick shows in seconds that
it runs; its figures say nothing.
"""

import argparse
import atexit
import functools
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from end_to_end import launch
from end_to_end.command import machine
from forked_ranks import cpu_environment, run_ranks

REPOSITORY = Path(__file__).parents[1]
QUICKSTART = REPOSITORY / "scripts" / "quickstart.sh"
RANKS = 2
LIMIT_S = 3600.0
WARM_UP_STEPS = 5
QUICK_FLAGS = (
    *("--seq-length", "256", "--max-position-embeddings", "256", "--lr-warmup-iters", "0"),
)
PARTS = ("forward_step", "end_step", "timers")
ASIDE = ("waited_for_ranks", "observe_coverage")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="measured steps, after warm-up")
    parser.add_argument("--data", type=Path, help="prefix of data prepared as the quickstart does")
    parser.add_argument("--quick", action="store_true", help="two steps of short documents")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        warm_up = 1 if arguments.quick else WARM_UP_STEPS
        steps = warm_up + (2 if arguments.quick else arguments.steps)
        train_under_instruments(directory, arguments.data, steps, quick=arguments.quick)
        result = {"machine": machine("cpu"), "ranks": RANKS, **summary(directory, warm_up)}
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n", encoding="utf-8")


def train_under_instruments(directory: Path, data: Path | None, steps: int, *, quick: bool) -> None:
    """Train under :class:`Instruments`, with data and cost table made as the quickstart does."""
    if data is None:
        data = directory / "data"
        if quick:
            write_few_documents(Path(f"{data}.jsonl"))
        launch.prepared_data(data)
    flags = [
        *(flag for name in ("MODEL", "TRAINING", "DATA") for flag in quickstart_flags(name, data)),
        *quickstart_flags("SPARSE_BALANCE", data),
        *("--train-iters", str(steps)),
        *(QUICK_FLAGS if quick else ()),
    ]
    table = launch.profile(flags, directory / "costs.json", device="cpu", quick=True)
    train(
        RANKS,
        *(__file__, "worker", str(directory), *flags),
        *("--sparse-balance-cost-table", str(table), "--sparse-balance-log-dir", str(directory)),
        *("--tensorboard-dir", str(directory / "tensorboard")),
    )


def train(ranks: int, *program: str) -> None:
    """Run a program as all ranks; its output only if it fails."""
    with tempfile.NamedTemporaryFile() as output:
        code = run_ranks(
            ranks,
            program,
            environment=cpu_environment(),
            output=Path(output.name),
            timeout_s=LIMIT_S,
        )
        if code != 0:
            printed = Path(output.name).read_text(encoding="utf-8", errors="replace")
            sys.exit(f"training failed, exit code {code}:\n{printed[-6000:]}")


def write_few_documents(path: Path) -> None:
    """JSON lines of the lines of this file."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    texts = ["\n".join(lines[start : start + 8]) for start in range(0, len(lines) - 8, 4)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")


def quickstart_flags(array: str, data: Path) -> list[str]:
    """The flags of one array of the quickstart's script."""
    script = QUICKSTART.read_text(encoding="utf-8")
    found = re.search(rf"^{array}_ARGS=\(\n(.*?)^\)", script, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"{QUICKSTART}: no {array}_ARGS=(...)")
    words = found[1].replace("${DATA}", str(data)).split()
    return [word.strip("'\"") for word in words]


class Instruments:
    """Times the plugin's functions from outside, in one rank's process.

    ``steps`` holds ms by part, one entry per step of training.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.writer_thread_ms = 0.0
        self._ms: defaultdict[str, float] = defaultdict(float)
        self._watched: set[int] = set()
        self._model_began_s = 0.0

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self._ms[part] += (time.perf_counter() - began_s) * 1e3

    def install(self) -> None:
        from sparsebalance_megatron.log.files import LogWriter
        from sparsebalance_megatron.megatron.core_attention import BudgetedCoreAttention
        from sparsebalance_megatron.megatron.timing import RecordingTimers, _RecordingTimer
        from sparsebalance_megatron.run.forward_step import ForwardStep
        from sparsebalance_megatron.run.run import Run
        from sparsebalance_megatron.run.step_reducer import StepReducer

        self._wrap(ForwardStep, "__call__", self._forward_step)
        self._wrap(Run, "end_step", self._end_step)
        self._wrap(StepReducer, "_sum", self._meet_first)
        self._wrap(LogWriter, "_write", self._work)
        for owner, name, part in (
            (Run, "add_loss", "forward_step"),
            (BudgetedCoreAttention, "observe", "observe_coverage"),
            (RecordingTimers, "__call__", "timers"),
            (_RecordingTimer, "start", "timers"),
            (_RecordingTimer, "stop", "timers"),
        ):
            self._wrap(owner, name, functools.partial(self._whole, part))

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            return around(original, *arguments, **keywords)

        setattr(owner, name, wrapped)

    def _whole(self, part: str, original: Callable[..., Any], *arguments: Any, **kw: Any) -> Any:
        with self.timed(part):
            return original(*arguments, **kw)

    def _forward_step(self, original: Any, step: Any, data_iterator: Any, model: Any) -> Any:
        if id(model) not in self._watched:
            self._watched.add(id(model))
            model.register_forward_pre_hook(self._model_begins)
            model.register_forward_hook(self._model_ends)
        with self.timed("forward_step"):
            return original(step, data_iterator, model)

    def _model_begins(self, *_: Any) -> None:
        self._model_began_s = time.perf_counter()

    def _model_ends(self, *_: Any) -> None:
        self._ms["forward_step"] -= (time.perf_counter() - self._model_began_s) * 1e3

    def _meet_first(self, original: Any, *arguments: Any) -> Any:
        import torch

        with self.timed("waited_for_ranks"):
            torch.distributed.barrier()
        return original(*arguments)

    def _end_step(self, original: Any, run: Any) -> Any:
        """Also begins the next step: what came before it belongs to the last."""
        with self.timed("end_step"):
            figures = original(run)
        self._ms["end_step"] -= self._ms["waited_for_ranks"]
        self.steps.append(dict(self._ms))
        self._ms.clear()
        return figures

    def _work(self, original: Any, log: Any, job: Any) -> None:
        original(log, job)
        self.writer_thread_ms = time.thread_time() * 1e3


def worker(directory: Path, flags: list[str]) -> None:
    """One rank: train under instruments, then write what they saw."""
    from sparsebalance_megatron.pretrain_gpt import main as pretrain

    instruments = Instruments()

    def write() -> None:
        if not instruments.steps:
            return
        result = {
            "steps": instruments.steps,
            "writer_thread_ms": instruments.writer_thread_ms / len(instruments.steps),
        }
        path = directory / f"overhead-{os.environ['RANK']}.json"
        path.write_text(json.dumps(result), encoding="utf-8")

    sys.argv[1:] = flags  # where Megatron looks
    # Exit functions run last in, first out: by then the logs' thread has ended.
    atexit.register(write)
    instruments.install()
    pretrain(flags)


def summary(directory: Path, warm_up: int) -> dict[str, Any]:
    """Medians over the measured steps."""
    lines = (directory / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record["type"] == "step"]
    records = records[warm_up:]
    ranks = [
        json.loads((directory / f"overhead-{rank}.json").read_text(encoding="utf-8"))
        for rank in range(RANKS)
    ]
    iteration_ms = np.array([record["iteration_ms"] for record in records])
    parts_by_rank_ms = {
        part: np.array(
            [[step.get(part, 0.0) for step in rank["steps"][warm_up:]] for rank in ranks]
        )
        for part in (*PARTS, *ASIDE)
    }
    total_by_rank_ms = sum(parts_by_rank_ms[part] for part in PARTS)
    share = total_by_rank_ms.max(axis=0) / iteration_ms
    account_ms = np.array([sum(record["host_ms"].values()) for record in records])
    return {
        "steps": len(records),
        "iteration_ms": spread(iteration_ms),
        "overhead_share_of_iteration": spread(share),
        "overhead_ms": spread(total_by_rank_ms.max(axis=0)),
        "overhead_ms_by_part": {part: spread(parts_by_rank_ms[part].max(axis=0)) for part in PARTS},
        "not_in_the_sum_ms": {
            **{part: spread(parts_by_rank_ms[part].max(axis=0)) for part in ASIDE},
            "planning": spread(np.array([record["plan_ms"] for record in records])),
            "writer_thread_mean": max(rank["writer_thread_ms"] for rank in ranks),
        },
        "own_account_of_rank_0_ms": spread(account_ms),
        "own_account_of_rank_0_ms_by_part": {
            part: spread(np.array([record["host_ms"][part] for record in records]))
            for part in records[0]["host_ms"]
        },
    }


def spread(values: np.ndarray) -> dict[str, float]:
    """Median, and the tenth and ninetieth percentile."""
    p10, median, p90 = np.quantile(values, (0.1, 0.5, 0.9))
    return {"median": float(median), "p10": float(p10), "p90": float(p90)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
