# SPDX-License-Identifier: Apache-2.0
"""Which flags of ``megatron.training`` do not go together with ``--sparse-balance``.

They are looked at twice: as typed, before Megatron's own assertions can fail over them, and once
more when Megatron has completed its arguments.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.megatron.unsupported import (
    GPT_ONLY,
    MODEL,
    NO_SHARDED_WEIGHTS,
    Refusal,
    Settings,
    check_cap,
    check_selection,
    refuse,
    value_of,
)
from sparsebalance_megatron.plan.job import whole_parts

_ONE_VALIDATION_SET = "there is one validation set, and it has no end; drop it"
_REAL_DATA = "give prefixes made by `sparse-balance prepare-data` as --data-path"
_DATA_FLAGS = (
    *("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path"),
    "per_split_data_args_path",
)
_NO_LOGITS = "logits are stored per sequence of fixed length; drop it"

TRAINING = (
    Refusal(
        flag="--seq-length",
        remedy="Megatron wants a multiple of twice --context-parallel-size; choose one",
        found=lambda get: (
            get("context_parallel_size", 1) > 1
            and get("seq_length", 0) % (2 * get("context_parallel_size", 1))
        ),
    ),
    Refusal(flag="--use-megatron-fsdp", remedy=NO_SHARDED_WEIGHTS),
    Refusal(flag="--use-torch-fsdp2", remedy=NO_SHARDED_WEIGHTS),
    Refusal(flag="--hybrid-layer-pattern", remedy=GPT_ONLY),
    Refusal(flag="--hybrid-override-pattern", remedy=GPT_ONLY),
    Refusal(flag="--spec", remedy="both choose the layers; drop it"),
    Refusal(
        flag="ModelOpt", remedy="both choose the layers; train without it", name="modelopt_enabled"
    ),
    Refusal(
        flag="--rampup-batch-size",
        remedy="megatron-core 0.18 and newer ignore it; use --step-batch-size-schedule",
    ),
    Refusal(
        flag="--decrease-batch-size-if-needed",
        remedy="the global batch size must not depend on the number of ranks; drop it",
    ),
    Refusal(
        flag="--iterations-to-skip",
        remedy="Megatron reads what it skips as sequences of fixed length; drop it",
    ),
    Refusal(
        flag="--phase-transition-iterations",
        remedy="one order of samples holds for the whole run; drop it",
    ),
    Refusal(flag="--full-validation", remedy=_ONE_VALIDATION_SET),
    Refusal(flag="--multiple-validation-sets", remedy=_ONE_VALIDATION_SET),
    Refusal(flag="--use-varlen-dataset", remedy=f"both pack documents; {_REAL_DATA}"),
    Refusal(flag="--mock-data", remedy=f"plans need real lengths; {_REAL_DATA}"),
    Refusal(
        flag="no --data-path",
        remedy=f"plans need real lengths; {_REAL_DATA}",
        name="no_data_path",
        found=lambda get: not any(map(get, _DATA_FLAGS)),
    ),
    Refusal(
        flag="--split",
        remedy="every split has sources of its own already; drop it",
        found=lambda get: get("split") and any(map(get, _DATA_FLAGS[2:])),
    ),
    Refusal(
        flag="--dataloader-type",
        remedy="the plugin brings its own iterator; use external or drop the flag",
        found=lambda get: get("dataloader_type") != "external",
    ),
    Refusal(
        flag="--sft",
        remedy="prepare conversations with `sparse-balance prepare-data` and drop it",
    ),
    Refusal(flag="--fim-data", remedy="samples are trained on as they are stored; drop it"),
    Refusal(
        flag="--eod-mask-loss",
        remedy="loss masks are made by `sparse-balance prepare-data`; drop it",
    ),
    Refusal(flag="--logits-save-dir", remedy=_NO_LOGITS),
    Refusal(flag="--logits-load-dir", remedy=_NO_LOGITS),
    Refusal(flag="--perform-rl-step", remedy="rollouts are not planned; drop it"),
    Refusal(flag="--yaml-cfg", remedy="give every flag on the command line instead"),
    Refusal(flag="--inprocess-restart", remedy="let torchrun restart the ranks; drop it"),
    Refusal(
        flag="--non-persistent-ckpt-type",
        remedy="the plugin's state is in regular checkpoints only; drop it",
    ),
    Refusal(
        flag="--override-ckpt-iteration",
        remedy="plans follow the samples consumed; choose a checkpoint with --ckpt-step",
    ),
    Refusal(
        flag="--ckpt-format",
        remedy="the plugin's state is read from torch_dist checkpoints; use torch_dist",
        found=lambda get: (
            (get("save") or get("load")) and get("ckpt_format", "torch_dist") != "torch_dist"
        ),
    ),
)
"""In the order in which they are looked at, after those of the model."""


def check_supported(args: Namespace, config: SparseBalanceConfig) -> None:
    """Refuse combinations of Megatron flags with ``--sparse-balance`` that would go wrong.

    Raises:
        ConfigError: naming both flags and the remedy.
    """
    refuse((*MODEL, *TRAINING), Settings(args, config))
    check_cap(
        value_of(args, "seq_length", 0),
        config,
        context_parallel_size=value_of(args, "context_parallel_size", 1),
    )
    check_selection(config, context_parallel_size=value_of(args, "context_parallel_size", 1))


def check_batches(args: Namespace) -> None:
    """Refuse a global batch that does not fill its micro-batches, before Megatron asserts as much.

    Asks the flags as typed; what cannot be told yet, because flags are missing or will come from a
    checkpoint, is left to Megatron.

    Raises:
        ConfigError: naming the flags and the remedy.
    """
    get = partial(value_of, args)
    ranks_per_model = (
        get("tensor_model_parallel_size", 1)
        * get("pipeline_model_parallel_size", 1)
        * get("context_parallel_size", 1)
    )
    ranks = get("world_size", 1)
    if get("use_checkpoint_args") or ranks_per_model < 1 or ranks % ranks_per_model:
        return
    data_parallel_size = ranks // ranks_per_model
    micro_batch_size, global_batch_size = get("micro_batch_size"), get("global_batch_size")
    sizes = {
        "": (micro_batch_size, global_batch_size),
        "eval-": (
            get("eval_micro_batch_size", micro_batch_size),
            get("eval_global_batch_size", global_batch_size),
        ),
    }
    for prefix, (micro, whole) in sizes.items():
        if micro and whole:
            parts = {
                f"--{prefix}micro-batch-size": micro,
                "data-parallel size": data_parallel_size,
            }
            whole_parts(whole, f"--{prefix}global-batch-size", parts)
