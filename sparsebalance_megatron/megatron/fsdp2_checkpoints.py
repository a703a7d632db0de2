# SPDX-License-Identifier: Apache-2.0
"""Mends Megatron's checkpoints of parameters that ranks hold in shards (``--use-torch-fsdp2``).

In megatron-core 0.19.2 an optimizer's state is not matched with its parameters, shards of experts
count as copies of one another, so that most are not written, and Adam's number of steps is not read
back.
"""

import copy
import functools
from typing import Any

from torch.distributed.tensor import DTensor

from sparsebalance_megatron.megatron.compat import saved_state


def use_sharded_checkpoints() -> None:
    """Have ``megatron.training`` save and load shards; once, before it builds the model."""
    from megatron.core.dist_checkpointing import optimizer as optimizer_states
    from megatron.training import checkpointing, training

    # Parameters are matched by identity, and ``to_local`` makes a new tensor every time.
    optimizer_states.to_local_if_dtensor = local_shard
    checkpointing.generate_state_dict = _with_unique_shards(checkpointing.generate_state_dict)
    training.load_checkpoint = _with_optimizer_steps(training.load_checkpoint)


def local_shard(tensor: Any) -> Any:
    """The shard of a tensor on this rank, always the same object; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _UniqueShards:
    """A model whose shards are written by the ranks that hold them."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def sharded_state_dict(self, **keywords: Any) -> dict[str, Any]:
        entries: dict[str, Any] = self._model.sharded_state_dict(**keywords)
        shards = {id(local_shard(each)) for each in self._model.parameters()}
        for entry in entries.values():
            if id(getattr(entry, "data", None)) in shards:
                # Pipeline, tensor and data-parallel rank: each of the last has a shard of its own.
                entry.replica_id = (*entry.replica_id[:2], 0)
        return entries


def _with_unique_shards(generate: Any) -> Any:
    @functools.wraps(generate)
    def generate_state_dict(args: Any, model: Any, *others: Any, **keywords: Any) -> Any:
        return generate(args, [_UniqueShards(chunk) for chunk in model], *others, **keywords)

    return generate_state_dict


def _with_optimizer_steps(load: Any) -> Any:
    @functools.wraps(load)
    def load_checkpoint(model: Any, optimizer: Any, *others: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        iteration, operations = load(model, optimizer, *others, **keywords)
        args = get_args()
        if iteration and not args.finetune and not args.no_load_optim:
            state = saved_state(args.load, iteration).get("optimizer")
            if state is not None:
                restore_steps(optimizer, state)
        return iteration, operations

    return load_checkpoint


def restore_steps(optimizer: Any, state: dict[Any, Any]) -> None:
    """Set how many steps a ``ChainedOptimizer`` has taken, from what is common to all ranks of its
    saved state."""
    parts = optimizer.chained_optimizers
    states = [state] if len(parts) == 1 else [state[index] for index in range(len(parts))]
    for part, of_part in zip(parts, states, strict=True):
        # In 16 bits, that of the optimizer inside.
        saved = of_part.get("optimizer", of_part)
        # Torch's optimizers count by parameter, Transformer Engine's by group.
        common = saved.get("state", {}).get("common_step")
        by_group = [group["step"] for group in saved["param_groups"] if "step" in group]
        for group in part.optimizer.param_groups:
            if by_group:
                group["step"] = copy.deepcopy(by_group[0])
            if common is not None:
                for parameter in group["params"]:
                    part.optimizer.state[parameter]["step"] = copy.deepcopy(common)
