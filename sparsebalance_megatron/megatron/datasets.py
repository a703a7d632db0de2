# SPDX-License-Identifier: Apache-2.0
"""The order in which Megatron mixes data sets."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_TALKATIVE = "torch.utils.cpp_extension"
"""Warns of a missing CUDA runtime on every machine that has CUDA's folder and no GPU."""


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Leave out warnings of imports inside.

    Importing ``megatron.core.datasets`` loads all of Megatron, which then warns that Transformer
    Engine, Apex and CUDA are missing. Blends need none of them, and a training run, which does,
    imports Megatron before its data and so still warns.
    """
    logger = logging.getLogger(_TALKATIVE)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def blending_order(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """For ``size`` places, the source of each and its place in that source's own order."""
    with quiet_imports():
        from megatron.core.datasets import helpers

    sources, numbers = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    helpers.build_blending_indices(sources, numbers, weights, len(weights), size, False)
    return sources, numbers
