# SPDX-License-Identifier: Apache-2.0
"""``--sparse-balance-cost-table auto``: measure at start-up on one rank, share with all."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from sparsebalance_megatron.cost.table import CostTable, CostTableError

AUTO = "auto"

_LAUNCHER_PREFIXES = ("RANK", "WORLD_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Prefixes of the variables by which torchrun tells a process that it is one of many."""


def shared_cost_table(
    flags: Sequence[str], directory: str | None, group: dist.ProcessGroup | None = None
) -> CostTable:
    """Measure on rank 0 with ``sparse-balance profile --quick``; collective over the group.

    Args:
        flags: training's own command line.
        directory: where rank 0 keeps ``cost_table.json``; None keeps it nowhere.

    Raises:
        CostTableError: on every rank alike, if the measurement failed.
    """
    outcome: list[CostTable | str | None] = [None]
    if dist.get_rank(group) == 0:
        outcome[0] = _measured(flags, directory)
    dist.broadcast_object_list(outcome, group_src=0, group=group)
    (table,) = outcome
    if not isinstance(table, CostTable):
        raise CostTableError(
            f"--sparse-balance-cost-table auto: profiling failed on rank 0: {table}; run "
            "`sparse-balance profile` by hand with these flags and give its table"
        )
    return table


def _measured(flags: Sequence[str], directory: str | None) -> CostTable | str:
    """The table, or what went wrong. A process of its own: Megatron's state here is training's."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(directory or scratch) / "cost_table.json"
        command = [sys.executable, "-m", "sparsebalance_megatron.cli", "profile", "--quick"]
        done = subprocess.run(
            [*command, "-o", str(path), "--", *flags],
            env={
                name: value
                for name, value in os.environ.items()
                if not name.startswith(_LAUNCHER_PREFIXES)
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        return CostTable.load(path)
