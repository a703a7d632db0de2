# SPDX-License-Identifier: Apache-2.0
"""From flags to everything a run needs, read and checked before anything is built."""

from __future__ import annotations

import warnings
from argparse import Namespace
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sparsebalance_megatron.compat import megatron_version, stage_layers
from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.table import CostTable, ModelShape, RunIdentity
from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.plan.coverage import budget_grid
from sparsebalance_megatron.plan.step_plan import JobShape, PlanPolicy
from sparsebalance_megatron.runtime.startup_profile import AUTO


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run needs; alike on all ranks."""

    config: SparseBalanceConfig
    job: JobShape
    policy: PlanPolicy
    cost: CostModel | None
    """None until it has been measured at start-up (``--sparse-balance-cost-table auto``)."""
    train: SampleIndex
    valid: SampleIndex | None
    test: SampleIndex | None
    grid: tuple[int, ...]
    """Budgets, in blocks, at which coverage is observed."""


def read_inputs(args: Namespace, config: SparseBalanceConfig, device_type: str) -> Inputs:
    """Read the index and the cost table and lay out the job.

    Raises:
        ConfigError, DataError, CostTableError: naming the flag or file and the remedy.
    """
    from megatron.training.arguments import core_transformer_config_from_args

    transformer_config = core_transformer_config_from_args(args)
    train = _sample_index(args, config, "train")
    if train is None:
        raise ConfigError(f"--split {args.split}: no document is left for training")
    valid = _sample_index(args, config, "valid") if args.eval_iters else None
    test = _sample_index(args, config, "test") if args.eval_iters else None
    if args.eval_iters and valid is None:
        raise ConfigError(
            f"--eval-iters {args.eval_iters} with --split {args.split}: no document is left for "
            "validation; give it a weight, or use --eval-iters 0"
        )
    return Inputs(
        config=config,
        job=job_shape(args, transformer_config),
        policy=plan_policy(args, config),
        cost=_cost_model(args, config, device_type),
        train=train,
        valid=valid,
        test=test,
        grid=budget_grid(-(-args.seq_length // config.block_size)),
    )


def fingerprint(inputs: Inputs) -> dict[str, str]:
    """What all ranks must share for their plans to agree: flag or file -> value or digest."""
    flags = {
        f"flag {name}": str(value)
        for name, value in asdict(inputs.config).items()
        if name not in ("log_dir", "cost_table")
    }
    return flags | {
        "job shape": str(inputs.job),
        "training samples": inputs.train.digest(),
        "cost model": str(inputs.cost),
        "megatron-core": megatron_version(),
        "torch": str(torch.__version__),
    }


def job_shape(args: Namespace, transformer_config: Any) -> JobShape:
    """How the job is cut up.

    Raises:
        ConfigError: if the global batch does not fill its slots evenly.
    """
    per_slot = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size < per_slot or args.global_batch_size % per_slot:
        raise ConfigError(
            f"--global-batch-size {args.global_batch_size} must be a multiple of "
            f"--micro-batch-size {args.micro_batch_size} x data-parallel size "
            f"{args.data_parallel_size} = {per_slot}"
        )
    return JobShape(
        data_parallel_size=args.data_parallel_size,
        micro_batches=args.global_batch_size // per_slot,
        stage_layers=stage_layers(transformer_config),
    )


def plan_policy(args: Namespace, config: SparseBalanceConfig) -> PlanPolicy:
    """The user's choices in the planner's terms."""
    default_cap = args.micro_batch_size * args.seq_length
    return PlanPolicy(
        batching=config.batching,
        tuning=config.tuning,
        anchor=config.anchor,
        coverage_threshold=config.coverage_threshold,
        coverage_target=config.coverage_target,
        base_budget=config.base_budget,
        block_size=config.block_size,
        max_tokens_per_slot=config.max_tokens_per_micro_batch or default_cap,
        plan_ms=config.plan_ms,
    )


def _sample_index(args: Namespace, config: SparseBalanceConfig, split: str) -> SampleIndex | None:
    return SampleIndex.open(
        args.data_path[0],
        max_tokens=args.seq_length,
        overlong=config.overlong,
        seed=args.seed,
        split_weights=args.split or "100,0,0",
        split=split,
    )


def model_shape(args: Namespace) -> ModelShape:
    """The sizes that a layer's cost depends on."""
    return ModelShape(
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups
        if args.group_query_attention
        else args.num_attention_heads,
        head_dim=args.kv_channels,
        vocab_size=args.padded_vocab_size,
        gated_linear_unit=bool(args.swiglu),
        tensor_parallel_size=args.tensor_model_parallel_size,
    )


def run_identity(args: Namespace, config: SparseBalanceConfig, device_type: str) -> RunIdentity:
    """What a cost table must have been measured on to be valid for this run."""
    return RunIdentity(
        device="cpu" if device_type == "cpu" else torch.cuda.get_device_name(),
        dtype=str(args.params_dtype).removeprefix("torch."),
        block_size=config.block_size,
        selection=config.selection,
        shape=model_shape(args),
    )


def _cost_model(args: Namespace, config: SparseBalanceConfig, device_type: str) -> CostModel | None:
    if config.cost_table == AUTO:
        return None
    if config.cost_table is None:
        warnings.warn(
            f"no {flag_name('cost_table')}: latencies are counted operations, not measurements; "
            "plans will be worse. Run `sparse-balance profile` with this model's flags.",
            stacklevel=2,
        )
        shape = model_shape(args)
        analytic = CostModel.analytic(shape, config.block_size, selection=config.selection)
        return with_recompute(analytic, args)
    table = CostTable.load(config.cost_table)
    table.check_matches(run_identity(args, config, device_type))
    return with_recompute(CostModel.fit(table), args)


def with_recompute(cost: CostModel, args: Namespace) -> CostModel:
    """The model for this run's activation recomputation."""
    return cost.with_recompute(
        full=args.recompute_granularity == "full",
        attention_only=args.recompute_granularity == "selective"
        and "core_attn" in (args.recompute_modules or ["core_attn"]),
    )
