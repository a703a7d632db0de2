# SPDX-License-Identifier: Apache-2.0
"""Flags of commands that plan: stored documents as lengths, and the model."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ActionsContainer

import numpy as np

from sparsebalance_megatron.simulate.lengths import WorkloadError
from sparsebalance_megatron.simulate.presets import MODELS

DEFAULT_SEED = 1234
"""Megatron's ``--seed``."""


def add_model_flag(parser: _ActionsContainer) -> None:
    """Add ``--model``, which :func:`.hf_sizes.model_named` reads."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        help=f"a directory with a config.json of Hugging Face, or one of {', '.join(MODELS)}",
    )


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
        help="with --data-path: longer documents are split; default: none is",
    )


def check_data_flags(arguments: Namespace) -> None:
    """Raise :class:`WorkloadError` if ``--seq-length`` makes no sense."""
    if arguments.seq_length is None:
        return
    if arguments.data_path is None:
        raise WorkloadError("--seq-length splits stored documents; add --data-path, or drop it")
    if arguments.seq_length < 1:
        raise WorkloadError(f"--seq-length {arguments.seq_length}: must be at least 1 token")


def stored_lengths(arguments: Namespace, samples: int) -> np.ndarray:
    """Tokens of the first samples that training on ``--data-path`` would read, int64.

    Raises:
        DataError: a file or the blend cannot be read.
    """
    from sparsebalance_megatron.data.blend import parse_blend
    from sparsebalance_megatron.data.blend_index import index_lengths

    seed = DEFAULT_SEED if arguments.seed is None else arguments.seed
    index = index_lengths(
        parse_blend(arguments.data_path, "--data-path"),
        max_tokens=arguments.seq_length,
        seed=seed,
    )
    return index.lengths_of(index.global_batch(0, samples))
