# SPDX-License-Identifier: Apache-2.0
"""Two runs: what differs is named first, and other models or data are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from plan.plan_cases import job_shape
from record_cases import header_of

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.log.reader import RunLog
from sparsebalance_megatron.view.report.numbers import compare
from sparsebalance_megatron.view.report.words import settings_that_differ


def log(name: str, **changes: Any) -> RunLog:
    job = replace(job_shape(2, 2), **changes.pop("job", {}))
    header = structs.replace(header_of(job), **changes)
    return RunLog(directory=Path(name), header=header, steps=(), problems=())


def test_what_differs_is_named() -> None:
    config = {"block_size": 128, "tuning": "off", "log_dir": "a"}
    before, after = log("a", config=config), log("b", config=config | {"log_dir": "b"})
    assert compare(before, after).differences == ()
    assert settings_that_differ(compare(before, after)) == []
    other = log("b", config=config | {"block_size": 256}, job={"data_parallel_size": 7})
    (sentence,) = settings_that_differ(compare(before, other))
    assert "block size 128 in the baseline, 256 in the run" in sentence
    assert "data parallel size " in sentence and "7 in the run" in sentence


@pytest.mark.parametrize(("name", "value"), [("seq_length", 3), ("counts", {"samples": 5})])
def test_other_models_or_data_are_refused(name: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"a and b trained other models or data: {name.replace('_', ' ')} "
    ):
        compare(log("a"), log("b", **{name: value}))


def test_without_headers_nothing_is_known() -> None:
    bare = RunLog(directory=Path("a"), header=None, steps=(), problems=())
    assert compare(bare, log("b", seq_length=3)).differences == ()
