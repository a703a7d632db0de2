# SPDX-License-Identifier: Apache-2.0
"""Flags that ``simulate``, ``plan`` and ``advise`` have in common, and what they stand for."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace, _ActionsContainer
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np

from sparsebalance_megatron.cli.output import print_wrapped
from sparsebalance_megatron.config import DEFAULT_COUNTED_DEVICE, RANGES, CountedDevice, check_range
from sparsebalance_megatron.layer_budgets import base_budgets
from sparsebalance_megatron.learn.prediction import Workload
from sparsebalance_megatron.plan.job import check_cp_sizes, default_max_cp_size
from sparsebalance_megatron.text_table import terminal_columns
from sparsebalance_megatron.view.simulate.lengths import WorkloadError, read_lengths
from sparsebalance_megatron.view.simulate.models import MODELS
from sparsebalance_megatron.view.simulate.tables import variant_legend, variant_lines
from sparsebalance_megatron.view.simulate.variants import (
    RANKS_PER_NODE,
    Variant,
    evaluate,
    unhideable_steps,
)

_DEFAULT_SEED = 1234
"""Megatron's ``--seed``."""

_LEAST_BLOCK_TOKENS = 16
"""Kernels multiply no smaller tiles."""

_MOST = {
    **dict.fromkeys(("dp", "gpus", "micro_batches", "global_batch"), 10**6),
    **dict.fromkeys(("pp", "tp", "layers", "steps"), 10**4),
    **dict.fromkeys(("context_parallel_size", "context_parallel_sizes"), 10**6),
    **dict.fromkeys(("seq_length", "max_tokens_per_micro_batch"), 2**30),
    "gpu_memory": 10**6,
}
"""Flag, as an attribute -> its largest value; the least is 1, or above 0 for a fraction."""


