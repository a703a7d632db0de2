# SPDX-License-Identifier: Apache-2.0
"""Loading Megatron's data sets without warnings about what data does not use."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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
