# SPDX-License-Identifier: Apache-2.0
"""Do all ranks run with the same settings? Asked once, before the first plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist


class RankDisagreementError(RuntimeError):
    """Ranks were started with different flags, data or software."""


def check_ranks_agree(
    fingerprint: Mapping[str, str], group: dist.ProcessGroup | None = None
) -> None:
    """Compare every rank's fingerprint with rank 0's; collective over the group.

    Raises:
        RankDisagreementError: on every rank alike, naming the entry, the ranks and the values.
    """
    gathered: list[Mapping[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(gathered, dict(fingerprint), group=group)
    for name in sorted(set().union(*gathered)):
        values = [other.get(name, "absent") for other in gathered]
        differing = [rank for rank, value in enumerate(values) if value != values[0]]
        if differing:
            raise RankDisagreementError(
                f"{name}: rank 0 has {values[0]!r}, rank {differing[0]} has "
                f"{values[differing[0]]!r} (ranks that differ: {differing}); "
                "start every rank with the same flags, data and software"
            )
