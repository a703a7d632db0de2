# SPDX-License-Identifier: Apache-2.0
"""Samples without a trained token: what is said at the start, printed and logged."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from harness import read_steps, train, write_documents

from sparsebalance_megatron.data.documents import write_index

pytestmark = pytest.mark.distributed
LENGTHS = [120, 80, 200, 60, 150, 90, 110, 70]


def masked_documents(folder: Path, untrained: set[int]) -> Path:
    """Documents; of the untrained ones only the first token is trained, which is no target."""
    prefix = write_documents(folder / "train", LENGTHS)
    masks = [np.ones(length, np.uint8) for length in LENGTHS]
    for document in untrained:
        masks[document][1:] = 0
    mask_prefix = Path(f"{prefix}_loss_mask")
    mask_prefix.with_name(f"{mask_prefix.name}.bin").write_bytes(np.concatenate(masks).tobytes())
    write_index(mask_prefix.with_name(f"{mask_prefix.name}.idx"), LENGTHS, np.uint8)
    return prefix


@pytest.mark.parametrize("untrained", [{1, 2, 3}, {0, 1, 2, 3}])
def test_their_steps_keep_the_loss_of_their_log_interval(
    untrained: set[int], tmp_path: Path
) -> None:
    """Documents 4 to 7 validate, and none of them has a target: Megatron prints a loss of 0."""
    documents = masked_documents(tmp_path, untrained | {4, 5, 6, 7})
    flags = ("--global-batch-size", "2", "--log-interval", "4", "--train-iters", "4")
    flags += ("--split", "50,50,0", "--eval-iters", "1", "--eval-interval", "4")
    run = train(2, documents, *flags, log_dir=tmp_path / "log")
    assert run.exit_code == 0, run.output
    said = re.findall(r"sparse balance: (.*) samples have no trained token", run.output)
    assert said == [f"{len(untrained)} of the first 4", "validation: 4 of the first 4"]
    (printed,) = re.findall(r"iteration +4/.*", run.output)
    losses = [step["lm_loss"] for step in read_steps(tmp_path / "log")]
    assert len(losses) == 4
    found = re.search(r"lm loss: ([\d.E+-]+)", printed)
    assert found is not None
    mean = sum(loss or 0.0 for loss in losses) / 4
    assert math.isclose(float(found[1]), mean, rel_tol=1e-4)
    assert "number of nan iterations:   0" in printed
    assert "validation loss at iteration 4 | lm loss value: 0.000000E+00" in run.output
