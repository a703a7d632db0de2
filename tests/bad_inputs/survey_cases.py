# SPDX-License-Identifier: Apache-2.0
"""Cases of bad input from all sides, generated; :mod:`bad_inputs.survey` runs them.

Every flag that takes a number gets values that are none, every file that a command reads or writes
is replaced by what is no such file, every value of a log by another, and every command runs where
its terminal, its streams or its environment are odd.
"""

from __future__ import annotations

import gzip
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from bad_inputs.test_cost_tables import document
from bad_inputs.test_data_files import tokens, write
from view.report.sample_run import SampleRun

from sparsebalance_megatron import cli

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    **{"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 300},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    **{"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32"},
}
PLAN = "plan --dp 2 --pp 2 --micro-batches 2 --steps 2"
ADVISE = "advise --gpus 2 --global-batch 4 --steps 1 --block-sizes 256 --base-budgets 8"
PREPARE = "prepare-data --tokenizer-train 300"
COMMANDS = {
    "plan": f"{PLAN} --lengths lengths.txt --model qwen2.5-0.5b",
    "advise": f"{ADVISE} --lengths lengths.txt --model qwen2.5-0.5b",
    "simulate": "simulate --setup paper-ablation --steps 1 --rows baseline ours",
    "prepare-data": f"{PREPARE} --input records.jsonl --output-prefix out/data",
    "report": "report run --baseline base -o page.html",
    "summary": "summary --run run --baseline base",
    "trace": "trace run -o trace.json",
    "watch": "watch run --once",
    "examples": "examples",
    "help": "report --help",
}
"""Commands that end well in the folder that every case begins with."""

INPUTS = {
    "lengths.txt": (COMMANDS["plan"], COMMANDS["advise"]),
    "table.json": (f"{PLAN} --lengths lengths.txt --cost-table table.json --layers 2",),
    "model/config.json": (f"{PLAN} --lengths lengths.txt --model model",),
    "stored.idx": (f"{PLAN} --data-path stored --model qwen2.5-0.5b",),
    "records.jsonl": (COMMANDS["prepare-data"],),
    "records.jsonl.gz": (f"{PREPARE} --input records.jsonl.gz --output-prefix out/data",),
    "records.parquet": (f"{PREPARE} --input records.parquet --output-prefix out/data",),
    "run/steps.jsonl": tuple(COMMANDS[name] for name in ("report", "summary", "trace", "watch")),
    "base/steps.jsonl": (COMMANDS["report"], COMMANDS["summary"]),
}
"""A file that is read -> the commands that refuse what replaces it."""
RANK_LOG = "run/ranks/rank-00000.jsonl"

TARGET = "\1"
OUTPUTS = (
    "report run -o {}",
    "trace run -o {}",
    "summary --run run --baseline base -o {}",
    "summary --run run --baseline base --picture {}",
    f"{PREPARE} --input records.jsonl --output-prefix {{}}",
    "examples --copy {}",
)
WRONG_NUMBERS = (
    "",
    " ",
    "x",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "9" * 40,
    "0x10",
    "1,000",
    "-1e9",
    "--",
)


@dataclass(frozen=True)
class Case:
    """``expects``: "refused" with status 2, "noted" with status 0 and a word, or "any" end."""

    group: str
    name: str
    words: Sequence[str]
    expects: str = "refused"
    names: Sequence[str] = ()
    prepare: Callable[[], None] = lambda: None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    streams: Mapping[int, str] = field(default_factory=dict)
    output: str = ""
    """What stands for :data:`TARGET` in the words of :data:`NO_OUTPUTS`."""


def whole_folder(folder: Path) -> None:
    """Good input for every command."""
    SampleRun(ranks=2, stages=1, micro_batches=2, layers=2, steps=4).write(folder / "run")
    SampleRun(
        ranks=2, stages=1, micro_batches=2, layers=2, steps=4, batching="arrival", tuning="off"
    ).write(folder / "base")
    (folder / "lengths.txt").write_text("\n".join(str(400 + 97 * n % 3000) for n in range(40)))
    records = "".join(json.dumps({"text": f"one two {n}"}) + "\n" for n in range(40))
    (folder / "records.jsonl").write_text(records)
    (folder / "records.jsonl.gz").write_bytes(gzip.compress(records.encode()))
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(MODEL))
    (folder / "table.json").write_text(json.dumps(document()))
    write(folder / "stored", tokens(np.uint16))
    table = pyarrow.table({"text": [f"one two {n}" for n in range(40)]})
    pyarrow.parquet.write_table(table, folder / "records.parquet")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def _sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(2**31)


def _packed_newlines(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=1) as stream:
        for _ in range(300):
            stream.write(b"\n" * 10**6)


def _one_long_line(path: Path) -> None:
    path.write_bytes(b'{"text": "' + b"a" * (80 * 2**20))


