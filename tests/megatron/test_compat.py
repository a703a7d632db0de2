# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from sparsebalance_megatron.megatron.compat import keep_built_data_set_helpers


@pytest.mark.parametrize(
    ("files", "builds"),
    [
        (["helpers_cpp.cpython-312.so"], False),
        (["helpers_cpp.cpython-312.so", "Makefile"], True),
        (["helpers.cpp"], True),
    ],
    ids=["wheel", "source, built before", "neither"],
)
def test_built_helpers_are_kept_where_no_makefile_can_build_them(
    files: list[str], builds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import megatron.core.datasets.utils as dataset_utils

    calls = []
    monkeypatch.setattr(dataset_utils, "compile_helpers", lambda: calls.append("make"))
    monkeypatch.setattr(dataset_utils, "__file__", str(tmp_path / "utils.py"))
    for name in files:
        (tmp_path / name).touch()
    keep_built_data_set_helpers()
    dataset_utils.compile_helpers()
    assert bool(calls) is builds
