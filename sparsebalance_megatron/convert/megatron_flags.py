# SPDX-License-Identifier: Apache-2.0
"""Megatron's model flags for a dense decoder."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparsebalance_megatron.convert.dense_model import DenseModel, Rope

Flag = tuple[str, ...]
"""A flag and its values, as words of a command line."""

_MEGATRON_DIVISOR = 128
"""Default of ``--make-vocab-size-divisible-by``."""


def default_divisor(vocab_size: int) -> int:
    """The largest divisor of the vocabulary that pads no row and divides Megatron's default."""
    return math.gcd(vocab_size, _MEGATRON_DIVISOR)


def padded_rows(vocab_size: int, divisor: int) -> int:
    """The vocabulary's rows, rounded up to a multiple of the divisor."""
    return -(-vocab_size // divisor) * divisor


def model_flags(model: DenseModel, *, divisor: int, padded_vocab_size: int) -> tuple[Flag, ...]:
    """What ``pretrain_gpt`` must be told to build this model.

    ``--padded-vocab-size`` is what the model has; the other two sizes only tell tokenizers what
    it is made of. Without it Megatron would pad the size of the tokenizer, which is often smaller
    than the model's.
    """
    flags: list[Flag] = [
        ("--num-layers", str(model.layers)),
        ("--hidden-size", str(model.hidden_size)),
        ("--ffn-hidden-size", str(model.ffn_hidden_size)),
        ("--num-attention-heads", str(model.attention_heads)),
        ("--group-query-attention",),
        ("--num-query-groups", str(model.query_groups)),
        ("--kv-channels", str(model.head_dim)),
        ("--max-position-embeddings", str(model.max_positions)),
        *_rope_flags(model.rope),
        ("--normalization", "RMSNorm"),
        ("--norm-epsilon", repr(model.norm_epsilon)),
        ("--swiglu",),
        ("--disable-bias-linear",),
        ("--attention-dropout", repr(model.attention_dropout)),
        ("--hidden-dropout", "0.0"),
        ("--vocab-size", str(model.vocab_size)),
        ("--make-vocab-size-divisible-by", str(divisor)),
        ("--padded-vocab-size", str(padded_vocab_size)),
    ]
    if model.qkv_bias:
        flags.append(("--add-qkv-bias",))
    if not model.tied:
        flags.append(("--untie-embeddings-and-output-weights",))
    return tuple(flags)


def _rope_flags(rope: Rope) -> tuple[Flag, ...]:
    base = ("--rotary-base", str(rope.base))
    plain = (("--position-embedding-type", "rope"), base)
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return (*plain, ("--rotary-seq-len-interpolation-factor", str(int(rope.factor))))
        case "llama3":
            return (*plain, ("--use-rope-scaling",), ("--rope-scaling-factor", repr(rope.factor)))
        case "yarn":
            return (
                ("--position-embedding-type", "yarn"),
                base,
                ("--rotary-scaling-factor", repr(rope.factor)),
                ("--yarn-original-max-position-embeddings", str(rope.original_positions)),
                ("--yarn-beta-fast", repr(rope.beta_fast)),
                ("--yarn-beta-slow", repr(rope.beta_slow)),
                ("--mscale", repr(rope.mscale)),
                ("--mscale-all-dim", repr(rope.mscale_all_dim)),
            )


def words(flags: Sequence[Flag]) -> tuple[str, ...]:
    """The flags as one command line."""
    return tuple(word for flag in flags for word in flag)


def bash_array(flags: Sequence[Flag]) -> str:
    """``MODEL_ARGS=( .. )``, one flag per line, for a script to source."""
    lines = (f"    {' '.join(flag)}\n" for flag in flags)
    return f"MODEL_ARGS=(\n{''.join(lines)})\n"
