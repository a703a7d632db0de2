# SPDX-License-Identifier: Apache-2.0
"""The entry point with a fault, named by the first two arguments; the rest is the command line.

``kill STEP`` ends rank 1 with SIGKILL in the middle of that step (the first is 0), together with
the processes that Megatron's checkpoint writer has left it, which nobody would end otherwise.
``leave STEP`` ends it there with exit code 0, so that nobody ends the others.
``file-size BYTES`` lets no file grow beyond that, as a full disk would. Start with
``--sparse-balance-device cpu``.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable

from sparsebalance_megatron.megatron import cpu

cpu.install()

from sparsebalance_megatron.pretrain_gpt import main  # noqa: E402
from sparsebalance_megatron.training.data_iterator import MicroBatchIterator  # noqa: E402


def die_in(step: int, die: Callable[[], None]) -> None:
    next_micro_batch = MicroBatchIterator.__next__

    def next_or_die(iterator):
        micro_batch = next_micro_batch(iterator)
        if (micro_batch.step, micro_batch.position) == (step, 1) and os.environ["RANK"] == "1":
            die()
        return micro_batch

    MicroBatchIterator.__next__ = next_or_die


if __name__ == "__main__":
    fault, value = sys.argv[1], int(sys.argv[2])
    del sys.argv[1:3]
    if fault == "kill":
        die_in(value, lambda: os.killpg(os.getpgrp(), signal.SIGKILL))
    elif fault == "leave":
        die_in(value, lambda: os._exit(0))
    else:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (value, hard_limit))
    main()
