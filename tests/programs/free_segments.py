# SPDX-License-Identifier: Apache-2.0
"""The entry point with counted costs in which segments cost nothing, so that plans have some.

Counted operations of a tiny model take microseconds, less than what an operation is assumed to
cost. Start with ``--sparse-balance-device cpu``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparsebalance_megatron.megatron import cpu

cpu.install()

from sparsebalance_megatron.cost.model import CostModel  # noqa: E402
from sparsebalance_megatron.cost.parts import SegmentCost  # noqa: E402
from sparsebalance_megatron.pretrain_gpt import main  # noqa: E402

analytic = CostModel.analytic


def with_free_segments(*arguments: Any, **keywords: Any) -> CostModel:
    free = SegmentCost(slowness=1.0, operation_ms=(0.0, 0.0))
    return replace(analytic(*arguments, **keywords), segments=free)


if __name__ == "__main__":
    CostModel.analytic = with_free_segments  # type: ignore[method-assign, assignment]
    main()
