# SPDX-License-Identifier: Apache-2.0
"""One rank of the benchmark, under torchrun: the plugin's entry point with paired steps.

Megatron's flags follow this program's own. Every rank appends ``{"step": ..., "ms": ...,
"peak_megabytes": ...}`` to DIRECTORY/rank<R>.jsonl. The time is that of the whole of
``megatron.training``'s ``train_step``, which holds planning, packing, forward and backward,
gradient reduction and the optimizer; all ranks begin it together. The peak is the most resident
memory within it, null where the kernel does not say.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from alternating_run import around_every_step

from end_to_end.launch import PROGRESS
from end_to_end.variants import ALL_VARIANTS, StepOrder, Variant
from sparsebalance_megatron import pretrain_gpt
from sparsebalance_megatron.megatron.arguments import device_type_of


def main() -> None:
    own, flags = _options().parse_known_args()
    sys.argv = [sys.argv[0], *flags]
    variants = [variant for variant in ALL_VARIANTS if variant.name in own.variants]
    order = StepOrder(len(variants), own.batches)
    device_type = device_type_of(flags)
    if device_type == "cpu":
        from sparsebalance_megatron.megatron import cpu

        cpu.install()
    pair_steps(order, variants, own.ranks_in_turn)
    time_steps(order, own.directory)
    pretrain_gpt.main(flags)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--paired-variants", dest="variants", nargs="+", required=True)
    parser.add_argument("--paired-batches", dest="batches", type=int, required=True)
    parser.add_argument("--paired-directory", dest="directory", type=Path, required=True)
    parser.add_argument("--paired-ranks-in-turn", dest="ranks_in_turn", type=int, default=1)
    return parser


def pair_steps(order: StepOrder, variants: Sequence[Variant], ranks_in_turn: int) -> None:
    """Put the benchmark's hooks where the entry point looks for the plugin's."""
    from end_to_end.paired_session import PairedHooks, Pairing
    from sparsebalance_megatron.run import training_hooks

    pairing = Pairing(order=order, variants=variants, ranks_in_turn=ranks_in_turn)
    vars(training_hooks)["TrainingHooks"] = partial(PairedHooks, pairing)


def time_steps(order: StepOrder, directory: Path) -> None:
    """Write the time of every step."""
    import torch

    rank = int(os.environ["RANK"])
    file = (directory / f"rank{rank}.jsonl").open("w", encoding="utf-8", buffering=1)
    steps = iter(range(order.steps))

    @contextmanager
    def timed() -> Iterator[None]:
        torch.distributed.barrier()
        torch.cuda.synchronize()
        forget_peak()
        begin_s = time.perf_counter()
        yield
        torch.cuda.synchronize()
        ms = (time.perf_counter() - begin_s) * 1e3
        step = next(steps)
        file.write(json.dumps({"step": step, "ms": ms, "peak_megabytes": peak_megabytes()}) + "\n")
        if rank == 0 and (step + 1) % order.variants == 0:
            print(f"{PROGRESS} batch {order.batch(step) + 1} of {order.batches}", flush=True)

    around_every_step(timed)


def forget_peak() -> None:
    """Have Linux measure the process's most resident memory from now on."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_megabytes() -> float | None:
    """Most resident memory since :func:`forget_peak`."""
    status = Path("/proc/self/status")
    lines = status.read_text("utf-8").splitlines() if status.exists() else []
    peaks = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(peaks[0]) / 1e3 if peaks else None


if __name__ == "__main__":
    main()
