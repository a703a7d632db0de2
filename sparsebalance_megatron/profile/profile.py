# SPDX-License-Identifier: Apache-2.0
"""Measures the model that training's flags describe, part by part, on this machine.

One process measures one rank's share of one layer, of the embedding and of the head; several ranks
measure what sharing a sequence takes as well. Calibration adds other communication while training
runs.
"""

import io
import statistics
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch

from sparsebalance_megatron import __version__
from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig
from sparsebalance_megatron.cost.parts import Part, SegmentCost
from sparsebalance_megatron.cost.table import CostRow, CostTable, ExchangeRow, RunIdentity
from sparsebalance_megatron.megatron.arguments import WITHOUT_SIDE_EFFECTS, device_type_of
from sparsebalance_megatron.megatron.datasets import quiet_imports
from sparsebalance_megatron.megatron.timing import Clock, CudaEventClock, HostClock
from sparsebalance_megatron.plan.coverage import budget_grid
from sparsebalance_megatron.profile.cells import Cell, Thoroughness, measure, plan_cells, time_once

_ONE_RANK: dict[str, Any] = {
    name: value
    for value, names in (
        # Sequences are as long as --seq-length, whatever their number.
        (
            1,
            "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
            "expert_model_parallel_size expert_tensor_parallel_size world_size num_layers "
            "micro_batch_size",
        ),
        (
            False,
            "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
            "sequence_parallel tp_comm_overlap use_distributed_optimizer overlap_grad_reduce "
            "overlap_param_gather",
        ),
        # The cost model adds what recomputation repeats.
        (
            None,
            "pipeline_model_parallel_layout num_layers_per_virtual_pipeline_stage "
            "num_virtual_stages_per_pipeline_rank decoder_first_pipeline_num_layers "
            "decoder_last_pipeline_num_layers global_batch_size eval_micro_batch_size "
            "eval_global_batch_size rampup_batch_size recompute_granularity recompute_method "
            "recompute_num_layers save load",
        ),
        (0, "rank"),
    )
    for name in names.split()
} | WITHOUT_SIDE_EFFECTS
"""Megatron arguments that spread the work, or write files, and their values for one process."""


