# SPDX-License-Identifier: Apache-2.0
"""Megatron's data set files: readers, builders, and the order of blends.

Loading them warns of nothing that data does not use.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_TALKATIVE = "torch.utils.cpp_extension"
"""Warns of a missing CUDA runtime on every machine that has CUDA's folder and no GPU."""


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Leave out warnings of imports inside.

    Importing ``megatron.core.datasets`` loads all of Megatron, which then warns that Transformer
    Engine, Apex and CUDA are missing. Documents need none of them, and a training run, which does,
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


def open_dataset(prefix: str) -> Any:
    """Megatron's reader of ``prefix.bin`` and ``prefix.idx``."""
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(prefix)


def dataset_builder(path: str, dtype: type[np.number]) -> Any:
    """Megatron's builder of a data set, whose values go to ``path``."""
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    return IndexedDatasetBuilder(path, dtype=dtype)


def token_dtype(vocab_size: int) -> type[np.number]:
    """The dtype that Megatron's preprocessing stores tokens in: uint16 or int32."""
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import DType

    found: type[np.number] = DType.optimal_dtype(vocab_size)
    return found


def blending_order(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """For ``size`` places, the source of each and its place in that source's own order.

    Raises:
        ImportError: Megatron's compiled helpers are missing.
    """
    with quiet_imports():
        from megatron.core.datasets import helpers

    sources, numbers = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    helpers.build_blending_indices(sources, numbers, weights, len(weights), size, False)
    return sources, numbers
