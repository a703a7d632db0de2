# SPDX-License-Identifier: Apache-2.0
"""Steps in segments against Megatron's own schedule, on real pipelines."""

from __future__ import annotations

import json

import numpy as np
import pytest
from harness import PROGRAMS, run_training

pytestmark = pytest.mark.distributed


@pytest.mark.nightly
@pytest.mark.parametrize("stages", [2, 4])
def test_a_thousand_steps_do_not_hang(stages, tmp_path):
    program = (str(PROGRAMS / "segmented_rank.py"), str(tmp_path), "1000")
    run_training(stages, (), program=program, timeout_s=600).require_success()
    for stage in range(stages):
        assert json.loads((tmp_path / f"rank{stage}.json").read_text()) == 1000


@pytest.mark.parametrize("stages", [2, 4])
def test_a_step_in_segments_learns_what_a_step_in_one_piece_learns(stages, tmp_path):
    program = (str(PROGRAMS / "segmented_rank.py"), str(tmp_path))
    run_training(stages, (), program=program).require_success()
    for stage in range(stages):
        for run in json.loads((tmp_path / f"rank{stage}.json").read_text()):
            cut, whole = run["cut"], run["whole"]
            np.testing.assert_allclose(cut["loss"], whole["loss"], rtol=1e-14)
            assert (cut["loss"] > 0) == (stage == stages - 1)
            for actual, expected in zip(cut["gradients"], whole["gradients"], strict=True):
                np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)
            # Gradients are reduced in the last backward of the step, or by grad_sync_func after it.
            late = run["sync"] and stage > 0
            ending = ["backward", "on", "sync"] if late else ["on", "backward"]
            tokens = run["tokens"] if stage == stages - 1 else 0
            assert cut["told"] == [
                "off",
                *["backward"] * (run["segments"] - 1),
                *ending,
                f"finalize {tokens}",
            ]
