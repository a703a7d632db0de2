# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance plan``: what a job's steps would take, before any GPU is used."""

import itertools
import shlex
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsebalance_megatron.cli.output import print_json
from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.flags import MODE_FLAG, in_mode, value_of, without_flags
from sparsebalance_megatron.predict.comparison import (
    EXACT,
    GIVEN,
    MEGATRON,
    ROWS,
    Comparison,
    TableRow,
    compare,
)
from sparsebalance_megatron.predict.workload import (
    STEPS,
    Workload,
    WorkloadError,
    read_lengths,
)
from sparsebalance_megatron.text_table import progress_bar, shown_ms
from sparsebalance_megatron.view.predictions import (
    is_unsure,
    over,
    predicted,
    prediction_lines,
    ratio_spread,
)

_NONE = "none of these flags"
_MOST_GPUS, _MOST_STEPS, _MOST_ROWS = 10**6, 10**4, 1000
_SEQ_LENGTH_MULTIPLE = 256
"""Ranks that share a sequence, by tensor or context parallelism, divide it."""
_DATA = frozenset(
    {"--data-path", "--train-data-path", "--data-args-path", "--per-split-data-args-path"}
)
_MODEL = frozenset({"--num-layers", "--use-checkpoint-args"})
_ASKED_FOR: Mapping[str, tuple[tuple[str, ...], str]] = {
    "--micro-batch-size": ((), "1"),
    "--train-iters": (("--train-samples",), "1000"),
    "--lr": ((), "1e-5"),
    "--tokenizer-type": ((), "NullTokenizer"),
}
"""Flag that Megatron asks for -> flags that stand in for it, and the value where none is given."""


def add_flags(parser: ArgumentParser) -> None:
    parser.description = (
        "Plan the first steps of a job of so many GPUs, of which none need exist, and predict what "
        "they take: by Megatron without the plugin, in mode exact, at fixed budgets, by the "
        "paper's rule, and in mode default. After -- are the flags of training. Several values of "
        "flags are compared in one table."
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="of the job")
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="tokens of documents in the order of training, a JSON list or one per line; default: "
        "those of training's --data-path, of which only the .idx files are read",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="a Hugging Face directory or config.json: its flags, as `convert` writes them, come "
        "before those after --",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="'FLAG VALUE ...'",
        help="a flag of training, its dashes may be left out, with values to compare; without any, "
        "with the flag and without; several multiply",
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="to plan")
    parser.add_argument("--explain", action="store_true", help="say what rows and columns are")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def run(arguments: Namespace) -> int:
    for flag, most in (("gpus", _MOST_GPUS), ("steps", _MOST_STEPS)):
        if not 1 <= (value := getattr(arguments, flag)) <= most:
            raise ConfigError(f"--{flag} {value}: must be 1 to {most}")
    choices = [_choices(text) for text in arguments.vary]
    for flag, count in Counter(flag for flag, _ in choices).items():
        if count > 1:
            raise ConfigError(f"--vary {flag}: given {count} times; give all its values once")
    job = _Job(arguments)
    if choices:
        document, lines = _compared_layouts(job, choices, explain=arguments.explain)
    else:
        comparison, lines = predicted(
            job.workload(),
            job.order,
            with_flags=lambda flags: job.workload(flags.split()),
            explain=arguments.explain,
        )
        document = _json(comparison) | {"flags": job.flags}
    if arguments.json:
        print_json(document)
    else:
        print(*lines, sep="\n")
    return 0


