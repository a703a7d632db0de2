# SPDX-License-Identifier: Apache-2.0
"""Stored tokens and masks: all of a small file is looked at, and places of a large one."""

from __future__ import annotations

import numpy as np
import pytest

from sparsebalance_megatron.data import documents
from sparsebalance_megatron.data.documents import check_loss_mask, check_token_ids
from sparsebalance_megatron.errors import DataError

VOCABULARY = 100
SMALL = 200_000
"""Values of files that are looked at whole."""


@pytest.mark.parametrize("place", [0, 777, SMALL - 1])
def test_every_value_of_a_small_file_is_looked_at(place: int) -> None:
    tokens = np.full(SMALL, VOCABULARY - 1, dtype=np.uint16)
    check_token_ids("data", tokens, VOCABULARY)
    tokens[place] = VOCABULARY
    with pytest.raises(DataError, match=rf"data.bin: token {VOCABULARY} .* of {VOCABULARY}"):
        check_token_ids("data", tokens, VOCABULARY)
    mask = np.zeros(SMALL, dtype=np.uint8)
    with pytest.raises(DataError, match=r"mask.bin: all zero"):
        check_loss_mask(mask, "mask.bin")
    mask[place] = 1
    check_loss_mask(mask, "mask.bin")
    mask[place] = 2
    with pytest.raises(DataError, match=r"mask.bin: holds 2"):
        check_loss_mask(mask, "mask.bin")


def test_places_of_a_large_file_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ends among them. That a large mask holds a 1 somewhere cannot be said."""
    monkeypatch.setattr(documents, "_PLACES", 4)
    monkeypatch.setattr(documents, "_PLACE_BYTES", 1000)
    mask = np.zeros(SMALL, dtype=np.uint8)
    mask[5000:6000] = 3  # between two places
    check_loss_mask(mask, "mask.bin")
    for place in (0, 999, SMALL - 1000, SMALL - 1):
        wrong = mask.copy()
        wrong[place] = 2
        with pytest.raises(DataError, match="holds 2"):
            check_loss_mask(wrong, "mask.bin")
