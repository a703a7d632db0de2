# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance merge-data``: the shards of one preparation, or other data sets, into one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from sparsebalance_megatron.cli.prepare_data import describe
from sparsebalance_megatron.data.errors import DataError
from sparsebalance_megatron.data.merge import merge


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``merge-data``."""
    parser.description = (
        "Write the documents of several data sets of `sparse-balance prepare-data` as one, in the "
        "order given. Shards of one preparation become what a single run would have written."
    )
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PREFIX", help="data sets, in order"
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path to write to")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a data set of the same prefix"
    )


def run(arguments: Namespace) -> int:
    """Merge the data sets that the flags name; the exit status.

    Raises:
        DataError: naming the part and the remedy.
    """
    try:
        summary = merge(arguments.input, arguments.output_prefix, overwrite=arguments.overwrite)
    except OSError as error:
        raise DataError(str(error)) from error
    print(describe(summary, arguments.output_prefix))
    return 0
