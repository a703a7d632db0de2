# SPDX-License-Identifier: Apache-2.0
"""Sensitivities of a model's layers, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from sparsebalance_megatron.config import flag_name
from sparsebalance_megatron.errors import ConfigError
from sparsebalance_megatron.json_file import UnreadableFileError, read_json

_REMEDY = "measure it with `sparse-balance sensitivity`"


class Sensitivities(msgspec.Struct, frozen=True, kw_only=True):
    """How sensitive each layer of a model is, and what it was measured on.

    Attributes:
        sensitivities: one for each layer, to any scale.
        measure: what they are: attention of a layer's best head to far tokens that the text
            repeats (:mod:`..attention.repetitions`).
        block_size: tokens of the blocks that say what is far.
        samples: training samples that were read.
        versions: package -> version.
        date: ISO 8601.
    """

    sensitivities: tuple[Annotated[float, msgspec.Meta(ge=0.0, le=1e6)], ...]
    measure: str
    block_size: int
    samples: int
    versions: dict[str, str]
    date: str
    format_version: Literal[1] = 1

    def text(self) -> str:
        """The file's text."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"


def read_sensitivities(path: Path, layers: int) -> np.ndarray:
    """The sensitivities [L] in a file.

    Raises:
        ConfigError: the file cannot be read, is of another number of layers, or all are 0.
    """
    place = f"{flag_name('sensitivity')} {path}"
    try:
        found: Sensitivities = read_json(path, Sensitivities)
    except UnreadableFileError as error:
        raise ConfigError(f"{place}: {error}; {_REMEDY}") from error
    sensitivity_L = np.array(found.sensitivities)
    if len(sensitivity_L) != layers:
        raise ConfigError(
            f"{place}: is of {len(sensitivity_L)} layers, the model has {layers}; {_REMEDY}"
        )
    if not sensitivity_L.any():
        raise ConfigError(f"{place}: all sensitivities are 0; {_REMEDY} on longer documents")
    return sensitivity_L
