# SPDX-License-Identifier: Apache-2.0
"""The entry point, which prints at every step how many times a rank's routers chose an expert.

Layer norms are those of sequence_parallel.py. Start with ``--sparse-balance-device cpu``.
"""

from __future__ import annotations

import sys
from typing import Any

from sequence_parallel import mark_norms

from sparsebalance_megatron.megatron import cpu

cpu.install()

from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402

from sparsebalance_megatron.pretrain_gpt import main  # noqa: E402

# The package has a function of this name, which hides the module.
finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
update_bias = finalize._update_router_expert_bias


def print_counts(model: list[Any], *others: Any, **keywords: Any) -> Any:
    routers = [each for chunk in model for each in chunk.modules() if isinstance(each, TopKRouter)]
    print("experts chosen:", int(sum(each.local_tokens_per_expert.sum() for each in routers)))
    return update_bias(model, *others, **keywords)


if __name__ == "__main__":
    mark_norms()
    finalize._update_router_expert_bias = print_counts
    main()
