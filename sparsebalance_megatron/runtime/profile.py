# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance profile``: measure a model's parts on this machine and write a cost table.

One process measures one rank's share of one layer, of the embedding and of the head.
Communication between ranks is not in the table; calibration adds it while training runs.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig
from sparsebalance_megatron.cost.model import (
    CostModel,
    Direction,
    FitError,
    Kind,
    fit_errors,
    held_out_errors,
)
from sparsebalance_megatron.cost.table import CostRow, CostTable, RunIdentity
from sparsebalance_megatron.runtime.device import early_flags
from sparsebalance_megatron.runtime.measuring import FULL, QUICK, Cell, Effort, measure, plan_cells
from sparsebalance_megatron.runtime.timing import Clock, CudaEventClock, HostClock

_ONE_RANK: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "pipeline_model_parallel_layout": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "tp_comm_overlap": False,
    "use_distributed_optimizer": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "num_layers": 1,
    # Rows are as long as --seq-length, whatever their number.
    "micro_batch_size": 1,
    "global_batch_size": None,
    "eval_micro_batch_size": None,
    "eval_global_batch_size": None,
    "rampup_batch_size": None,
    # The cost model adds what recomputation repeats.
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "save": None,
    "load": None,
    "tensorboard_dir": None,
    "wandb_project": "",
}
"""Megatron arguments that spread the work, or write files, and their values for one process."""


def add_parser(subparsers: Any) -> None:
    """Add ``profile`` to the ``sparse-balance`` tool."""
    parser = subparsers.add_parser(
        "profile",
        help="measure a model's layers on this machine and write a cost table",
        description="Measure a model's layers on this machine and write a cost table for "
        "--sparse-balance-cost-table. Everything after -- is what training gets: Megatron's flags "
        "and --sparse-balance-*.",
        usage="sparse-balance profile -o TABLE.json [--quick] [--check] [--threads N] "
        "-- <flags of training>",
    )
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="TABLE.json", help="file to write"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer lengths and repeats, for small models and tests"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also report how well rows are predicted that the fit has not seen",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="host threads of a training rank (OMP_NUM_THREADS; torchrun's default is 1)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the table, print how well the cost model fits it.

    Raises:
        ConfigError: if flags are missing or cannot be profiled; nothing is written then.
    """
    if not arguments.passed_on:
        raise ConfigError("profile: give training's flags after --, at least the model's")
    if arguments.threads < 1:
        raise ConfigError(f"--threads {arguments.threads}: must be at least 1")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    table = profile(
        arguments.passed_on,
        effort=QUICK if arguments.quick else FULL,
        threads=arguments.threads,
        progress=_progress_bar,
    )
    table.save(arguments.output)
    print(f"{arguments.output}: {len(table.rows)} measurements")
    print(_report("the fitted cost model", fit_errors(CostModel.fit(table), table)))
    if arguments.check:
        print(_report("the cost model on rows left out of the fit", held_out_errors(table)))
    return 0


def profile(
    flags: Sequence[str],
    *,
    effort: Effort,
    threads: int,
    progress: Callable[[list[Cell]], Any],
) -> CostTable:
    """Measure the model that training's flags describe. Once per process.

    Args:
        flags: Megatron's and this plugin's flags.
        threads: host threads in use; recorded in the table.
        progress: wraps the list of cells in an iterator, and may draw a bar.
    """
    _, device_type = early_flags(flags)
    if device_type == "cpu":
        from sparsebalance_megatron.runtime import cpu

        cpu.install()
    with redirect_stdout(io.StringIO()):
        args, config, identity = _read_flags(flags, device_type)
        model = _build_model(args, config, device_type)
    clock: Clock = HostClock() if device_type == "cpu" else CudaEventClock()
    rows: list[CostRow] = []
    for cell in progress(plan_cells(args.seq_length, config, effort)):
        for kind in cell.kinds:
            timed = model.timed(kind, cell.lengths_tokens, cell.budget_blocks)
            rows += measure(kind, timed, cell, effort, clock)
    return CostTable(
        identity=identity,
        versions=_versions(),
        date=datetime.now(UTC).date().isoformat(),
        threads=threads,
        rows=tuple(rows),
    )


def _read_flags(
    flags: Sequence[str], device_type: str
) -> tuple[argparse.Namespace, SparseBalanceConfig, RunIdentity]:
    """Megatron's arguments of one rank's share, and what the table will be valid for."""
    from megatron.training.arguments import (
        core_transformer_config_from_args,
        parse_args,
        validate_args,
    )
    from megatron.training.global_vars import set_global_variables

    from sparsebalance_megatron.runtime.arguments import args_provider, config_from_args
    from sparsebalance_megatron.runtime.inputs import run_identity
    from sparsebalance_megatron.runtime.settings import model_shape

    with _command_line(flags):
        args = parse_args(args_provider(enabled=True, on_cpu=device_type == "cpu"))
    config = config_from_args(args)
    ranks = args.tensor_model_parallel_size
    _check_profilable(args)
    for name in _ONE_RANK.keys() & vars(args).keys():
        setattr(args, name, _ONE_RANK[name])
    args.make_vocab_size_divisible_by *= ranks
    validate_args(args)
    set_global_variables(args)
    shape = model_shape(core_transformer_config_from_args(args), args.padded_vocab_size)
    dtype = str(args.params_dtype).removeprefix("torch.")
    identity = run_identity(shape, dtype, config, device_type)
    identity = replace(identity, shape=replace(identity.shape, tensor_parallel_size=ranks))
    _cut_to_share(args, ranks)
    return args, config, identity


@contextmanager
def _command_line(flags: Sequence[str]) -> Iterator[None]:
    """Megatron's parser reads ``sys.argv`` and nothing else."""
    saved, sys.argv = sys.argv, ["sparse-balance profile --", *flags]
    try:
        yield
    finally:
        sys.argv = saved


