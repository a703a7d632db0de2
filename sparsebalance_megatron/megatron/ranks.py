# SPDX-License-Identifier: Apache-2.0
"""Where this rank stands among Megatron's; asked once its process groups exist."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup

from sparsebalance_megatron.learn.measurement import RankPlace


def rank_place() -> RankPlace:
    """Where this rank stands; data-parallel and context-parallel ranks count together."""
    return RankPlace(
        data_parallel_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        world_rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
    )


def data_parallel_group() -> ProcessGroup:
    """The ranks that train the same layers on other samples; context-parallel ranks left out."""
    return parallel_state.get_data_parallel_group()


def data_parallel_size() -> int:
    """How many such ranks there are."""
    return int(parallel_state.get_data_parallel_world_size())
