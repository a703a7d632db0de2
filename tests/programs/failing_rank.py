# SPDX-License-Identifier: Apache-2.0
"""The entry point with a fault, named by the first two arguments; the rest is the command line.

``kill STEP`` ends rank 1 with SIGKILL in the middle of that step (the first is 0).
``stop STEP`` stops it there, as a hang does, and lets collectives time out after 20 s. ``reader
STEP`` lets what reads its rows raise; ``digest STEP`` lets it execute another plan; ``nan STEP``
makes its loss NaN from there on.
``flags 0`` gives it other flags, ``plain 0`` no ``--sparse-balance``, ``kernels 0`` kernels whose
gradients of values are wrong.
``exchange-kill STEP`` and ``exchange-term STEP`` end it inside the first exchange of that step, by
SIGKILL and SIGTERM.
``clock STEP`` sets its wall clock two hours back there, and at each later call four hours forward
or back in turn. ``file-size BYTES`` lets no file grow beyond that, as a full disk would. Start with
``--sparse-balance-device cpu``.
"""

import datetime
import functools
import itertools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable

from sparsebalance_megatron.megatron import cpu

cpu.install()

import torch  # noqa: E402

from sparsebalance_megatron.attention.kernels import tokens  # noqa: E402
from sparsebalance_megatron.errors import DataError  # noqa: E402
from sparsebalance_megatron.megatron import hooks  # noqa: E402
from sparsebalance_megatron.megatron.timing import MicroBatchRecorder  # noqa: E402
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


def time_out_after_s(seconds: float) -> None:
    """Megatron's flag counts whole minutes."""
    for name in ("init_process_group", "new_group"):
        made = getattr(torch.distributed, name)

        def make(*arguments, made=made, **keywords):
            return made(*arguments, **keywords | {"timeout": datetime.timedelta(seconds=seconds)})

        setattr(torch.distributed, name, functools.wraps(made)(make))


def raise_in_reader(step: int) -> None:
    read = MicroBatchIterator._read

    def read_or_raise(reader, planned, micro_batch):
        if FAULTY and planned.plan.step == step:
            raise DataError("train.bin: cannot be read (input/output error)")
        return read(reader, planned, micro_batch)

    MicroBatchIterator._read = read_or_raise


def differ_in(step: int) -> None:
    digest = StepPlan.digest
    StepPlan.digest = lambda plan: bytes(32) if FAULTY and plan.step == step else digest(plan)


def lose_numbers_from(step: int) -> None:
    """The loss of rank 1 is NaN from a step on, whenever that is run."""
    token_loss = hooks.token_loss
    lost = []
    at(step, lambda: lost.append(True))
    hooks.token_loss = lambda mask, check, output: token_loss(
        mask, check, output * (float("nan") if lost else 1.0)
    )


def set_clock_from(step: int) -> None:
    """The wall clock of rank 1 jumps from a step on; what is measured by others must not."""
    now, jumps_s = time.time, itertools.cycle((-7200.0, 7200.0))

    def set_anew() -> None:
        time.time = lambda: now() + next(jumps_s)

    MicroBatchRecorder.__init__.__kwdefaults__["unix_clock"] = lambda: time.time()
    at(step, set_anew)


def change_flags(_: int) -> None:
    if FAULTY:
        sys.argv += ["--sparse-balance-base-budget", "2"]
        sys.argv += ["--sparse-balance-config", "log-megabytes=7"]


def leave_the_plugin_off(_: int) -> None:
    if FAULTY:
        sys.argv.remove("--sparse-balance")


def change_kernels(_: int) -> None:
    if FAULTY:
        right = tokens.backward
        tokens.backward = lambda dout, saved: (*right(dout, saved)[:2], 1.1 * saved.v_TGF)


def limit_files(size_bytes: int) -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard_limit))


def at_exchange(step: int, do: Callable[[], object]) -> None:
    """Do something where rank 1 first exchanges in the second micro-batch of a step, or later."""
    armed = []
    at(step, lambda: armed.append(True))
    for name in ("all_gather_into_tensor", "batch_isend_irecv", "all_to_all_single", "all_reduce"):
        exchange = getattr(torch.distributed, name)

        def exchange_or_end(*arguments, exchange=exchange, **keywords):
            if armed:
                do()
            return exchange(*arguments, **keywords)

        setattr(torch.distributed, name, exchange_or_end)


ENDS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
}

FAULTS = {
    "kill": lambda step: at(step, ENDS["kill"]),
    **{
        f"exchange-{name}": lambda step, end=end: at_exchange(step, end)
        for name, end in ENDS.items()
    },
    "stop": lambda step: at(step, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "reader": raise_in_reader,
    "digest": differ_in,
    "nan": lose_numbers_from,
    "clock": set_clock_from,
    "flags": change_flags,
    "plain": leave_the_plugin_off,
    "kernels": change_kernels,
    "file-size": limit_files,
}

if __name__ == "__main__":
    fault, value = sys.argv[1], int(sys.argv[2])
    del sys.argv[1:3]
    if fault == "stop":
        time_out_after_s(20)
    FAULTS[fault](value)
    main()
