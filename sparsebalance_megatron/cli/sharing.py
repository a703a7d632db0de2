# SPDX-License-Identifier: Apache-2.0
"""Flags of commands that plan: which ranks may share a slot, and how fast they exchange."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from sparsebalance_megatron.simulate.variants import Sharing


def add_sharing_flags(parser: ArgumentParser) -> None:
    """Add the flags of context parallelism."""
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
        help="ranks that may share a sample where widths are planned; default: 8 at most with C "
        "above 1, else 1",
    )
    parser.add_argument(
        "--gigabytes-per-second",
        type=float,
        metavar="X",
        help="what a rank receives keys and values with; default: as measured, or 50",
    )


def sharing_of(arguments: Namespace, ranks: int) -> Sharing:
    """What the flags say, for a job of so many data-parallel x context-parallel ranks.

    Raises:
        WorkloadError: they make no sense.
    """
    return Sharing.of(ranks, arguments.context_parallel_size, arguments.max_context_parallel)
