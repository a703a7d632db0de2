# SPDX-License-Identifier: Apache-2.0
"""The entry point, which writes one checkpoint, of the untrained model, and none while training.

Start with ``--sparse-balance-device cpu`` and a ``--save-interval`` that the last step divides by.
"""

from sparsebalance_megatron.runtime import cpu

cpu.install()

import megatron.training.training as training  # noqa: E402
from megatron.training import get_args  # noqa: E402
from megatron.training.checkpointing import save_checkpoint  # noqa: E402

from sparsebalance_megatron.pretrain_gpt import main  # noqa: E402

train = training.train


def save_then_train(forward_step, model, optimizer, scheduler, *arguments, **keywords):
    save_checkpoint(1, model, optimizer, scheduler, 0)
    get_args().save = None
    return train(forward_step, model, optimizer, scheduler, *arguments, **keywords)


if __name__ == "__main__":
    training.train = save_then_train
    main()
