# SPDX-License-Identifier: Apache-2.0
"""The entry point, with all collectives counted on the groups that ranks share rows in.

    counted_collectives.py DIRECTORY FLAGS...

leaves ``rank0.json`` and so on in the directory: calls by name, apart for forward and backward
passes and for what ranks agree upon before a step. A node has two ranks. Start with
``--sparse-balance-device cpu``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsebalance_megatron.megatron import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from sparsebalance_megatron.megatron import settings  # noqa: E402
from sparsebalance_megatron.pretrain_gpt import main  # noqa: E402
from sparsebalance_megatron.run import samples  # noqa: E402

COLLECTIVES = (
    *("all_gather_into_tensor", "reduce_scatter_tensor", "batch_isend_irecv", "all_reduce"),
    *("all_gather", "all_to_all_single", "all_to_all", "broadcast", "barrier", "reduce_scatter"),
    *("reduce", "scatter", "gather", "send", "recv", "all_gather_object"),
    *("broadcast_object_list", "monitored_barrier", "gather_object", "scatter_object_list"),
)


class Counts:
    """Calls of collectives on some groups, by where they are made and by name."""

    def __init__(self) -> None:
        self.calls: dict[str, Counter[str]] = {
            place: Counter() for place in ("forward", "backward", "agreement")
        }
        self._rows: list[Any] = []
        self._agreement: Any = None

    def watch(self, make_groups: Callable[..., Any]) -> Callable[..., Any]:
        """The function, and from then on all calls on the groups that it makes."""

        def watched(*arguments: Any, **keywords: Any) -> Any:
            new_group = dist.new_group

            def remembered(*inner: Any, **more: Any) -> Any:
                self._rows.append(new_group(*inner, **more))
                return self._rows[-1]

            dist.new_group = remembered
            groups = make_groups(*arguments, **keywords)
            dist.new_group = new_group
            self._agreement = groups.agreement
            return groups

        return watched

    def counted(self, name: str) -> Callable[..., Any]:
        """A collective that counts its calls."""
        plain = getattr(dist, name)

        def counting(*arguments: Any, **keywords: Any) -> Any:
            operations = arguments[0] if name == "batch_isend_irecv" else []
            given = [*arguments, *keywords.values(), *(each.group for each in operations[:1])]
            if any(each is self._agreement for each in given if each is not None):
                self.calls["agreement"][name] += 1
            elif any(each is group for each in given for group in self._rows):
                in_backward = torch._C._current_graph_task_id() >= 0
                self.calls["backward" if in_backward else "forward"][name] += 1
            return plain(*arguments, **keywords)

        return counting


if __name__ == "__main__":
    directory = Path(sys.argv.pop(1))
    settings.RANKS_PER_NODE = 2
    counts = Counts()
    samples.make_sequence_groups = counts.watch(samples.make_sequence_groups)
    for collective in COLLECTIVES:
        setattr(dist, collective, counts.counted(collective))
    main()
    (directory / f"rank{dist.get_rank()}.json").write_text(json.dumps(counts.calls))
