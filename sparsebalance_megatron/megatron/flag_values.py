# SPDX-License-Identifier: Apache-2.0
"""Values of Megatron's own flags that end deep inside it, named before it looks at them."""

from __future__ import annotations

import os
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.megatron.unsupported import value_of

_PACKAGE = __name__.partition(".")[0]
_LARGEST_SIZE = 2**40

LEAST: Mapping[str, int] = dict.fromkeys(
    (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
        *("num_query_groups", "seq_length", "max_position_embeddings", "vocab_size"),
        *("padded_vocab_size", "make_vocab_size_divisible_by", "micro_batch_size"),
        *("global_batch_size", "eval_micro_batch_size", "eval_global_batch_size", "train_iters"),
        *("train_samples", "log_interval", "save_interval", "eval_interval"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size"),
        *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    ),
    1,
) | {"seed": 0, "eval_iters": 0}
"""Attribute of Megatron's arguments -> the least value that means something."""

_MOST: Mapping[str, int] = {"seed": 2**32 - 1}
"""numpy takes no larger seed; of all else, more than there is of anything."""


def check_values(args: Namespace) -> None:
    """Refuse sizes that are none, heads that cannot be shared out, and what is missing.

    Asks the flags as typed; what will come from a checkpoint is left to Megatron.

    Raises:
        ConfigError: naming the flag and the remedy.
    """
    get = partial(value_of, args)
    for name, least in LEAST.items():
        value, most = get(name), _MOST.get(name, _LARGEST_SIZE)
        if isinstance(value, int) and not least <= value <= most:
            raise ConfigError(f"{_flag(name)} {value}: must be from {least} to {most}")
    heads, groups = get("num_attention_heads"), get("num_query_groups")
    if get("group_query_attention") and heads and groups and heads % groups:
        raise ConfigError(f"--num-query-groups {groups}: must divide --num-attention-heads {heads}")
    if get("use_checkpoint_args"):
        return
    for names, remedy in (
        (("lr",), "give the learning rate, such as --lr 1e-5"),
        (("train_iters", "train_samples"), "say how long to train, such as --train-iters 1000"),
        (
            ("eval_interval",),
            "Megatron counts evaluations even where there are none; give --eval-interval 1000",
        ),
    ):
        if all(get(name) is None for name in names):
            raise ConfigError(f"no {' or '.join(map(_flag, names))}: {remedy}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@contextmanager
def one_line_refusals() -> Iterator[None]:
    """Turn what Megatron, or a tokenizer, raises at wrong flags into one :class:`ConfigError`.

    This package's own errors pass.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] == _PACKAGE:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = str(error).strip().partition("\n")[0] or frame.line
        raise ConfigError(
            f"Megatron refuses the flags ({os.path.basename(frame.filename)}:{frame.lineno}): "
            f"{reason}"
        ) from error


def mend_help(parser: ArgumentParser) -> None:
    """Double the percent signs of help texts that argparse cannot format otherwise.

    One of megatron-core 0.19 has a bare one, over which ``--help`` of the whole parser ends in a
    ValueError.
    """
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
