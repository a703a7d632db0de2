# SPDX-License-Identifier: Apache-2.0
"""What differs between two runs that are compared, read from the headers of their logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.log.reader import RunLog
from sparsebalance_megatron.log.records import RunHeader
from sparsebalance_megatron.plan.job import Job

_SAME_MODEL_AND_DATA = ("layers", "seq_length", "global_batch_size", "counts", "sources")
"""Fields without which a comparison says nothing of the plugin."""
_OF_THE_RUN = (
    *(each.name for each in fields(Job)),
    *("pipeline_stages", "virtual_stages", "device", "cost_source", "megatron_core", "torch"),
)
_OF_NO_ACCOUNT = frozenset({"log_dir", "log_megabytes", "dry_run", "cost_table"})
"""Settings that change no step."""
_LONGEST_VALUE = 60


def differences(baseline: RunLog, run: RunLog) -> tuple[str, ...]:
    """ "NAME A in the baseline, B in the run" for every setting that differs; none without headers.

    Raises:
        ConfigError: the runs trained other models or data.
    """
    if baseline.header is None or run.header is None:
        return ()
    other = _differing(baseline.header, run.header, _SAME_MODEL_AND_DATA)
    if other:
        raise ConfigError(
            f"{baseline.directory} and {run.directory} trained other models or data: "
            f"{'; '.join(other)}. Compare runs of one model over the same samples"
        )
    settings = [
        text
        for name in {**baseline.header.config, **run.header.config}
        if name not in _OF_NO_ACCOUNT
        if (text := _difference(name, baseline.header.config, run.header.config))
    ]
    return (*_differing(baseline.header, run.header, _OF_THE_RUN), *settings)


def _differing(baseline: RunHeader, run: RunHeader, names: tuple[str, ...]) -> list[str]:
    before, after = (
        {name: getattr(header if hasattr(header, name) else header.job, name) for name in names}
        for header in (baseline, run)
    )
    return [text for name in names if (text := _difference(name, before, after))]


def _difference(name: str, baseline: Mapping[str, Any], run: Mapping[str, Any]) -> str | None:
    before, after = (_shown(values.get(name)) for values in (baseline, run))
    if before == after:
        return None
    return f"{name.replace('_', ' ')} {before} in the baseline, {after} in the run"


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
