# SPDX-License-Identifier: Apache-2.0
"""Imbalance and busy times by hand."""

import math

import numpy as np
import pytest

from sparsebalance_megatron.plan.pipeline.operation_times import (
    imbalance,
    rank_busy_ms,
    stage_busy_ms,
)


def test_imbalance_is_max_over_mean() -> None:
    assert imbalance((90.0, 70.0)) == pytest.approx(90 / 80)
    assert imbalance(np.array([[2.0, 2.0], [2.0, 2.0]])) == 1.0
    assert imbalance((0.0, 0.0)) == 1.0
    assert math.isnan(imbalance((1.0, math.nan)))


def test_a_rank_is_as_busy_as_its_busiest_stage() -> None:
    forward_RPVM = np.arange(8.0).reshape(2, 2, 1, 2)
    stages_RP = stage_busy_ms(np.stack([forward_RPVM, 2 * forward_RPVM]))
    np.testing.assert_array_equal(stages_RP, [[3.0, 15.0], [27.0, 39.0]])
    np.testing.assert_array_equal(
        rank_busy_ms(np.stack([forward_RPVM, 2 * forward_RPVM])), [15.0, 39.0]
    )
    forward_RPVM[1, 0, 0, 0] = math.nan
    assert np.isnan(rank_busy_ms(np.stack([forward_RPVM, forward_RPVM]))).tolist() == [False, True]