class _Job:
    """The flags of training with those of ``--model``, and lengths for them in some order."""

    def __init__(self, arguments: Namespace) -> None:
        self._arguments = arguments
        given = _names(arguments.passed_on)
        if arguments.model is None and given.isdisjoint(_MODEL):
            raise WorkloadError(
                "no model: give --model DIR, or after -- the flags of a model, such as --num-layers"
            )
        if arguments.lengths is None and given.isdisjoint(_DATA):
            raise WorkloadError(
                "no lengths: give --lengths FILE, or after -- the --data-path of training"
            )
        self._lengths = None if arguments.lengths is None else read_lengths(arguments.lengths)
        self.order = "of training" if self._lengths is None else "as filed"
        own = () if arguments.model is None else _model_words(arguments.model)
        enabled = flag_name("enabled")
        self.flags = [*own, *arguments.passed_on, *([] if enabled in given else [enabled])]

    def workload(self, more: Sequence[str] = ()) -> Workload:
        """The job with more flags. Raises a ValueError of this package where they make none."""
        # Torch and Megatron take seconds, which neither --help nor a wrong flag should cost.
        from sparsebalance_megatron.megatron.arguments import runs_on_cpu
        from sparsebalance_megatron.megatron.datasets import quiet_imports

        device = value_of(flag_name("device"), self.flags) or SparseBalanceConfig.device
        on_cpu = runs_on_cpu(device)
        with quiet_imports():
            from sparsebalance_megatron.run.described_job import described_job
        arguments, lengths = self._arguments, self._lengths
        longest = None if lengths is None else int(lengths.max())
        flags = _completed([*self.flags, *more], longest)
        job = described_job(flags, arguments.gpus, on_cpu=on_cpu)
        return job.workload(lengths, str(arguments.lengths), arguments.steps)


def _model_words(model: Path) -> tuple[str, ...]:
    from sparsebalance_megatron.megatron.datasets import quiet_imports

    with quiet_imports():
        from sparsebalance_megatron.convert.hf_config import read_config
        from sparsebalance_megatron.convert.megatron_model import model_flags, words
    return words(model_flags(read_config(model)))


def _completed(flags: Sequence[str], longest: int | None) -> list[str]:
    """The flags, with others that Megatron asks for and predictions do not depend on; ``longest``
    document in tokens, where its length does not come from the flags."""
    given, words = _names(flags), [*flags]
    for flag, (others, value) in _ASKED_FOR.items():
        if given.isdisjoint({flag, *others}):
            words += [flag, value]
    if longest is not None:
        # Nothing is read there.
        words += [] if given & _DATA else ["--data-path", "lengths"]
        rounded = -(-longest // _SEQ_LENGTH_MULTIPLE) * _SEQ_LENGTH_MULTIPLE
        words += [] if "--seq-length" in given else ["--seq-length", str(rounded)]
    seq_length = value_of("--seq-length", words) or ""
    positions = value_of("--max-position-embeddings", words) or "0"
    if seq_length.isdigit() and positions.isdigit() and int(positions) < int(seq_length):
        words += ["--max-position-embeddings", seq_length]
    # No device is asked what it is, and no sample of validation is read.
    return [*words, "--eval-iters", "0", flag_name("dry_run")]


def _names(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0] for word in words}


_Choices = tuple[str, tuple[tuple[str, ...], ...]]
"""A flag, and the words that stand for it in each row."""


def _choices(text: str) -> _Choices:
    try:
        flag, *values = shlex.split(text)
    except ValueError:
        flag, values = "", []
    flag = f"--{flag.removeprefix('--')}"
    if "--help".startswith(flag) or any(value.startswith("--") for value in values):
        raise ConfigError(
            f"--vary {text[:60]!r}: give a flag of training and its values in quotes, such as "
            "'--tensor-model-parallel-size 1 2 4'"
        )
    if not values:
        return flag, ((), (flag,))
    return flag, tuple((flag, *value.split()) for value in dict.fromkeys(values))


