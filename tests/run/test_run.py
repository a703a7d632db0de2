# SPDX-License-Identifier: Apache-2.0
"""Figures of a step by hand, and every report of the step gets them."""

from __future__ import annotations

import pytest
import torch
from step_cases import measured_as_planned, planned_step, slowed_down

from sparsebalance_megatron.learn.step_figures import StepFigures
from sparsebalance_megatron.plan.metrics import rank_busy_ms
from sparsebalance_megatron.run.run import add_figures, logged_figures


def test_figures_of_a_step_with_a_slow_stage() -> None:
    planned = planned_step()
    expectation = planned.plan.expectation
    measured = slowed_down(measured_as_planned(planned), 0, 0, 3.0)
    busy_R = rank_busy_ms(measured.times_2RPVM)
    expected_R = rank_busy_ms(expectation.times_2RPVM)
    figures = StepFigures.of(planned, measured)
    assert logged_figures(figures, {"padded-tokens": 5, "dropped-tokens": 0}) == {
        "sparse-balance/imbalance": pytest.approx(max(busy_R) * 2 / sum(busy_R)),
        "sparse-balance/predicted-to-measured": pytest.approx(max(expected_R) / max(busy_R)),
        "sparse-balance/coverage": pytest.approx(0.45),
        "sparse-balance/tuned-samples": 0.0,
        "sparse-balance/padded-tokens": 5.0,
    }


def test_every_report_gets_the_figures_beside_its_own() -> None:
    reports = [{"lm loss": torch.tensor(2.0)}, {"lm loss": torch.tensor(3.0)}]
    add_figures(reports, {"a": 1.0, "b": 0.5}, torch.device("cpu"))
    assert [{name: value.item() for name, value in each.items()} for each in reports] == [
        {"lm loss": 2.0, "a": 1.0, "b": 0.5},
        {"lm loss": 3.0, "a": 1.0, "b": 0.5},
    ]