def profile(
    flags: Sequence[str],
    *,
    thoroughness: Thoroughness,
    threads: int,
    progress: Callable[[list[Cell]], Any],
) -> CostTable | None:
    """Measure the model that training's flags describe. Once per process.

    Under torchrun with several ranks all of them measure the exchange, then the first one the rest:
    others get no table.

    Args:
        threads: of the host, for the table.
        progress: wraps the cells in an iterator.
    """
    device_type = device_type_of(flags)
    if device_type == "cpu":
        from sparsebalance_megatron.megatron import cpu

        cpu.install()
    with quiet_imports():
        from sparsebalance_megatron.megatron.compat import megatron_version
        from sparsebalance_megatron.megatron.core_attention import AttentionOptions
        from sparsebalance_megatron.profile.model import ProfiledModel, measured_exchanges

    clock: Clock = HostClock() if device_type == "cpu" else CudaEventClock()
    with redirect_stdout(io.StringIO()):
        args, config, identity, launched = _read_flags(flags, device_type)
        device = torch.device(device_type)
        exchanges: tuple[ExchangeRow, ...] = ()
        if launched.world_size > 1:
            if device_type == "cuda":
                torch.cuda.set_device(launched.local_rank)
            exchanges = measured_exchanges(
                *(args, config, launched.world_size),
                device=device,
                thoroughness=thoroughness,
                clock=clock,
            )
        if launched.rank > 0:
            return None
        grid = budget_grid(-(-args.seq_length // config.block_size))
        # Its one layer selects; attention of dense layers is timed beside it.
        options = AttentionOptions(replace(config, layer_budgets=None), grid)
        model = ProfiledModel(args, options, device)
    kernels: dict[Part, Sequence[Any]] = dict.fromkeys(Part, (None,)) | {
        Part.ATTENTION: model.list_kernels,
        Part.DENSE_ATTENTION: model.dense_kernels,
    }
    measured: dict[tuple[Part, Any], list[CostRow]] = defaultdict(list)
    cells = plan_cells(args.seq_length, config, thoroughness, has_experts=model.has_experts)
    for cell in progress(cells):
        for name in kernels[cell.part]:
            timed = model.timed(cell, name)
            measured[cell.part, name] += measure(timed, cell, thoroughness, clock)
    fastest = {
        part: min(names, key=lambda name: sum(row.ms_median for row in measured[part, name]))
        for part, names in kernels.items()
    }
    segments = _measured_segments(model, config, args.seq_length, thoroughness, clock)
    return CostTable(
        identity=identity,
        versions={
            "sparsebalance-megatron": __version__,
            "megatron-core": megatron_version(),
            "torch": str(torch.__version__),
        },
        date=datetime.now(UTC).date().isoformat(),
        threads=threads,
        rows=tuple(row for timed in fastest.items() for row in measured[timed]),
        exchanges=exchanges,
        segments=segments,
        list_kernel=fastest[Part.ATTENTION],
        dense_kernel=fastest[Part.DENSE_ATTENTION],
    )


def _measured_segments(
    model: Any,
    config: SparseBalanceConfig,
    seq_length: int,
    thoroughness: Thoroughness,
    clock: Clock,
) -> SegmentCost | None:
    """What a layer takes for one long sample in segments, over its time in one piece; None where
    the flags ask for no segments, or the sample is too short for two."""
    tokens = seq_length // min(thoroughness.divisors)
    segments = min(config.max_segments, tokens // config.segment_tokens)
    if segments < 2:
        return None
    budget = min(config.base_budget, -(-tokens // config.block_size))
    timed = (
        model.timed(Cell(Part.LINEAR, (tokens,), budget)),
        *(model.attention_in_segments(tokens, budget, count) for count in (1, segments)),
    )
    repeats = thoroughness.warm_up + thoroughness.least_repeats
    # In turn, so that what disturbs the machine disturbs all.
    runs = [[sum(time_once(each, clock)) for each in timed] for _ in range(repeats)]
    ratios = [
        (linear_ms + cut_ms) / (linear_ms + whole_ms)
        for linear_ms, whole_ms, cut_ms in runs[thoroughness.warm_up :]
    ]
    return SegmentCost(slowness=max(1.0, round(statistics.median(ratios), 4)))


def _read_flags(
    flags: Sequence[str], device_type: str
) -> tuple[Namespace, SparseBalanceConfig, RunIdentity, Namespace]:
    """Megatron's arguments of one rank's share, the plugin's config, the table's identity, and
    Megatron's arguments as given."""
    from sparsebalance_megatron.megatron.arguments import config_from_args
    from sparsebalance_megatron.megatron.settings import device_name, dtype_name, model_shape
    from sparsebalance_megatron.megatron.single_process import (
        complete_flags,
        parse_flags,
        transformer_config,
    )

    args = parse_flags("sparse-balance profile", flags, enabled=True, on_cpu=device_type == "cpu")
    config = config_from_args(args)
    ranks = args.tensor_model_parallel_size
    _check_profilable(args)
    launched = Namespace(**vars(args))
    for name in _ONE_RANK.keys() & vars(args).keys():
        setattr(args, name, _ONE_RANK[name])
    args.make_vocab_size_divisible_by *= ranks
    complete_flags(args, set_globals=True)
    shape = model_shape(transformer_config(args), args.padded_vocab_size)
    identity = RunIdentity(
        device=device_name(device_type),
        dtype=dtype_name(args),
        block_size=config.block_size,
        selection=config.selection,
        shape=replace(shape, tensor_parallel_size=ranks),
    )
    _cut_to_share(args, ranks)
    return args, config, identity, launched


def _check_profilable(args: Namespace) -> None:
    for found, flag, remedy in (
        (args.use_checkpoint_args, "--use-checkpoint-args", "give the model's flags instead"),
        (
            isinstance(getattr(args, "moe_layer_freq", 1), list),
            f"--moe-layer-freq {getattr(args, 'moe_layer_freq', 1)}",
            "the cost model knows one kind of layer; use layers that are alike",
        ),
        (
            args.world_size > 1 and args.world_size % 2,
            f"{args.world_size} ranks",
            "sequences are shared by 2, 4, ... of them; start it on an even number, or on one",
        ),
    ):
        if found:
            raise ConfigError(f"sparse-balance profile with {flag}: {remedy}")


def _cut_to_share(args: Namespace, ranks: int) -> None:
    """Leave the heads, MLP columns and vocabulary rows that one of ``ranks`` TP ranks computes."""
    names = ["num_attention_heads", "ffn_hidden_size", "padded_vocab_size"]
    names += ["num_query_groups"] if args.group_query_attention else []
    for name in names:
        value = getattr(args, name)
        if value % ranks:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} {value} is no multiple of --tensor-model-parallel-size {ranks}"
            )
        setattr(args, name, value // ranks)