def _compared_layouts(
    job: _Job, choices: Sequence[_Choices], *, explain: bool
) -> tuple[dict[str, Any], list[str]]:
    """Every combination planned as given, in mode exact and by Megatron: as JSON, and as lines."""
    rows, dense_rows = list[TableRow](), list[list[str]]()
    refused: dict[str, str] = {}
    combinations = _combinations(choices)
    with progress_bar("flags", len(combinations), "rows") as bar:
        for names, words in combinations.items():
            bar.update()
            try:
                workload = job.workload(words)
            except ValueError as error:
                if not type(error).__module__.startswith("sparsebalance_megatron"):
                    raise
                refused[shlex.join(words)] = str(error)
                continue
            rows.append(TableRow(names=(*names, GIVEN), words=words, workload=workload))
            # Flags of sparse attention alone make no other dense row.
            if _of_way(EXACT, words) not in dense_rows:
                dense_rows.append(_of_way(EXACT, words))
                for way in (MEGATRON,) if workload.is_dense else (EXACT, MEGATRON):
                    own, planned = _of_way(way, words), ROWS[way].of(workload)
                    rows.append(TableRow(names=(*names, way), words=own, workload=planned))
    if not rows:
        raise WorkloadError(f"--vary: no row makes a job: {next(iter(refused.values()))}")
    found = compare(rows)
    refused |= {shlex.join(row.words): why for row, why in found.refused}
    dense = found.dense
    dense_flags = _of_way(dense.names[-1], [*job.flags, *dense.words])
    dropped = [word for word in job.flags if word.startswith("--") and word not in dense_flags]
    without = f" (without {' '.join(dropped)})" if dropped else ""
    verdict = ["No row fits the memory of the device: raise a size, or lower the token cap."]
    if found.given.fits:
        verdict = [
            *_ranking(found),
            f"Fastest with dense attention: {shlex.join(dense.words) or _NONE}{without}: "
            f"{shown_ms(dense.ms)} ms.",
        ]
    verdict += [f"Left out: {which or _NONE}: {why}." for which, why in refused.items()]
    lines = prediction_lines(
        found,
        job.order,
        keys=[*(flag[2:] for flag, _ in choices), ""],
        meanings={name: ROWS[name].meaning for name in (MEGATRON, EXACT)} if explain else {},
        verdict=verdict,
    )
    flags = {"fastest": [*job.flags, *found.given.words], "fastest_dense": dense_flags}
    return _json(found) | flags | {"left_out": refused}, lines


def _combinations(choices: Sequence[_Choices]) -> dict[tuple[str, ...], list[str]]:
    """The words of every row by the names of their values."""
    every = itertools.product(*(words for _, words in choices))
    combinations = list(itertools.islice(every, _MOST_ROWS + 1))
    if len(combinations) > _MOST_ROWS:
        raise ConfigError(f"--vary: more than {_MOST_ROWS} rows; give fewer values at a time")
    found = {}
    for chosen in combinations:
        words = list(itertools.chain(*chosen))
        if mode := value_of(MODE_FLAG, words):
            # Without what has no effect in that mode, so that some combinations are alike.
            words = in_mode(mode, words)
        names = tuple(
            "-" if each and each[0] not in words else " ".join(each[1:]) or ("no", "yes")[len(each)]
            for each in chosen
        )
        found[names] = words
    return found


def _ranking(found: Comparison) -> list[str]:
    """The fastest row as given, and which others it may not be faster than."""
    given, dense = found.given, found.dense
    before, name = dense, "the fastest with dense attention"
    if given.workload.is_dense:
        before, name = found.without_plugin, "the fastest row Megatron"
    alike = [
        shlex.join(row.words) or _NONE
        for row in found.rows
        if row is not given and row.names[-1] == GIVEN and is_unsure(ratio_spread(row, given))
    ]
    return [
        f"Fastest: {shlex.join(given.words) or _NONE}: {shown_ms(given.ms)} ms, "
        f"{over(before, given, name)}.",
        *([f"As fast, for all that these steps say: {'; '.join(alike)}."] if alike else []),
    ]


def _of_way(way: str, words: Sequence[str]) -> list[str]:
    """The words of a command line with which training runs in this way."""
    if way == MEGATRON:
        return without_flags(words, lambda flag: flag.startswith(flag_name("enabled")))
    return in_mode("exact", words) if way == EXACT else [*words]


def _json(comparison: Comparison) -> dict[str, Any]:
    workload, reference = comparison.given.workload, comparison.without_plugin
    rows: dict[str, dict[str, Any]] = {}
    for row in comparison.rows:
        found = rows[" ".join(row.names)] = {
            "fits": row.fits,
            "at_most_gib": row.at_most_gib,
        }
        if row.outcome is not None:
            found |= {"speedup": reference.ms / row.ms, **asdict(row.outcome)}
            found["speedup_spread"] = ratio_spread(reference, row)
    return {
        "steps": len(workload.batches),
        "costs": workload.cost.source,
        "device": workload.cost.device,
        "memory_gib": comparison.given.gpu_gib,
        "given": " ".join(comparison.given.names),
        "dense": " ".join(comparison.dense.names),
        "dense_up_to_tokens": workload.plan_settings.config.dense_up_to_tokens,
        "rows": rows,
    }
