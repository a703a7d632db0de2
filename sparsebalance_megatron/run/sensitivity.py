# SPDX-License-Identifier: Apache-2.0
"""How sensitive a model's layers are: one dense pass of training's own model over training samples.

It is Megatron's evaluation under training's flags, so weights, layout and data are those of the
run. Every rank adds up the attention to far repetitions of its layers, heads and samples; the sums
of all ranks add up.
"""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice, pairwise, product
from typing import Any

import numpy as np
import torch

from sparsebalance_megatron import __version__
from sparsebalance_megatron.attention.device import copied_to
from sparsebalance_megatron.attention.repetitions import copies_T
from sparsebalance_megatron.config import ConfigError, flag_name
from sparsebalance_megatron.cost.table import Sensitivities
from sparsebalance_megatron.errors import one_line_refusals
from sparsebalance_megatron.megatron.arguments import (
    args_provider,
    check_typed_flags,
    destination,
    device_type_of,
)
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch
from sparsebalance_megatron.plan.budgets.by_layer import OWN_AND_FIRST

_MEASURE = "attention of the best head to far tokens that the text repeats"
_WITHOUT = {
    **{"log_dir": None, "sensitivity": None, "max_context_parallel": None},
    **{"eval_attention": "dense", "max_segments": 1},
}
"""Choices of the plugin that a pass over samples needs otherwise."""


