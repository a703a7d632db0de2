# SPDX-License-Identifier: Apache-2.0
"""Every test of this directory runs with uninitialised memory filled with NaN."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Torch's deterministic mode fills what ``torch.empty`` and its kin return with NaN.

    On a GPU it also refuses cuBLAS and others that oracles use, unless it is told to warn only.
    """
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
