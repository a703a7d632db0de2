# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance plan``: what a job's steps would take, before any GPU is used."""

from __future__ import annotations

import itertools
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsebalance_megatron.cli.output import print_json, print_wrapped
from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.memory import GIBIBYTE
from sparsebalance_megatron.cost.rates import memory_gib
from sparsebalance_megatron.flags import in_mode, value_of
from sparsebalance_megatron.predict.comparison import (
    Comparison,
    Layout,
    Layouts,
    compare,
    compare_layouts,
    compared_steps,
    layouts_steps,
)
from sparsebalance_megatron.predict.even_stages import even_stages
from sparsebalance_megatron.predict.lengths import (
    GENERATORS,
    MAX_TOKENS,
    WorkloadError,
    read_lengths,
)
from sparsebalance_megatron.predict.outcome import unhideable_steps
from sparsebalance_megatron.predict.workload import Workload
from sparsebalance_megatron.progress import Progress
from sparsebalance_megatron.text_table import terminal_columns
from sparsebalance_megatron.view.predictions import (
    comparison_lines,
    header_line,
    layouts_lines,
)

STEPS = 20
"""Global batches that are planned by default, also by dry runs."""

_MOST_GPUS, _MOST_STEPS, _MOST_ROWS = 10**6, 10**4, 1000
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
    """Add the flags of ``plan``."""
    parser.description = (
        "Plan the first steps of a job of so many GPUs, of which none need exist, and predict what "
        "they take: with dense attention in order of arrival and placed by the plan, at fixed "
        "budgets, by the paper's rule, and by default. After -- are the flags of training. Several "
        "values of flags are compared in one table."
    )
    parser.usage = (
        "sparse-balance plan --gpus N [--lengths FILE | --lengths-from NAME] [--model DIR] "
        "[--vary 'FLAG VALUE VALUE ...']... [--steps N] [--rows all] [--json] "
        "-- <flags of training>"
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="of the job")
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="tokens of documents in the order of training, a JSON list or one per line; default: "
        "those of training's --data-path, of which only the .idx files are read",
    )
    lengths.add_argument(
        "--lengths-from", choices=tuple(GENERATORS), help="generated lengths like a data set's"
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
    parser.add_argument(
        "--rows", choices=("main", "all"), default="main", help="all: also parts of the default"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def run(arguments: Namespace) -> int:
    """Describe every job, plan, print."""
    for flag, most in (("gpus", _MOST_GPUS), ("steps", _MOST_STEPS)):
        if not 1 <= (value := getattr(arguments, flag)) <= most:
            raise ConfigError(f"--{flag} {value}: must be 1 to {most}")
    choices = [_choices(text) for text in arguments.vary]
    job = _Job(arguments)
    if choices:
        return _compare_layouts(arguments, job, choices)
    workload, every = job.workload(), arguments.rows == "all"
    progress = Progress("plan", compared_steps(workload, every=every))
    comparison = compare(workload, every=every, watch=progress)
    progress.close()
    stages = even_stages(workload)
    if arguments.json:
        layers = None if stages is None else stages.layers
        print_json(_comparison_json(comparison, job.flags, layers))
        return 0
    layout = None if stages is None else str(stages)
    print_wrapped([header_line(workload, job.order)])
    print(*comparison_lines(comparison, terminal_columns(), layout=layout), sep="\n")
    return 0


class _Job:
    """The flags after ``--`` with those of ``--model``, and lengths for them.

    Attributes:
        flags: as training gets them.
        order: of the samples, in words.
    """

    def __init__(self, arguments: Namespace) -> None:
        self._arguments = arguments
        given = _names(arguments.passed_on)
        if arguments.model is None and given.isdisjoint(_MODEL):
            raise WorkloadError(
                "no model: give --model DIR, or after -- the flags of a model, such as --num-layers"
            )
        lengths = None if arguments.lengths is None else read_lengths(arguments.lengths)
        self._lengths, self.order = lengths, "as filed" if lengths is not None else "of training"
        if arguments.lengths_from is not None:
            self.order = f"generated like {arguments.lengths_from}"
        elif lengths is None and given.isdisjoint(_DATA):
            raise WorkloadError(
                "no lengths: give --lengths FILE, --lengths-from NAME, or after -- the --data-path "
                "of training"
            )
        # Torch and Megatron take seconds, which neither --help nor a wrong flag should cost.
        from sparsebalance_megatron.megatron.datasets import quiet_imports
        from sparsebalance_megatron.run.dry_run import runs_on_cpu

        words, enabled = arguments.passed_on, flag_name("enabled")
        device = value_of(flag_name("device"), words) or SparseBalanceConfig.device
        self._on_cpu = runs_on_cpu(device)
        with quiet_imports():
            from sparsebalance_megatron.run.described_job import described_job

            self._described_job = described_job
            own = () if arguments.model is None else _model_words(arguments.model)
        self.flags = [*own, *words, *([] if enabled in given else [enabled])]

    def workload(self, more: Sequence[str] = ()) -> Workload:
        """The job with more flags.

        Raises:
            ValueError: of this package: the flags, or their data, make no job.
        """
        arguments, lengths = self._arguments, self._lengths
        longest = MAX_TOKENS if arguments.lengths_from else None
        longest = longest if lengths is None else int(lengths.max())
        flags = _completed([*self.flags, *more], longest)
        job = self._described_job(flags, arguments.gpus, on_cpu=self._on_cpu)
        if arguments.lengths_from is not None:
            samples = arguments.steps * job.settings.batch_sizes.size_of(0)
            lengths = GENERATORS[arguments.lengths_from](samples, job.settings.seed)
        return job.workload(lengths, str(arguments.lengths), arguments.steps)


def _model_words(model: Path) -> tuple[str, ...]:
    """Megatron's flags of a Hugging Face model."""
    from sparsebalance_megatron.convert.hf_config import read_config
    from sparsebalance_megatron.convert.megatron_model import default_divisor, model_flags, words

    found = read_config(model)
    rows = found.vocab_size
    return words(model_flags(found, divisor=default_divisor(rows), padded_vocab_size=rows))


def _completed(flags: Sequence[str], longest: int | None) -> list[str]:
    """The flags, with others that Megatron asks for and predictions do not depend on.

    Args:
        longest: document in tokens, where its length does not come from the flags.
    """
    given, words = _names(flags), [*flags]
    for flag, (others, value) in _ASKED_FOR.items():
        if given.isdisjoint({flag, *others}):
            words += [flag, value]
    if longest is not None:
        # Nothing is read there.
        words += [] if given & _DATA else ["--data-path", "lengths"]
        words += [] if "--seq-length" in given else ["--seq-length", str(longest)]
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
    """What an argument of ``--vary`` says.

    >>> _choices("--context-parallel-size 1 2")[1]
    (('--context-parallel-size', '1'), ('--context-parallel-size', '2'))
    """
    try:
        flag, *values = shlex.split(text)
    except ValueError:
        flag, values = "", []
    flag = f"--{flag.removeprefix('--')}"
    if flag == "--" or any(value.startswith("--") for value in values):
        raise ConfigError(
            f"--vary {text[:60]!r}: give a flag of training and its values in quotes, such as "
            "'--tensor-model-parallel-size 1 2 4'"
        )
    if not values:
        return flag, ((), (flag,))
    return flag, tuple((flag, *value.split()) for value in dict.fromkeys(values))


def _compare_layouts(arguments: Namespace, job: _Job, choices: Sequence[_Choices]) -> int:
    """Plan every combination, print."""
    rows = {
        tuple(" ".join(each[1:]) or ["no", "yes"][len(each)] for each in chosen): [
            *itertools.chain(*chosen)
        ]
        for chosen in itertools.islice(
            itertools.product(*(words for _, words in choices)), _MOST_ROWS + 1
        )
    }
    if len(rows) > _MOST_ROWS:
        raise ConfigError(f"--vary: more than {_MOST_ROWS} rows; give fewer values at a time")
    layouts, refused = [], {}
    progress = Progress("flags", len(rows), "rows")
    for name, words in rows.items():
        try:
            layouts.append(Layout.of(name, job.workload(words)))
        except ValueError as error:
            if not type(error).__module__.startswith("sparsebalance_megatron"):
                raise
            refused[name] = str(error)
        progress()
    progress.close()
    if not layouts:
        raise WorkloadError(f"--vary: no row makes a job: {next(iter(refused.values()))}")
    progress = Progress("plan", layouts_steps(layouts))
    found = compare_layouts(layouts, progress)
    progress.close()
    refused |= found.refused
    best, dense = (rows[each.varied] for each in (found.found[0], found.dense))
    dense_flags = in_mode("exact", [*job.flags, *dense])
    if arguments.json:
        print_json(
            _layouts_json(found)
            | {
                "flags": job.flags,
                "varied": {" ".join(name): words for name, words in rows.items()},
                "fastest": [*job.flags, *best],
                "fastest_dense": dense_flags,
                "left_out": {" ".join(name): reason for name, reason in refused.items()},
            }
        )
        return 0
    dropped = [word for word in job.flags if word.startswith("--") and word not in dense_flags]
    exact = shlex.join(in_mode("exact", dense))
    exact += f" (without {' '.join(dropped)})" if dropped else ""
    print_wrapped([header_line(found.found[0].workload, job.order)])
    columns, flags = terminal_columns(), [flag for flag, _ in choices]
    print(*layouts_lines(found, flags, shlex.join(best), exact, columns), sep="\n")
    reasons: dict[str, list[str]] = {}
    for name, reason in refused.items():
        reasons.setdefault(reason, []).append(shlex.join(rows[name]) or "none of these flags")
    print_wrapped([f"Left out: {'; '.join(which)}: {why}" for why, which in reasons.items()])
    return 0


def _comparison_json(
    comparison: Comparison, flags: Sequence[str], layers: Sequence[int] | None
) -> dict[str, Any]:
    workload = comparison.workload
    return {
        **_common_json(workload, comparison.slowness),
        "flags": flags,
        "given": comparison.given,
        "fastest_dense": comparison.dense,
        "layers_per_stage": layers,
        "steps_with_unhideable_sample": unhideable_steps(workload),
        "rows": {
            name: asdict(outcome) | {"over_dense": comparison.over_dense(name)}
            for name, outcome in comparison.outcomes.items()
        },
    }


def _layouts_json(layouts: Layouts) -> dict[str, Any]:
    return {
        **_common_json(layouts.found[0].workload, layouts.slowness),
        "rows": [
            {
                "varied": " ".join(each.varied),
                "at_most_gib": each.at_most_bytes / GIBIBYTE,
                "fits": each.fits,
                "given": None if each.given is None else asdict(each.given),
                "exact": None if each.exact is None else asdict(each.exact),
                "over_dense": each.given and layouts.dense_ms / each.given.makespan_ms,
            }
            for each in layouts.found
        ],
    }


def _common_json(workload: Workload, slowness: float | None) -> dict[str, Any]:
    efficiency = workload.cost.efficiency
    return {
        "steps": len(workload.batches),
        "costs": workload.cost.source,
        "device": workload.cost.device,
        "memory_gib": memory_gib(workload.cost.device),
        "break_even_slowness": slowness,
        "break_even_efficiency": efficiency.sparse / slowness if efficiency and slowness else None,
    }
