# SPDX-License-Identifier: Apache-2.0
"""Warnings of imports are left out; built data set helpers are kept."""

import logging
import warnings
from pathlib import Path

import pytest

from sparsebalance_megatron.megatron.compat import keep_built_data_set_helpers
from sparsebalance_megatron.megatron.datasets import quiet_imports


def warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=2)
    logging.getLogger("torch.utils.cpp_extension").warning(text)


def test_warnings_are_left_out_inside_only(
    recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    warn("before")
    with quiet_imports():
        warn("inside")
    warn("after")
    assert [str(each.message) for each in recwarn] == ["before", "after"]
    assert caplog.messages == ["before", "after"]


def test_a_failed_import_ends_the_silence_too(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ImportError), quiet_imports():
        raise ImportError
    logging.getLogger("torch.utils.cpp_extension").warning("after")
    assert caplog.messages == ["after"]


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
