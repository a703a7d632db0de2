# SPDX-License-Identifier: Apache-2.0
"""Megatron's model flags for a dense decoder."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparsebalance_megatron.convert.hf_config import DenseModel, Rope

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
        ("--num-layers", str(model.num_hidden_layers)),
        ("--hidden-size", str(model.hidden_size)),
        ("--ffn-hidden-size", str(model.intermediate_size)),
        ("--num-attention-heads", str(model.num_attention_heads)),
        ("--group-query-attention",),
        ("--num-query-groups", str(model.num_key_value_heads)),
        ("--kv-channels", str(model.head_dim)),
        ("--max-position-embeddings", str(model.max_position_embeddings)),
        *_rope_flags(model.rope),
        ("--normalization", "RMSNorm"),
        ("--norm-epsilon", repr(model.rms_norm_eps)),
        ("--swiglu",),
        ("--disable-bias-linear",),
        ("--attention-dropout", repr(model.attention_dropout)),
        ("--hidden-dropout", "0.0"),
        ("--vocab-size", str(model.vocab_size)),
        ("--make-vocab-size-divisible-by", str(divisor)),
        ("--padded-vocab-size", str(padded_vocab_size)),
    ]
    if model.has_qkv_bias:
        flags.append(("--add-qkv-bias",))
    if not model.tie_word_embeddings:
        flags.append(("--untie-embeddings-and-output-weights",))
    return tuple(flags)


def _rope_flags(rope: Rope) -> tuple[Flag, ...]:
    assert rope.rope_theta is not None, "complete"
    kind = "yarn" if rope.rope_type == "yarn" else "rope"
    base = (("--position-embedding-type", kind), ("--rotary-base", str(int(rope.rope_theta))))
    match rope.rope_type:
        case "linear":
            assert rope.factor is not None
            return (*base, ("--rotary-seq-len-interpolation-factor", str(int(rope.factor))))
        case "llama3":
            return (*base, ("--use-rope-scaling",), ("--rope-scaling-factor", repr(rope.factor)))
        case "yarn":
            positions = str(rope.original_max_position_embeddings)
            return (
                *base,
                ("--rotary-scaling-factor", repr(rope.factor)),
                ("--yarn-original-max-position-embeddings", positions),
                ("--yarn-beta-fast", repr(rope.beta_fast)),
                ("--yarn-beta-slow", repr(rope.beta_slow)),
                ("--mscale", repr(rope.mscale)),
                ("--mscale-all-dim", repr(rope.mscale_all_dim)),
            )
    return base


def words(flags: Sequence[Flag]) -> tuple[str, ...]:
    """The flags as one command line."""
    return tuple(word for flag in flags for word in flag)


def bash_array(name: str, flags: Sequence[Flag]) -> str:
    """``name=( .. )``, one flag per line, for a script to source."""
    lines = (f"    {' '.join(flag)}\n" for flag in flags)
    return f"{name}=(\n{''.join(lines)})\n"
