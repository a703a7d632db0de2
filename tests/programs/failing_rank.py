# SPDX-License-Identifier: Apache-2.0
"""The entry point with a fault, named by the first two arguments; the rest is the command line.

At its second micro-batch of step STEP (the first is 0), rank 1 is ended by ``kill STEP`` with
SIGKILL; with ``reader STEP`` reading raises; from there on ``digest STEP`` lets it execute other
plans, and ``nan STEP`` makes its loss NaN.
``flags 0`` gives it other flags, ``plain 0`` no ``--sparse-balance``, ``kernels 0`` kernels whose
gradients of values are wrong. ``file-size BYTES`` lets no file grow beyond that, as a full disk
would. Start with ``--sparse-balance-device cpu``.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable

from sparsebalance_megatron.megatron import cpu

cpu.install()

from sparsebalance_megatron.attention.kernels import tokens  # noqa: E402
from sparsebalance_megatron.errors import DataError  # noqa: E402
from sparsebalance_megatron.megatron import hooks  # noqa: E402
from sparsebalance_megatron.plan.step_plan import StepPlan  # noqa: E402
from sparsebalance_megatron.pretrain_gpt import main  # noqa: E402
from sparsebalance_megatron.run.micro_batches import MicroBatchIterator  # noqa: E402

FAULTY = os.environ["RANK"] == "1"


def at(step: int, do: Callable[[], None]) -> None:
    """Do something at rank 1's second micro-batch of a step, when it was read."""
    next_micro_batch = MicroBatchIterator.__next__

    def next_and_do(iterator):
        micro_batch = next_micro_batch(iterator)
        if FAULTY and (micro_batch.step, micro_batch.position) == (step, 1):
            do()
        return micro_batch

    MicroBatchIterator.__next__ = next_and_do


def raise_in_reader() -> None:
    raise DataError("train.bin: cannot be read (input/output error)")


def differ() -> None:
    StepPlan.digest = lambda plan: bytes(32)


def lose_numbers() -> None:
    """Whenever that step is run."""
    token_loss = hooks.token_loss
    hooks.token_loss = lambda mask, check, output: token_loss(mask, check, output * float("nan"))


def change_flags() -> None:
    sys.argv += ["--sparse-balance-base-budget", "2"]
    sys.argv += ["--sparse-balance-config", "log-megabytes=7"]


def change_kernels() -> None:
    right = tokens.backward
    tokens.backward = lambda dout, saved: (*right(dout, saved)[:2], 1.1 * saved.v_TGF)


def limit_files(size_bytes: int) -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard_limit))


IN_A_STEP = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "reader": raise_in_reader,
    "digest": differ,
    "nan": lose_numbers,
}
AT_THE_START = {
    "flags": change_flags,
    "plain": lambda: sys.argv.remove("--sparse-balance"),
    "kernels": change_kernels,
}

if __name__ == "__main__":
    fault, value = sys.argv[1], int(sys.argv[2])
    del sys.argv[1:3]
    if fault in IN_A_STEP:
        at(value, IN_A_STEP[fault])
    elif fault == "file-size":
        limit_files(value)
    elif FAULTY:
        AT_THE_START[fault]()
    main()
