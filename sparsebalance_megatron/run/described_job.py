# SPDX-License-Identifier: Apache-2.0
"""The job that flags of training describe, checked as training checks them.

One process stands for all ranks: no process group, no device, nothing written. Import this once
the CPU adapter has been installed where that is needed: it loads Megatron.
"""

import io
import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.dense_length import with_dense_length
from sparsebalance_megatron.cost.fit import without_warnings
from sparsebalance_megatron.data.samples import read_blends
from sparsebalance_megatron.errors import one_line_refusals
from sparsebalance_megatron.megatron.arguments import arguments_without_ranks
from sparsebalance_megatron.megatron.datasets import quiet_imports
from sparsebalance_megatron.megatron.settings import RunSettings
from sparsebalance_megatron.megatron.training_arguments import checked_settings
from sparsebalance_megatron.plan.budgets.by_layer import with_layer_budgets
from sparsebalance_megatron.predict.workload import Workload, WorkloadError, batches_of, samples_of
from sparsebalance_megatron.run.inputs import (
    first_batches,
    read_costs,
    samples_of_split,
    workload_of,
)

_SHARDED_PARAMETERS = frozenset({"--use-torch-fsdp2", "--use-megatron-fsdp"})


@dataclass(frozen=True, kw_only=True)
class DescribedJob:
    """What flags describe.

    ``args``: Megatron's, as training gets them. ``notes``: lines about defaults that are other than
    Megatron's, and its own warnings. ``unchecked``: of what only training finds out.
    """

    args: Namespace
    config: SparseBalanceConfig
    settings: RunSettings
    device_type: str
    notes: tuple[str, ...]
    unchecked: tuple[str, ...]

    def workload(self, lengths_tokens: np.ndarray | None, place: str, steps: int) -> Workload:
        """The first steps: of documents of these lengths, which come from ``place``, in their
        order, or of the data sets that the flags name, of which only ``.idx`` files are read.

        Raises:
            ConfigError, DataError, WorkloadError: no step can be made, or planned.
        """
        settings, size = self.settings, self.settings.batch_sizes.size_of(0)
        if lengths_tokens is None:
            blend = read_blends(settings.data_flags)["train"]
            index = samples_of_split(settings, self.config, blend, "train", lengths_only=True)
            if index is None:
                raise WorkloadError("the flags leave no document to train on; see --split")
            batches = first_batches(index, size, steps)
            lengths_tokens = index.lengths_of(np.arange(index.counts.samples))
        else:
            lengths_tokens = samples_of(lengths_tokens, settings.seq_length, self.config.overlong)
            batches = batches_of(lengths_tokens, size, steps, place)
        with without_warnings():
            cost = read_costs(settings, self.config, self.device_type)
        job = settings.host_job
        config = with_dense_length(self.config, cost, job.padded(job.max_sample_tokens))
        config, _ = with_layer_budgets(config, job.layout, lengths_tokens, cost)
        return workload_of(settings, config, cost, batches)


def described_job(flags: Sequence[str], ranks: int, *, on_cpu: bool) -> DescribedJob:
    """Check flags of training for so many ranks, whether they exist or not; 0 for those that were
    launched.

    Raises:
        ConfigError: training refuses the flags.
    """
    notes: list[str] = []
    output = io.StringIO()
    with _world(flags, ranks), quiet_imports():
        try:
            with redirect_stdout(output), _kept_warnings(notes), one_line_refusals():
                args = arguments_without_ranks(flags, on_cpu=on_cpu, report=notes.append)
        except SystemExit:
            print(output.getvalue(), end="")
            raise
        notes += [line for line in output.getvalue().splitlines() if line.startswith("WARNING")]
        unchecked = _unchecked(args)
        lines, config, settings = checked_settings(args)
        notes += lines
    return DescribedJob(
        args=args,
        config=config,
        settings=settings,
        device_type="cpu" if on_cpu else "cuda",
        notes=tuple(notes),
        unchecked=tuple(unchecked),
    )


@contextmanager
def _kept_warnings(notes: list[str]) -> Iterator[None]:
    """Take what Megatron warns of into the notes, once each, and leave out what it logs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)
        logging.disable(logging.INFO)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
    notes += dict.fromkeys(f"Megatron: {each.message}" for each in caught)


@contextmanager
def _world(flags: Sequence[str], ranks: int) -> Iterator[None]:
    """Be rank 0 of so many, or of those launched, with these words on the command line.

    Megatron reads all of it from the process. It demands 1 connection to a device of some layouts,
    and more with sharded parameters, for the order of kernels; none runs here.
    """
    ranks = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    connections = "8" if _SHARDED_PARAMETERS & set(flags) else "1"
    environment, words = dict(os.environ), sys.argv
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    os.environ.update({"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"})
    sys.argv = [sys.argv[0], *flags]
    try:
        yield
    finally:
        sys.argv = words
        os.environ.clear()
        os.environ.update(environment)


def _unchecked(args: Namespace) -> list[str]:
    """What no process can know that stands for all ranks."""
    unchecked = [
        "whether memory suffices: it is counted, not tried",
        "processes, the network and its libraries (NCCL)",
    ]
    if args.load or args.pretrained_checkpoint:
        unchecked.append("checkpoints; the plan is that of a run from the start")
    if args.transformer_impl == "transformer_engine" and find_spec("transformer_engine") is None:
        # Megatron's model config refuses fused RoPE where the library that has it is missing.
        args.apply_rope_fusion = False
        unchecked.append("flags that need Transformer Engine, which is not installed here")
    if args.fp8 or args.fp4:
        unchecked.append("fp8 and fp4: times and memory are counted for bfloat16")
    if args.num_experts and args.expert_tensor_parallel_size != args.tensor_model_parallel_size:
        unchecked.append(
            "--expert-tensor-parallel-size: experts are counted with the tensor-parallel size"
        )
    return unchecked
