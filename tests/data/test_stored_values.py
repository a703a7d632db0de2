# SPDX-License-Identifier: Apache-2.0
"""Stored tokens and masks: all of a small file is looked at, and places of a large one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparsebalance_megatron.data import stored_values
from sparsebalance_megatron.data.errors import DataError
from sparsebalance_megatron.data.stored_values import check_loss_mask, check_token_ids

VOCABULARY = 100
SMALL = 200_000
"""Values of files that are looked at whole."""


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("place", [0, 777, SMALL // 2 + 1, SMALL - 1])
def test_every_token_of_a_small_file_is_looked_at(
    place: int, dtype: type[np.number], tmp_path: Path
) -> None:
    tokens = np.full(SMALL, VOCABULARY - 1, dtype=dtype)
    tokens.tofile(tmp_path / "data.bin")
    check_token_ids(str(tmp_path / "data"), dtype, VOCABULARY)
    tokens[place] = VOCABULARY
    tokens.tofile(tmp_path / "data.bin")
    with pytest.raises(DataError, match=f"token {VOCABULARY} is not in the model's vocabulary"):
        check_token_ids(str(tmp_path / "data"), dtype, VOCABULARY)


@pytest.mark.parametrize("place", [0, 777, SMALL - 1])
def test_every_value_of_a_small_mask_is_looked_at(place: int, tmp_path: Path) -> None:
    path = tmp_path / "data_loss_mask.bin"
    mask = np.zeros(SMALL, dtype=np.uint8)
    mask.tofile(path)
    with pytest.raises(DataError, match="all zero"):
        check_loss_mask(path)
    mask[place] = 1
    mask.tofile(path)
    check_loss_mask(path)
    mask[place] = 2
    mask.tofile(path)
    with pytest.raises(DataError, match="holds 2, not a loss mask"):
        check_loss_mask(path)


def test_places_of_a_large_file_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ends among them. That a large mask holds a 1 somewhere cannot be said."""
    monkeypatch.setattr(stored_values, "_PLACES", 4)
    monkeypatch.setattr(stored_values, "_PLACE_BYTES", 1000)
    path = tmp_path / "data_loss_mask.bin"
    mask = np.zeros(SMALL, dtype=np.uint8)
    mask[5000:6000] = 3  # between two places
    mask.tofile(path)
    check_loss_mask(path)
    for place in (0, 999, SMALL - 1000, SMALL - 1):
        wrong = mask.copy()
        wrong[place] = 2
        wrong.tofile(path)
        with pytest.raises(DataError, match="holds 2"):
            check_loss_mask(path)
