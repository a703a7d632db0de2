# SPDX-License-Identifier: Apache-2.0
"""Ranks that may share rows compare plans before a step, when none waits for another yet.

A rank whose plan differs would wait inside attention for a member that never comes. Ranks that
share no row need no such care: the reduction at the step's end compares all plans.
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from sparsebalance_megatron.training.step_reducer import PlanMismatchError

_DIGEST_BYTES = 8


def require_agreement(step: int, digest: bytes, group: ProcessGroup) -> None:
    """Compare the digests of a step's plan; collective over the group, on the host.

    Args:
        group: the ranks that may share rows with this one, over a backend of the host.

    Raises:
        PlanMismatchError: on all ranks of the group alike, if two plans differ.
    """
    own = int.from_bytes(digest[:_DIGEST_BYTES], "big", signed=True)
    # "cpu" is said: the default device may be another.
    digests = torch.empty(group.size(), dtype=torch.int64, device="cpu")
    torch.distributed.all_gather_into_tensor(
        digests, torch.tensor([own], dtype=torch.int64, device="cpu"), group=group
    )
    differing = torch.nonzero(digests != digests[0]).flatten().tolist()
    if differing:
        members = torch.distributed.get_process_group_ranks(group)
        raise PlanMismatchError(
            f"step {step}: ranks {[members[place] for place in differing]} planned another step "
            f"than rank {members[0]}, with which they may share rows; check that all ranks run the "
            "same software on the same data"
        )