NO_FILES: Mapping[str, Callable[[Path], None]] = {
    "missing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a socket": _socket,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "/dev/null": lambda path: path.symlink_to("/dev/null"),
    "/dev/full": lambda path: path.symlink_to("/dev/full"),
    "/dev/tty": lambda path: path.symlink_to("/dev/tty"),
    "/proc/self/mem": lambda path: path.symlink_to("/proc/self/mem"),
    "a link to nothing": lambda path: path.symlink_to("nothing-there"),
    "a link to itself": lambda path: path.symlink_to(path),
    "empty": lambda path: path.write_bytes(b""),
    "a newline": lambda path: path.write_bytes(b"\n"),
    "zero bytes": lambda path: path.write_bytes(bytes(5000)),
    "a hole of gigabytes": _sparse,
    "a long line": _one_long_line,
    "random bytes": lambda path: path.write_bytes(
        bytes((37 * n * n + 11) % 256 for n in range(4096))
    ),
    "UTF-16": lambda path: path.write_bytes('[1, 2]\n{"text": "a"}\n'.encode("utf-16")),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "a number": lambda path: path.write_bytes(b"17\n"),
    "null": lambda path: path.write_bytes(b"null\n"),
    "text": lambda path: path.write_bytes(b"no such thing\n"),
    "an object": lambda path: path.write_bytes(b'{"type": "step"}\n'),
    "gzip": lambda path: path.write_bytes(gzip.compress(b"17\n")),
    "newlines, compressed": _packed_newlines,
}
"""What stands in the place of a file."""
NO_OUTPUTS: Mapping[str, Callable[[Path], str]] = {
    "a folder": lambda folder: _made((folder / "taken").mkdir(), "taken"),
    "below a file": lambda folder: "lengths.txt/x",
    "a pipe without a reader": lambda folder: _made(os.mkfifo(folder / "pipe"), "pipe"),
    "/dev/full": lambda folder: "/dev/full",
    "/proc": lambda folder: "/proc/nowhere/x",
    "a long name": lambda folder: "x" * 5000,
    "a socket": lambda folder: _made(_socket(folder / "socket"), "socket"),
    "a link to itself": lambda folder: _made((folder / "loop").symlink_to("loop"), "loop"),
    "nothing": lambda folder: "",
    "-": lambda folder: "-",
    "a zero byte": lambda folder: "a\0b",
    "/sys": lambda folder: "/sys/x",
    "the log": lambda folder: "run/steps.jsonl",
    "a rank's log": lambda folder: RANK_LOG,
}


def _made(_: object, name: str) -> str:
    return name


def _replace(name: str, kind: str) -> Callable[[], None]:
    def replace() -> None:
        path = Path(name)
        if path.exists():
            path.unlink()
        NO_FILES[kind](path)

    return replace


def input_cases() -> Iterator[Case]:
    for name, commands in INPUTS.items():
        for kind in NO_FILES:
            for command in commands:
                words = command.split()
                if kind == "missing" and words[0] == "watch" and "--once" not in words:
                    continue
                yield Case("input files", f"{words[0]}: {name} is {kind}", words,
                           names=(name.partition("/")[0].partition(".")[0],),
                           prepare=_replace(name, kind))  # fmt: skip
    for kind in NO_FILES:
        for command in ("report", "trace", "watch"):
            # A step is shown without what this rank logged of it; report and trace say so.
            noted = command != "watch" and kind != "missing"
            yield Case("input files", f"{command}: a rank's log is {kind}",
                       COMMANDS[command].split(), "noted" if noted else "any",
                       names=("rank-00000",) if noted else (),
                       prepare=_replace(RANK_LOG, kind))  # fmt: skip


def output_cases() -> Iterator[Case]:
    for command in OUTPUTS:
        for kind in NO_OUTPUTS:
            logs = kind in ("the log", "a rank's log")
            prefix = command.startswith("prepare-data")
            if (command.startswith("examples") and kind in ("a folder", "nothing", "-")) or (
                # Files of other names beside these: PREFIX.bin.
                prefix and kind not in ("below a file", "/proc", "/sys", "a long name", "nothing")
            ):
                continue
            yield Case("output files", f"{command.split()[0]} into {kind}",
                       command.replace("{}", TARGET).split(), output=kind,
                       names=("jsonl",) if logs else ())  # fmt: skip


def flag_cases() -> Iterator[Case]:
    """Every flag that takes a number, a choice or a path, by its parser."""
    for name, words in COMMANDS.items():
        command = words.split()[0]
        if name == "help":
            continue
        for action in cli.parser_of(command)._actions:
            if not action.option_strings or action.nargs == 0:
                continue
            flag = action.option_strings[-1]
            if action.type in (int, float):
                values = WRONG_NUMBERS
            elif action.choices is not None:
                values = ("", "nonsense", "--", "NONE")
            else:
                values = ("--",)
            for value in values:
                given = [*words.split(), f"{flag}={value}"]
                yield Case("flags", f"{command} {flag}={value[:20]!r}", given, names=(flag,))
        for junk in ("--nonsense", "--", "-Q", "\udcff", "extra\nline", "--=", "=", "a\0b"):
            if junk == "--":
                continue
            yield Case("flags", f"{command} {junk!r}", [*words.split(), junk])


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value within a record, and the first of every list."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _paths(each, (*path, key))
    elif isinstance(value, list) and value:
        yield from _paths(value[0], (*path, 0))


