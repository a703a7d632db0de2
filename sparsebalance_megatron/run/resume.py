# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of the run that wrote it, and what a run that resumes may differ in."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from sparsebalance_megatron.learn.step_planner import StateError
from sparsebalance_megatron.megatron.compat import last_saved_iteration
from sparsebalance_megatron.run.inputs import CostedInputs, fingerprint

_SAMPLES = "training samples"
_WHAT_SAMPLES_FOLLOW = (
    "the files, --split, --seq-length, --seed or --sparse-balance-overlong changed"
)
_LONGEST_VALUE = 80
"""Characters; of longer values a digest is kept."""


def run_record(inputs: CostedInputs) -> dict[str, str]:
    """What plans depend on, as text: flag, file or software -> value or digest."""
    return {name: _short(value) for name, value in fingerprint(inputs).items()}


def compare_runs(saved: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """What differs from the run that wrote the checkpoint, one sentence each; all of it allowed.

    Raises:
        StateError: if the training samples differ: the number of samples consumed, by which a run
            finds its place, means nothing in other data.
    """
    changes = tuple(
        f"{name} is {now.get(name, 'absent')}, in the checkpoint {saved.get(name, 'absent')}"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    )
    if saved[_SAMPLES] != now[_SAMPLES]:
        sources = "; ".join(change for change in changes if change.startswith("source "))
        raise StateError(
            "--data-path: the training samples are not those of the checkpoint ("
            f"{sources or _WHAT_SAMPLES_FOLLOW}); resume with the same ones, or begin anew on "
            "these from the checkpoint's weights with --finetune"
        )
    return changes


def _short(value: str) -> str:
    if len(value) <= _LONGEST_VALUE:
        return value
    return f"digest {hashlib.sha256(value.encode()).hexdigest()[:12]}"


def resume_advice(save: Path) -> str:
    """What a run that saves to ``save``, and was ended by an error, can go on from."""
    iteration = last_saved_iteration(str(save))
    if iteration is None:
        return f"there is no complete checkpoint in {save}"
    free_gigabytes = shutil.disk_usage(save).free / 1e9
    return (
        f"the last complete checkpoint in {save} is of iteration {iteration}, with "
        f"{free_gigabytes:.1f} GB free there; mend the cause and resume with --load {save}"
    )
