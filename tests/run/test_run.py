# SPDX-License-Identifier: Apache-2.0
"""Every report of a step gets its figures."""

from __future__ import annotations

import torch

from sparsebalance_megatron.run.run import add_figures


def test_every_report_gets_the_figures_beside_its_own() -> None:
    reports = [{"lm loss": torch.tensor(2.0)}, {"lm loss": torch.tensor(3.0)}]
    add_figures(reports, {"a": 1.0, "b": 0.5}, torch.device("cpu"))
    assert [{name: value.item() for name, value in each.items()} for each in reports] == [
        {"lm loss": 2.0, "a": 1.0, "b": 0.5},
        {"lm loss": 3.0, "a": 1.0, "b": 0.5},
    ]