FREE = ("config", "counts")
"""Keys below which a header may hold anything of plain types."""


def _junk_for(key: tuple[Any, ...], value: Any) -> Iterator[Any]:
    if isinstance(value, bool) or value is None or key[0] in FREE or key == ("type",):
        return
    if isinstance(value, str):
        yield from (5, [], {})
    elif isinstance(value, (int, float)):
        yield from ("x", [], {})
        last = next(each for each in reversed(key) if isinstance(each, str))
        if last.endswith("_ms") or last in ("tokens", "iteration", "forward_ms", "mean", "min"):
            yield from (-1, 1e300)
    elif isinstance(value, list):
        yield from ("x", 5, {})
    else:
        yield from ("x", 5, [])


def _damage(name: str, line: int, key: tuple[Any, ...], junk: Any) -> Callable[[], None]:
    def damage() -> None:
        lines = Path(name).read_text().splitlines()
        record = json.loads(lines[line])
        holder = record
        for step in key[:-1]:
            holder = holder[step]
        holder[key[-1]] = junk
        lines[line] = json.dumps(record)
        Path(name).write_text("\n".join(lines) + "\n")

    return damage


def log_cases(folder: Path) -> Iterator[Case]:
    """Every value of a line of each kind replaced: the line is left out, and named."""
    for name, numbers in (("run/steps.jsonl", (0, 2)), (RANK_LOG, (0, 3))):
        lines = (folder / name).read_text().splitlines()
        for line in numbers:
            for key, value in _paths(json.loads(lines[line])):
                for junk in _junk_for(key, value):
                    command = "report" if name == RANK_LOG else "summary"
                    what = f"{name.rpartition('/')[2]} line {line + 1} {key}: {junk!r}"
                    words = COMMANDS[command].split()
                    if name == RANK_LOG:
                        words += ["--step", str(json.loads(lines[3])["iteration"])]
                    yield Case("logs", what, words, "noted",
                               names=(name.rpartition("/")[2], "left out")
                               if line else (name.rpartition("/")[2],),
                               prepare=_damage(name, line, key, junk))  # fmt: skip
    for cut in (0.1, 0.3, 0.5, 0.7, 0.9, 0.999):
        for command in ("report", "trace", "watch", "summary"):

            def shorten(cut: float = cut) -> None:
                raw = Path("run/steps.jsonl").read_bytes()
                Path("run/steps.jsonl").write_bytes(raw[: int(len(raw) * cut)])

            yield Case("logs", f"{command} of a log cut at {cut}", COMMANDS[command].split(),
                       "any", prepare=shorten)  # fmt: skip


ODD_ENVIRONMENTS: Mapping[str, Mapping[str, str | None]] = {
    **{f"COLUMNS={n}": {"COLUMNS": n}
       for n in ("0", "-5", "1", "10", "40", "60", "100000", "x", "")},
    **{f"TERM={t}": {"TERM": t} for t in ("dumb", "", "nonsense")},
    "no HOME": {"HOME": None}, "HOME missing": {"HOME": "/nowhere"},
    "TMPDIR missing": {"TMPDIR": "/nowhere"}, "no PATH": {"PATH": None},
    "NO_COLOR": {"NO_COLOR": "1"}, "FORCE_COLOR": {"FORCE_COLOR": "1"},
    "MPLBACKEND": {"MPLBACKEND": "nonsense"}, "OMP_NUM_THREADS": {"OMP_NUM_THREADS": "x"},
    "RANK": {"RANK": "x", "WORLD_SIZE": "-3"}, "TZ": {"TZ": "Nowhere/None"},
    **{f"encoding {name}": {"PYTHONIOENCODING": name}
       for name in ("ascii", "latin-1", "cp1252", "utf-16", "ascii:strict")},
}  # fmt: skip
ODD_STREAMS = {
    "stdout full": {1: "/dev/full"},
    "stdout closed": {1: "closed"},
    "stderr full": {2: "/dev/full"},
    "stderr closed": {2: "closed"},
    "stdin closed": {0: "closed"},
    "all closed": {0: "closed", 1: "closed", 2: "closed"},
    "stdout a pipe without a reader": {1: "broken"},
    "both full": {1: "/dev/full", 2: "/dev/full"},
}


def surrounding_cases() -> Iterator[Case]:
    for name, words in COMMANDS.items():
        for odd, environment in ODD_ENVIRONMENTS.items():
            yield Case("surroundings", f"{name} with {odd}", words.split(), "ends well",
                       environment=environment)  # fmt: skip
        for odd, streams in ODD_STREAMS.items():
            lost = 1 in streams
            yield Case("streams", f"{name}, {odd}", words.split(),
                       "lost output" if lost else "ends well", streams=streams)  # fmt: skip


def all_cases(folder: Path) -> list[Case]:
    return [
        *flag_cases(),
        *input_cases(),
        *output_cases(),
        *log_cases(folder),
        *surrounding_cases(),
    ]
