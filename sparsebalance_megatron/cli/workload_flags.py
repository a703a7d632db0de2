# SPDX-License-Identifier: Apache-2.0
"""Flags that ``simulate``, ``plan`` and ``advise`` have in common, and what they stand for."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ActionsContainer
from pathlib import Path

import numpy as np

from sparsebalance_megatron.view.simulate.lengths import WorkloadError, read_lengths
from sparsebalance_megatron.view.simulate.presets import MODELS
from sparsebalance_megatron.view.simulate.variants import Sharing

_DEFAULT_SEED = 1234
"""Megatron's ``--seed``."""


def add_model_flag(parser: _ActionsContainer, *, required: bool = False) -> None:
    """Add ``--model``, which :func:`.hf_sizes.model_named` reads."""
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


def add_bandwidth_flag(parser: ArgumentParser) -> None:
    """Add ``--gigabytes-per-second``."""
    parser.add_argument(
        "--gigabytes-per-second",
        type=float,
        metavar="X",
        help="what a rank receives keys and values with; default: as measured, or 50",
    )


def add_planning_flags(parser: ArgumentParser, *, steps: int) -> None:
    """Add the flags of how variants are planned: coverage, context parallelism, steps."""
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
    add_bandwidth_flag(parser)
    parser.add_argument("--steps", type=int, default=steps, help="global batches to plan")


def sharing_of(arguments: Namespace, ranks: int) -> Sharing:
    """What the flags of context parallelism say, for data-parallel x context-parallel ranks.

    Raises:
        WorkloadError: a size does not fit the ranks.
    """
    return Sharing.of(ranks, arguments.context_parallel_size, arguments.max_context_parallel)


def check_at_least_one(arguments: Namespace, *names: str) -> None:
    """Raise :class:`WorkloadError` for the first of some flags that is below 1."""
    for name in names:
        if getattr(arguments, name) < 1:
            raise WorkloadError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: below 1")


def check_seed(seed: int | None) -> None:
    """Raise :class:`WorkloadError` for a ``--seed`` that no generator takes."""
    if seed is not None and seed < 0:
        raise WorkloadError(f"--seed {seed}: must be at least 0")


def check_data_flags(arguments: Namespace) -> None:
    """Raise :class:`WorkloadError` if ``--seq-length`` is below 1, or splits nothing."""
    if arguments.seq_length is None:
        return
    if arguments.data_path is None:
        raise WorkloadError("--seq-length splits stored documents; add --data-path, or drop it")
    if arguments.seq_length < 1:
        raise WorkloadError(f"--seq-length {arguments.seq_length}: must be at least 1 token")


def lengths_in_order(arguments: Namespace, samples: int) -> np.ndarray:
    """Tokens of the samples of ``--lengths`` or ``--data-path``, as steps take them.

    Raises:
        DataError, WorkloadError: a file or the blend cannot be read.
    """
    if arguments.data_path is not None:
        return stored_lengths(arguments, samples)
    return read_lengths(arguments.lengths)


def stored_lengths(arguments: Namespace, samples: int) -> np.ndarray:
    """Tokens of the first samples that training on ``--data-path`` would read, int64.

    Raises:
        DataError: a file or the blend cannot be read.
    """
    from sparsebalance_megatron.data.blend import parse_blend
    from sparsebalance_megatron.data.samples import index_lengths

    index = index_lengths(
        parse_blend(arguments.data_path, "--data-path"),
        max_tokens=arguments.seq_length,
        seed=_DEFAULT_SEED if arguments.seed is None else arguments.seed,
    )
    return index.lengths_of(index.global_batch(0, samples))
