# SPDX-License-Identifier: Apache-2.0
"""examples/hosts/fully_shard.py on the samples of the host that owns its data.

Arguments: the example, and the directory for ``world<n>-rank<r>.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trainer_loops import DENSE, HOST_SIZES, TUNED, batches, module_at

import torch.distributed as dist  # isort: skip
from small_gpt import Losses, balance_config, pipeline, transformer_config  # isort: skip


def main(path: str, output: str) -> None:
    example = module_at("fully_shard", path)
    dist.init_process_group("gloo")
    found = {}
    with pipeline(1):
        for name, choices in {"dense": DENSE, "tuned": TUNED}.items():
            losses = Losses()
            made = transformer_config(), balance_config(**choices)
            example.train(*made, HOST_SIZES, batches(), losses)
            found[name] = {"losses": losses.values, "figures": losses.figures}
    file = Path(output, f"sharded{dist.get_world_size()}-rank{dist.get_rank()}.json")
    file.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
