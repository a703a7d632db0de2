# SPDX-License-Identifier: Apache-2.0
"""Documents that most runs train on."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import long_tailed_lengths, write_documents


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("documents") / "train"
    return write_documents(prefix, long_tailed_lengths(60, longest=250))