def add_model_flag(parser: _ActionsContainer, *, required: bool = False) -> None:
    """Add ``--model``, which :func:`.models.model_named` reads."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        required=required,
        help=f"a directory with a config.json of Hugging Face, or one of {', '.join(MODELS)}",
    )


def add_lengths_flags(parser: ArgumentParser) -> None:
    """Add ``--lengths`` and ``--data-path``, of which one is given."""
    lengths = parser.add_mutually_exclusive_group(required=True)
    lengths.add_argument("--lengths", type=Path, metavar="FILE", help="JSON list, or one per line")
    add_data_flags(parser, lengths)


def add_data_flags(parser: ArgumentParser, instead: _ActionsContainer) -> None:
    """Add the flags that name a data set or a blend.

    Args:
        instead: the group of flags of which one is given.
    """
    instead.add_argument(
        "--data-path",
        nargs="+",
        metavar="PREFIX",
        help="a prefix of .idx files, or a blend as Megatron reads it: its samples in their order "
        "(--seed, default 1234); no .bin is opened",
    )
    parser.add_argument(
        "--seq-length",
        type=int,
        metavar="TOKENS",
        help="longer documents are split; default: none is",
    )


def add_output_flags(parser: ArgumentParser, *, steps: int) -> None:
    """Add ``--counted-device``, ``--gigabytes-per-second``, ``--steps`` and ``--json``."""
    parser.add_argument(
        "--counted-device",
        choices=get_args(CountedDevice),
        help="at whose rates operations are counted without a cost table; default: "
        f"{DEFAULT_COUNTED_DEVICE}",
    )
    parser.add_argument(
        "--gigabytes-per-second",
        type=float,
        metavar="X",
        help="what a rank receives keys and values with; default: as measured, or 50",
    )
    parser.add_argument("--steps", type=int, default=steps, help="global batches to plan")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def add_layer_budgets_flag(parser: ArgumentParser) -> None:
    """Add ``--layer-budgets``, which :func:`checked_layer_budgets` reads."""
    parser.add_argument(
        "--layer-budgets",
        nargs="+",
        metavar="BUDGET:LAYERS",
        help="layers with base budgets of their own, or dense: such as dense:0-1,33-35 16:2-32",
    )


def checked_layer_budgets(arguments: Namespace, layers: int) -> str | None:
    """The text of ``--layer-budgets``; None where it is not given.

    Raises:
        ConfigError: it cannot be read, or names a layer that a model of ``layers`` does not have.
    """
    if arguments.layer_budgets is None:
        return None
    text = " ".join(arguments.layer_budgets)
    base_budgets(1, text, layers, "--layer-budgets")
    return text


def add_planning_flags(parser: ArgumentParser) -> None:
    """Add the flags of how variants are planned: budgets, coverage and context parallelism."""
    add_layer_budgets_flag(parser)
    parser.add_argument(
        "--coverage-threshold",
        type=float,
        default=0.1,
        metavar="P",
        help="coverage that a sample may lose",
    )
    parser.add_argument(
        "--context-parallel-size",
        type=int,
        default=1,
        metavar="C",
        help="ranks that share every sample, of the same ranks; adds rows",
    )
    parser.add_argument(
        "--max-context-parallel",
        type=int,
        metavar="W",
        help="ranks that may share a sample where that is planned; default: 8 at most with C "
        "above 1, else 1",
    )


def check_flags(arguments: Namespace) -> None:
    """Refuse numbers that no job has.

    Raises:
        ConfigError, WorkloadError: naming the flag, its value and its range.
    """
    for name, value in vars(arguments).items():
        if value is None or name == "max_context_parallel":
            continue
        flag = f"--{name.replace('_', '-')}"
        field = "block_size" if name == "block_sizes" else name.removesuffix("s")
        for number in value if isinstance(value, list) else [value]:
            if field in RANGES or name in RANGES:
                check_range(name if name in RANGES else field, number, flag)
            if field == "block_size" and number < _LEAST_BLOCK_TOKENS:
                raise WorkloadError(f"{flag} {number}: must be at least {_LEAST_BLOCK_TOKENS}")
            most = _MOST.get(name)
            if most is not None and not (0 if isinstance(number, float) else 1) <= number <= most:
                raise WorkloadError(f"{flag} {number}: must be 1 to {most}")
    if arguments.counted_device is None:
        arguments.counted_device = DEFAULT_COUNTED_DEVICE
    elif getattr(arguments, "cost_table", None) is not None:
        raise WorkloadError("--counted-device: a cost table is measured; drop one of the two")
    if arguments.seed is not None and not 0 <= arguments.seed < 2**63:
        raise WorkloadError(f"--seed {arguments.seed}: must be at least 0 and below 2**63")


def max_cp_size(arguments: Namespace, ranks: int) -> int:
    """Most ranks that may share a micro-batch, of data-parallel x context-parallel ranks.

    Raises:
        ConfigError: a context-parallel size does not fit the ranks.
    """
    size, largest = arguments.context_parallel_size, arguments.max_context_parallel
    if largest is None:
        largest = default_max_cp_size(ranks, size, RANKS_PER_NODE)
    check_cp_sizes(ranks, size, largest, limit="--max-context-parallel")
    return int(largest)


def lengths_in_order(arguments: Namespace, samples: int) -> np.ndarray:
    """Tokens of the samples of ``--lengths`` or ``--data-path``, as steps take them, int64.

    Raises:
        DataError, WorkloadError: a file or the blend cannot be read.
    """
    if arguments.data_path is None:
        return read_lengths(arguments.lengths)
    from sparsebalance_megatron.data.blend import parse_blend
    from sparsebalance_megatron.data.samples import index_lengths

    index = index_lengths(
        parse_blend(arguments.data_path, "--data-path"),
        max_tokens=arguments.seq_length,
        seed=_DEFAULT_SEED if arguments.seed is None else arguments.seed,
    )
    return index.lengths_of(index.global_batch(0, samples))


def check_seq_length_splits(arguments: Namespace) -> None:
    """Raise :class:`WorkloadError` if ``--seq-length`` has no documents to split."""
    if arguments.seq_length is not None and arguments.data_path is None:
        raise WorkloadError("--seq-length splits stored documents; add --data-path, or drop it")


def print_legend() -> None:
    """Explain the columns of the tables that :func:`planned_outcomes` prints."""
    print(*variant_legend(terminal_columns()), sep="\n")


def planned_outcomes(
    heading: str,
    workload: Workload,
    variants: Mapping[str, Variant],
    as_json: bool,
) -> dict[str, Any]:
    """Plan and predict every variant, and print a table without legend unless JSON is asked for.

    Returns:
        The part of the JSON that ``plan`` and ``simulate`` have in common.
    """
    outcomes = evaluate(workload, variants, time.perf_counter)
    steps, unhideable = len(workload.batches), unhideable_steps(workload)
    if not as_json:
        print(heading, *variant_lines(outcomes, terminal_columns()), sep="\n")
        print_wrapped([f"{steps} steps; {unhideable} hold a sample that no placement hides"])
    return {
        "steps": steps,
        "steps_with_unhideable_sample": unhideable,
        "variants": {name: asdict(each) for name, each in outcomes.items()},
    }
