# SPDX-License-Identifier: Apache-2.0
"""Starts what the benchmark needs, one process after the other: data, cost table, training."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import TIMEOUT_MAX, Event, Timer

from end_to_end.layouts import Layout, training_flags
from end_to_end.variants import StepOrder, Variant

PROGRESS = "end to end:"
"""How lines of the first rank begin that are shown while it trains."""
VOCABULARY = "2048"
TOOL_LIMIT_S = 900
_TAIL_CHARACTERS = 5000


class BenchmarkError(ValueError):
    """The benchmark cannot run, or a part of it failed."""


def prepared_data(prefix: Path) -> Path:
    """The data set at ``prefix``; made of its ``.jsonl``, or of Python's standard library, where
    nothing is there."""
    if not Path(f"{prefix}.bin").exists():
        documents = f"{prefix}.jsonl"
        tokenizer = f"{prefix}_tokenizer"
        if not Path(documents).exists():
            print("preparing the Python standard library's sources", flush=True)
            _example("stdlib_documents.py", documents)
        _example(
            *("train_tokenizer.py", "--input", documents),
            *("--vocab-size", VOCABULARY, "--output", tokenizer),
        )
        _tool(
            *("prepare-data", "--input", documents, "--tokenizer", tokenizer),
            *("--output-prefix", str(prefix), "--overwrite"),
        )
    return prefix


def _example(program: str, *words: str) -> None:
    path = Path(__file__).parents[2] / "examples" / program
    subprocess.run([sys.executable, str(path), *words], check=True)


def tokenizer_flags(prefix: Path, given: Sequence[str]) -> list[str]:
    """The tokenizer of a data set, unless the flags given bring one.

    Raises:
        BenchmarkError: if there is no tokenizer.
    """
    tokenizer = Path(f"{prefix}_tokenizer")
    if "--tokenizer-type" in given:
        return []
    if not tokenizer.is_dir():
        raise BenchmarkError(
            f"{tokenizer}: no such directory; train one with examples/train_tokenizer.py, or give "
            "--tokenizer-type after --"
        )
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]


def profile(
    flags: Sequence[str], table: Path, *, device: str, quick: bool, processes: int = 1
) -> Path:
    """Measure a cost table for these flags, and exchanges between so many processes; with ``quick``
    fewer lengths and repeats."""
    print("measuring the model's layers on this machine", flush=True)
    effort = ["--quick"] if quick else []
    words = ("profile", "-o", str(table), *effort, "--", *flags)
    _tool(*words, device=device, processes=processes)
    return table


def train(
    layout: Layout,
    variants: Sequence[Variant],
    order: StepOrder,
    flags: Sequence[str],
    *,
    directory: Path,
    device: str,
    minutes: float,
) -> None:
    """Train all steps; leaves steps.jsonl, rank<R>.jsonl and train.log in ``directory``.

    Training that lasts longer than ``minutes`` is ended, and leaves what it has trained until then.

    Raises:
        BenchmarkError: with the end of the output, if training fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for old in (*directory.glob("*.jsonl"), *directory.glob("ranks/*.jsonl")):
        old.unlink()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--local-addr", "127.0.0.1", "--nproc-per-node", str(layout.processes)),
        *("-m", "end_to_end.worker", "--paired-directory", str(directory)),
        *("--paired-batches", str(order.batches)),
        *("--paired-ranks-in-turn", str(layout.ranks_in_turn)),
        *("--paired-variants", *(variant.name for variant in variants)),
        *("--sparse-balance-log-dir", str(directory)),
        *(*training_flags(steps=order.steps), *layout.flags, *flags),
    ]
    log = directory / "train.log"
    with _started(command, device) as process, log.open("w", encoding="utf-8") as file:
        assert process.stdout is not None
        is_cut = Event()

        def cut() -> None:
            is_cut.set()
            process.terminate()

        limit = Timer(min(60 * minutes, TIMEOUT_MAX), cut)
        limit.daemon = True
        limit.start()
        for line in process.stdout:
            file.write(line)
            if line.startswith(PROGRESS):
                print(f"  {layout.name}: {line.removeprefix(PROGRESS).strip()}", flush=True)
        limit.cancel()
        if process.wait() and not is_cut.is_set():
            file.flush()
            tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:]
            raise BenchmarkError(f"training failed; the end of {log}:\n{tail}")


@contextmanager
def _started(command: Sequence[str], device: str) -> Iterator[subprocess.Popen[str]]:
    """A process group that does not outlive the block."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment(device),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tool(*arguments: str, device: str = "cpu", processes: int = 1) -> None:
    """The ``sparse-balance`` tool; its output only if it fails."""
    torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m")
    launcher = torchrun if processes > 1 else ()
    try:
        done = subprocess.run(
            [sys.executable, "-m", *launcher, "sparsebalance_megatron.cli", *arguments],
            env=environment(device),
            capture_output=True,
            text=True,
            timeout=TOOL_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BenchmarkError(
            f"sparse-balance {arguments[0]}: no end after {TOOL_LIMIT_S} s; is the machine idle?"
        ) from None
    if done.returncode:
        raise BenchmarkError(
            f"sparse-balance {arguments[0]} failed:\n{done.stderr[-_TAIL_CHARACTERS:]}"
        )


def environment(device: str) -> dict[str, str]:
    """One thread per process, no GPU unless asked for, and this folder's modules."""
    benchmarks = Path(__file__).parents[1]
    paths = [str(benchmarks), str(benchmarks.parent), os.environ.get("PYTHONPATH", "")]
    found = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    # Megatron refuses FSDP2 with one connection, whatever the device.
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    return found | (on_cpu if device == "cpu" else {})
