# SPDX-License-Identifier: Apache-2.0
"""Which tensors of Hugging Face make which parameter of Megatron's GPTModel.

Megatron's names are those of the local layer spec. In checkpoints its norms carry the names of the
Transformer Engine spec, because Megatron maps them (``sharded_state_dict_keys_map``).

Shape legend: H query heads, G KV heads, D head dim, F MLP columns, W vocabulary rows, X padded
vocabulary rows. Only the first dimension is named: weights [.., hidden] and biases [..] are packed
alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from sparsebalance_megatron.convert.dense_model import DenseModel

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
"""Hugging Face's names of the vocabulary's two matrices."""

_RECOMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors of old checkpoints that follow from config.json."""


class Packing(Enum):
    """How the sources lie in the parameter."""

    SAME = "same"
    VOCABULARY = "vocabulary"
    QKV = "qkv"
    GATE_UP = "gate_up"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of Megatron's model.

    Attributes:
        name: in Megatron's GPTModel.
        sources: names in Hugging Face's model, in the order that ``packing`` takes them.
        shapes: of the sources.
    """

    name: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    packing: Packing = Packing.SAME


def parameters(model: DenseModel) -> tuple[Parameter, ...]:
    """Every parameter of the model once, in the order of the layers."""
    embedding = _vocabulary("embedding.word_embeddings.weight", EMBEDDING, model)
    ends = [_unfused("decoder.final_layernorm.weight", "model.norm.weight", model.hidden_size)]
    if not model.tied:
        ends.append(_vocabulary("output_layer.weight", OUTPUT, model))
    layers = (parameter for layer in range(model.layers) for parameter in _layer(model, layer))
    return (embedding, *layers, *ends)


def _unfused(name: str, source: str, *shape: int) -> Parameter:
    return Parameter(name=name, sources=(source,), shapes=(shape,))


def _vocabulary(name: str, source: str, model: DenseModel) -> Parameter:
    shape = (model.vocab_size, model.hidden_size)
    return Parameter(name=name, sources=(source,), shapes=(shape,), packing=Packing.VOCABULARY)


def _layer(model: DenseModel, layer: int) -> list[Parameter]:
    hidden, columns = model.hidden_size, model.ffn_hidden_size
    q_rows = model.attention_heads * model.head_dim
    kv_rows = model.query_groups * model.head_dim
    megatron, hugging_face = f"decoder.layers.{layer}", f"model.layers.{layer}"
    attention, mlp = f"{hugging_face}.self_attn", f"{hugging_face}.mlp"
    projections = tuple(f"{attention}.{name}_proj" for name in "qkv")
    qkv = [
        Parameter(
            name=f"{megatron}.self_attention.linear_qkv.weight",
            sources=tuple(f"{projection}.weight" for projection in projections),
            shapes=((q_rows, hidden), (kv_rows, hidden), (kv_rows, hidden)),
            packing=Packing.QKV,
        )
    ]
    if model.qkv_bias:
        qkv.append(
            Parameter(
                name=f"{megatron}.self_attention.linear_qkv.bias",
                sources=tuple(f"{projection}.bias" for projection in projections),
                shapes=((q_rows,), (kv_rows,), (kv_rows,)),
                packing=Packing.QKV,
            )
        )
    return [
        _unfused(
            f"{megatron}.input_layernorm.weight", f"{hugging_face}.input_layernorm.weight", hidden
        ),
        *qkv,
        _unfused(
            f"{megatron}.self_attention.linear_proj.weight",
            f"{attention}.o_proj.weight",
            hidden,
            q_rows,
        ),
        _unfused(
            f"{megatron}.pre_mlp_layernorm.weight",
            f"{hugging_face}.post_attention_layernorm.weight",
            hidden,
        ),
        Parameter(
            name=f"{megatron}.mlp.linear_fc1.weight",
            sources=(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
            shapes=((columns, hidden), (columns, hidden)),
            packing=Packing.GATE_UP,
        ),
        _unfused(f"{megatron}.mlp.linear_fc2.weight", f"{mlp}.down_proj.weight", hidden, columns),
    ]


def to_megatron(
    parameter: Parameter, sources: Sequence[Tensor], model: DenseModel, *, padded_vocab_size: int
) -> Tensor:
    """The parameter's value from its sources, which have ``parameter.shapes``."""
    match parameter.packing:
        case Packing.QKV:
            q, k, v = sources
            return pack_qkv(q, k, v, query_groups=model.query_groups)
        case Packing.GATE_UP:
            gate, up = sources
            return pack_gate_up(gate, up)
        case Packing.VOCABULARY:
            return pad_vocabulary(sources[0], padded_vocab_size)
        case Packing.SAME:
            return sources[0]


def to_hugging_face(parameter: Parameter, value: Tensor, model: DenseModel) -> tuple[Tensor, ...]:
    """The sources from the parameter's value; padding rows of the vocabulary fall away."""
    match parameter.packing:
        case Packing.QKV:
            return unpack_qkv(value, query_groups=model.query_groups, head_dim=model.head_dim)
        case Packing.GATE_UP:
            return unpack_gate_up(value)
        case Packing.VOCABULARY:
            return (value[: model.vocab_size],)
        case Packing.SAME:
            return (value,)


def pack_qkv(q: Tensor, k: Tensor, v: Tensor, *, query_groups: int) -> Tensor:
    """Query, key and value projections as Megatron's ``linear_qkv``.

    Megatron's order is by KV head: the query heads that share it, its key head, its value head
    (``SelfAttention.get_query_key_value_tensors``).

    Args:
        q: [H * D, ..], heads of one group next to each other.
        k, v: [G * D, ..].

    Returns:
        [(H + 2 * G) * D, ..].
    """
    by_group = [x.reshape(query_groups, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def unpack_qkv(qkv: Tensor, *, query_groups: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of :func:`pack_qkv`: [H * D, ..], [G * D, ..], [G * D, ..]."""
    by_group = qkv.reshape(query_groups, -1, *qkv.shape[1:])
    query_rows = by_group.shape[1] - 2 * head_dim
    q, k, v = by_group.split([query_rows, head_dim, head_dim], dim=1)
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


def pack_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Gate and up projections [F, ..] as Megatron's ``linear_fc1`` [2 * F, ..]: gate first."""
    return torch.cat([gate, up])


def unpack_gate_up(fc1: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of :func:`pack_gate_up`."""
    gate, up = fc1.chunk(2)
    return gate, up


def pad_vocabulary(rows: Tensor, padded_rows: int) -> Tensor:
    """[W, ..] -> [X, ..]; the rows added are zero."""
    return torch.cat([rows, rows.new_zeros(padded_rows - rows.shape[0], *rows.shape[1:])])


def is_recomputed(name: str) -> bool:
    """Whether a tensor of Hugging Face follows from config.json and needs no conversion."""
    return _RECOMPUTED.fullmatch(name) is not None
