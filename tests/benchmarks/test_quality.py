# SPDX-License-Identifier: Apache-2.0
"""One process trains the model that the planned ranks train."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quality.launch import budgets_file, execute, prepared_data
from quality.run_spec import RunSpec
from quality.tasks import STUDIES

STUDY, STEPS = "lookup-steady", 8


@pytest.mark.nightly
@pytest.mark.parametrize("arm", ["ours", "paper", "jitter"])
def test_one_process_trains_as_the_planned_ranks(arm: str, tmp_path: Path) -> None:
    data = str(prepared_data(STUDIES[STUDY], 0, STEPS, tmp_path))

    def run(ranks: int) -> tuple[np.ndarray, dict[str, Any]]:
        spec = RunSpec(
            study_name=STUDY,
            arm_name=arm,
            seed=0,
            steps=STEPS,
            share=0.05,
            data=data,
            directory=str(tmp_path / f"{arm}{ranks}"),
            ranks=ranks,
        )
        found = execute(spec)
        return np.load(budgets_file(spec))["executed_TLS"], found

    (alone_TLS, alone), (shared_TLS, shared) = run(1), run(STUDIES[STUDY].planned_ranks)
    np.testing.assert_array_equal(alone_TLS, shared_TLS)
    assert len(np.unique(alone_TLS)) > 1
    assert alone["training_loss"] == pytest.approx(shared["training_loss"], rel=1e-5)
    assert alone["planned_step_ms"] == shared["planned_step_ms"]
    for task, scores in alone["tasks"].items():
        for reading, sums in scores.items():
            assert sums["labels"] == shared["tasks"][task][reading]["labels"]
            assert sums["loss"] == pytest.approx(shared["tasks"][task][reading]["loss"], rel=1e-5)
