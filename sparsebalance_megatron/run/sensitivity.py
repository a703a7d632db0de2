# SPDX-License-Identifier: Apache-2.0
"""How sensitive a model's layers are: one dense pass of training's own model over training samples.

It is Megatron's evaluation under training's flags, so weights, layout and data are those of the
run. Every rank adds up the attention to far repetitions of its layers, heads and samples; the sums
of all ranks add up.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import torch

from sparsebalance_megatron import __version__
from sparsebalance_megatron.attention.host_copy import copied_to
from sparsebalance_megatron.config import ConfigError, flag_name
from sparsebalance_megatron.cost.table import Sensitivities
from sparsebalance_megatron.megatron.arguments import (
    args_provider,
    check_typed_flags,
    destination,
    device_type_of,
)
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch

_MEASURE = "attention of the best head to far tokens that the text repeats"
_WITHOUT = {
    **{"log_dir": None, "sensitivity": None, "max_context_parallel": None},
    **{"eval_attention": "dense", "max_segments": 1},
}
"""Choices of the plugin that a pass over samples needs otherwise."""


def measure_sensitivities(flags: Sequence[str], *, samples: int) -> Sensitivities | None:
    """Measure the model that training's flags describe, with the weights that they load.

    Collective over the ranks that torchrun started; None on all but the first. Once per process.

    Args:
        flags: words after the program's name, with or without ``--sparse-balance``.
        samples: at least so many training samples are read: whole evaluation batches.

    Raises:
        ConfigError: flags do not fit, or no sample repeats a token far away.
    """
    enabled = flag_name("enabled")
    sys.argv[1:] = [*flags, *([] if enabled in flags else [enabled]), "--skip-train"]
    sys.argv += ["--eval-iters", "0"]
    device_type = device_type_of(flags)
    if device_type == "cpu":
        from sparsebalance_megatron.megatron import cpu

        cpu.install()
    from sparsebalance_megatron.megatron.compat import (
        megatron_version,
        run_pretrain,
        validated_arguments,
    )
    from sparsebalance_megatron.run.training_hooks import make_training_hooks

    own = args_provider(enabled=True, on_cpu=device_type == "cpu")

    def add_and_check_flags(parser: ArgumentParser) -> ArgumentParser:
        check_typed_flags(own(parser), sys.argv[1:])
        return parser

    args = validated_arguments(add_and_check_flags)
    if args.context_parallel_size > 1:
        raise ConfigError(
            f"sensitivity: --context-parallel-size {args.context_parallel_size}: a rank must hold "
            "whole samples; give 1, and a --seq-length that one rank holds"
        )
    args.save = None
    for name, value in _WITHOUT.items():
        setattr(args, destination(name), value)
    hooks = make_training_hooks(args, device_type, lambda line: None)
    run, repetitions = hooks.run, hooks.watching_repetitions()
    run.all_stages_read = True
    args.eval_iters = -(-samples // run.inputs.settings.evaluation_batch_size)

    def dataset_provider(sample_counts: object, vp_stage: int | None = None) -> tuple[object, ...]:
        run.start(consumed_samples=0)

        def micro_batches() -> Iterator[LocalMicroBatch]:
            for each in run.evaluation_data_iterator(run.inputs.train, vp_stage=vp_stage):
                assert each.inputs is not None, "all stages read"
                repetitions.tokens_T = copied_to(torch.as_tensor(each.inputs["tokens"]), run.device)
                yield each

        return None, micro_batches(), None

    dataset_provider.is_distributed = True  # type: ignore[attr-defined]
    run_pretrain(
        args,
        dataset_provider=dataset_provider,
        forward_step=hooks.forward_step,
        configure_model=hooks.configure_model,
    )
    for sums in (repetitions.mass_ALH, repetitions.queries_ALH):
        torch.distributed.all_reduce(sums)
    if args.rank > 0:
        return None
    block_size = run.inputs.config.block_size
    sensitivities = tuple(repetitions.sensitivity_L())
    if not any(sensitivities):
        raise ConfigError(
            f"sensitivity: none of the samples repeats a token more than a block of {block_size} "
            f"tokens away: give longer ones, or a smaller {flag_name('block_size')}"
        )
    return Sensitivities(
        sensitivities=sensitivities,
        measure=_MEASURE,
        block_size=block_size,
        samples=args.eval_iters * run.inputs.settings.evaluation_batch_size,
        versions={
            "sparsebalance-megatron": __version__,
            "megatron-core": megatron_version(),
            "torch": str(torch.__version__),
        },
        date=datetime.now(UTC).date().isoformat(),
    )