def _check_profilable(args: argparse.Namespace) -> None:
    for found, flag, remedy in (
        (args.yaml_cfg is not None, "--yaml-cfg", "give every flag on the command line"),
        (args.use_checkpoint_args, "--use-checkpoint-args", "give the model's flags instead"),
        (
            isinstance(getattr(args, "moe_layer_freq", 1), list),
            f"--moe-layer-freq {getattr(args, 'moe_layer_freq', 1)}",
            "the cost model knows one kind of layer; use layers that are alike",
        ),
    ):
        if found:
            raise ConfigError(f"sparse-balance profile with {flag}: {remedy}")


def _cut_to_share(args: argparse.Namespace, ranks: int) -> None:
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


def _build_model(args: argparse.Namespace, config: SparseBalanceConfig, device_type: str) -> Any:
    from sparsebalance_megatron.plan.coverage import budget_grid
    from sparsebalance_megatron.runtime.core_attention import AttentionOptions
    from sparsebalance_megatron.runtime.profiled_model import ProfiledModel

    grid = budget_grid(-(-args.seq_length // config.block_size))
    options = AttentionOptions.from_config(config, grid)
    return ProfiledModel(args, options, torch.device(device_type))


def _versions() -> dict[str, str]:
    from sparsebalance_megatron import __version__
    from sparsebalance_megatron.compat import megatron_version

    return {
        "sparsebalance-megatron": __version__,
        "megatron-core": megatron_version(),
        "torch": str(torch.__version__),
    }


def _progress_bar(cells: list[Cell]) -> Iterator[Cell]:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ConfigError(
            "profile needs tqdm: pip install 'sparsebalance-megatron[tools]'"
        ) from error
    yield from tqdm(cells, desc="profile", unit="cell")


def _report(what: str, errors: dict[tuple[Kind, Direction], FitError]) -> str:
    lines = [f"relative error of {what}:"]
    lines += [
        f"  {kind:<10} {direction:<9} median {error.median:6.1%}  p95 {error.p95:6.1%}  "
        f"of {error.rows} rows"
        for (kind, direction), error in errors.items()
    ]
    return "\n".join(lines)