def measure_sensitivities(
    flags: Sequence[str], *, samples: int, check: bool = False
) -> Sensitivities | None:
    """Measure the model that training's flags describe, with the weights that they load.

    Collective over the ranks that torchrun started, or of this process alone; None on all but the
    first. Once per process.

    Args:
        flags: words after the program's name, with or without ``--sparse-balance``.
        samples: at least so many training samples are read: whole evaluation batches.
        check: whether they are read again with each layer cut in turn; there are no cuts where no
            sample repeats three tokens far away.

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
        has_weights,
        megatron_version,
        run_pretrain,
        validated_arguments,
    )
    from sparsebalance_megatron.megatron.single_process import start_process_group
    from sparsebalance_megatron.run.training_hooks import make_training_hooks

    own = args_provider(enabled=True, on_cpu=device_type == "cpu")

    def add_and_check_flags(parser: ArgumentParser) -> ArgumentParser:
        check_typed_flags(own(parser), sys.argv[1:])
        return parser

    with one_line_refusals():
        args = validated_arguments(add_and_check_flags)
    if not has_weights(args):
        raise ConfigError(
            f"sensitivity: no checkpoint in --load {args.load}: give the directory of the weights, "
            "or --pretrained-checkpoint; random weights have no layers that need more than others"
        )
    if args.context_parallel_size > 1:
        raise ConfigError(
            f"sensitivity: --context-parallel-size {args.context_parallel_size}: a rank must hold "
            "whole samples; give 1, and a --seq-length that one rank holds"
        )
    args.save = None
    for name, value in _WITHOUT.items():
        setattr(args, destination(name), value)
    # What is not finite is told below, with the weights as the cause.
    args.check_for_nan_in_loss_and_grad = False
    hooks = make_training_hooks(args, device_type, lambda line: None)
    run, repetitions = hooks.run, hooks.watching_repetitions()
    run.all_stages_read = True
    if samples > len(run.inputs.train):
        raise ConfigError(
            f"sensitivity: --samples {samples}: the training data has {len(run.inputs.train)}; "
            "give no more"
        )
    batches = -(-samples // run.inputs.settings.evaluation_batch_size)
    layers = range(run.inputs.job.layers) if check else range(0)
    args.eval_iters = batches * (1 + len(layers))
    # Of the dense pass, then of each layer's: nats and copied tokens.
    sums_P2 = torch.zeros(1 + len(layers), 2, dtype=torch.float64, device=run.device)
    reading = 0

    def dataset_provider(sample_counts: object, vp_stage: int | None = None) -> tuple[object, ...]:
        run.start(consumed_samples=0)

        def micro_batches() -> Iterator[LocalMicroBatch]:
            nonlocal reading
            first: list[LocalMicroBatch] = []
            read = run.evaluation_data_iterator(run.inputs.train, vp_stage=vp_stage)
            for each in islice(read, batches * read.next_step().micro_batches):
                assert each.inputs is not None, "all stages read"
                reading = 0
                repetitions.tokens_T = copied_to(torch.as_tensor(each.inputs["tokens"]), run.device)
                if check:
                    _score_copies(each.inputs, each)
                first.append(each)
                yield each
            for layer, each in product(layers, first):
                reading, repetitions.tokens_T = 1 + layer, None
                yield _cut(each, layer)

        return None, micro_batches(), None

    def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
        output, loss_function = hooks.forward_step(data_iterator, model)
        return output, partial(add_loss, reading, loss_function)

    def add_loss(number: int, loss_function: Any, output: Any) -> Any:
        loss, tokens, report = loss_function(output)
        sums_P2[number] += torch.stack([loss.detach().double(), tokens.double()])
        return loss, tokens, report

    dataset_provider.is_distributed = True  # type: ignore[attr-defined]
    if "RANK" not in os.environ:  # no launcher started it
        start_process_group(run.device)
    run_pretrain(
        args,
        dataset_provider=dataset_provider,
        forward_step=forward_step,
        configure_model=hooks.configure_model,
    )
    for sums in (repetitions.mass_ALH, repetitions.queries_ALH, sums_P2):
        torch.distributed.all_reduce(sums)
    if args.rank > 0:
        return None
    block_size = run.inputs.config.block_size
    sensitivities = tuple(repetitions.sensitivity_L())
    nats, tokens = sums_P2.T.tolist()
    check_finite([*sensitivities, *nats], args.load)
    if not any(sensitivities):
        raise ConfigError(
            "sensitivity: none of the samples repeats a token more than a block of "
            f"{block_size} tokens away: give longer ones, or a smaller {flag_name('block_size')}"
        )
    return Sensitivities(
        sensitivities=sensitivities,
        measure=_MEASURE,
        block_size=block_size,
        samples=batches * run.inputs.settings.evaluation_batch_size,
        versions={
            "sparsebalance-megatron": __version__,
            "megatron-core": megatron_version(),
            "torch": str(torch.__version__),
        },
        date=datetime.now(UTC).date().isoformat(),
        cuts=tuple((each - nats[0]) / tokens[0] for each in nats[1:] if tokens[0]),
    )


def check_finite(numbers: Sequence[float], load: str | None) -> None:
    """Raise :class:`ConfigError`, which names the weights, unless all numbers are finite."""
    if not np.isfinite(numbers).all():
        raise ConfigError(
            f"sensitivity: losses or attention are not finite: the weights in {load} are damaged, "
            "or have diverged; give those of an earlier iteration (--ckpt-step)"
        )


def _score_copies(inputs: Mapping[str, np.ndarray], micro_batch: LocalMicroBatch) -> None:
    """Leave those of a micro-batch's trained tokens to the loss that are copies."""
    layout = micro_batch.layout
    for begin, end in pairwise(layout.cu_seqlens):
        copies = copies_T(inputs["tokens"][begin:end], block_size=layout.block_size)
        inputs["loss_mask"][begin:end] *= copies


def _cut(micro_batch: LocalMicroBatch, layer: int) -> LocalMicroBatch:
    """The micro-batch in which a layer reads the least budget."""
    budgets_LS, dense_L = micro_batch.budgets_LS.clone(), [*micro_batch.dense_documents_L]
    budgets_LS[layer].clamp_(max=OWN_AND_FIRST)
    if dense_L:
        dense_L[layer] = 0
    return replace(micro_batch, budgets_LS=budgets_LS, dense_documents_L=dense_L)
