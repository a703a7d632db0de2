# SPDX-License-Identifier: Apache-2.0
"""The entry point with layer norms that sequence parallelism can use.

On a GPU they come from Transformer Engine or Apex. Megatron's wrapper around PyTorch's norms, all
that there is on a CPU, refuses; what it lacks is the mark by which Megatron sums the gradients of
their weights over tensor-parallel ranks. Start with ``--sparse-balance-device cpu``.
"""

import copy

from sparsebalance_megatron.megatron import cpu

cpu.install()

from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402

from sparsebalance_megatron.pretrain_gpt import main  # noqa: E402

make_norm = WrappedTorchNorm.__new__


def make_marked_norm(cls, config, *arguments, **keywords):
    unmarked = copy.copy(config)
    unmarked.sequence_parallel = False
    norm = make_norm(cls, unmarked, *arguments, **keywords)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def mark_norms() -> None:
    WrappedTorchNorm.__new__ = staticmethod(make_marked_norm)


if __name__ == "__main__":
    mark_norms()
    main()
