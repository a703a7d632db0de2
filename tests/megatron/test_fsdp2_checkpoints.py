# SPDX-License-Identifier: Apache-2.0
"""An optimizer of shards goes on counting its steps; see also run/test_resume."""

from types import SimpleNamespace
from typing import Any

import torch

from sparsebalance_megatron.megatron.fsdp2_checkpoints import restore_steps


def chained(*optimizers: torch.optim.Optimizer) -> Any:
    return SimpleNamespace(
        chained_optimizers=[SimpleNamespace(optimizer=each) for each in optimizers]
    )


def test_steps_come_back_by_parameter_or_by_group_and_are_not_shared() -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    adam = torch.optim.Adam([first, second])
    groups = [{"params": [0, 1]}]
    restore_steps(
        chained(adam), {"param_groups": groups, "state": {"common_step": torch.tensor(3.0)}}
    )
    steps = [adam.state[each]["step"] for each in (first, second)]
    assert steps == [torch.tensor(3.0)] * 2
    assert steps[0] is not steps[1]

    fused = [torch.optim.SGD([each], lr=0.1) for each in (first, second)]
    saved = {
        index: {"optimizer": {"param_groups": [{"params": [0], "step": 5 + index}], "state": {}}}
        for index in (0, 1)
    }
    restore_steps(chained(*fused), saved)
    assert [each.param_groups[0]["step"] for each in fused] == [5, 6]
