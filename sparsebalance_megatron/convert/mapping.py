# SPDX-License-Identifier: Apache-2.0
"""Maps tensors of Hugging Face models to parameters of Megatron's GPTModel.

Megatron's names are those of the local layer spec. In checkpoints its norms carry the names of the
Transformer Engine spec, because Megatron maps them (``sharded_state_dict_keys_map``).

Shape legend: F MLP columns, W vocabulary rows, X padded vocabulary rows. Only the first dimension
is named: weights [.., hidden] and biases [..] are packed alike.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparsebalance_megatron.convert.hf_config import Decoder

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"

_FUSED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<kind>gate_up|down)_proj")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of Megatron's GPTModel.

    ``sources``: names in Hugging Face's model, in the order that ``packing`` takes them, and their
    shapes.
    """

    name: str
    sources: dict[str, tuple[int, ...]]
    packing: Literal["same", "vocabulary", "qkv", "gate_up"] = "same"


def parameters(model: Decoder) -> tuple[Parameter, ...]:
    """Every parameter of the model once, in the order of the layers."""
    vocabulary = (model.vocab_size, model.hidden_size)
    embedding = Parameter(
        name="embedding.word_embeddings.weight",
        sources={EMBEDDING: vocabulary},
        packing="vocabulary",
    )
    norm = Parameter(
        name="decoder.final_layernorm.weight", sources={"model.norm.weight": (model.hidden_size,)}
    )
    output = Parameter(
        name="output_layer.weight", sources={OUTPUT: vocabulary}, packing="vocabulary"
    )
    layers = (parameter for i in range(model.num_hidden_layers) for parameter in _layer(model, i))
    return (embedding, *layers, norm, *(() if model.tie_word_embeddings else (output,)))


def tensor_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Every tensor of Hugging Face's model."""
    return {name: shape for each in parameters(model) for name, shape in each.sources.items()}


def _layer(model: Decoder, layer: int) -> Iterator[Parameter]:
    hidden, head_dim = model.hidden_size, model.head_dim
    q_rows, kv_rows = model.num_attention_heads * head_dim, model.num_key_value_heads * head_dim
    target, source = f"decoder.layers.{layer}", f"model.layers.{layer}"

    def same(ours: str, theirs: str, *shape: int) -> Parameter:
        return Parameter(
            name=f"{target}.{ours}.weight", sources={f"{source}.{theirs}.weight": shape}
        )

    yield same("input_layernorm", "input_layernorm", hidden)
    yield same("self_attention.linear_proj", "self_attn.o_proj", hidden, q_rows)
    yield same("pre_mlp_layernorm", "post_attention_layernorm", hidden)
    if model.has_qk_norm:
        for head in ("q", "k"):
            yield same(f"self_attention.{head}_layernorm", f"self_attn.{head}_norm", head_dim)
    for kind in ("weight", "bias") if model.has_qkv_bias else ("weight",):
        rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
        yield Parameter(
            name=f"{target}.self_attention.linear_qkv.{kind}",
            sources={
                f"{source}.self_attn.{head}_proj.{kind}": (
                    (rows[head], hidden) if kind == "weight" else (rows[head],)
                )
                for head in rows
            },
            packing="qkv",
        )
    columns, mlps = model.intermediate_size, {"mlp": "mlp"}
    if model.expert_layers[layer]:
        yield same("mlp.router", "mlp.gate", model.num_experts, hidden)
        columns = model.moe_intermediate_size
        mlps = {
            f"mlp.experts.local_experts.{expert}": f"mlp.experts.{expert}"
            for expert in range(model.num_experts)
        }
    for ours, theirs in mlps.items():
        yield Parameter(
            name=f"{target}.{ours}.linear_fc1.weight",
            sources={
                f"{source}.{theirs}.{name}_proj.weight": (columns, hidden)
                for name in ("gate", "up")
            },
            packing="gate_up",
        )
        yield same(f"{ours}.linear_fc2", f"{theirs}.down_proj", hidden, columns)


def to_megatron(
    parameter: Parameter, sources: Sequence[Tensor], model: Decoder, *, padded_vocab_size: int
) -> Tensor:
    """The parameter's value from its sources.

    Gate and up projections [F, ..] become ``linear_fc1`` [2 * F, ..], gate first. The vocabulary
    [W, ..] becomes [X, ..] with rows of zeros behind it.
    """
    match parameter.packing:
        case "qkv":
            q, k, v = sources
            return pack_qkv(q, k, v, query_groups=model.num_key_value_heads)
        case "gate_up":
            return torch.cat(list(sources))
        case "vocabulary":
            (rows,) = sources
            return torch.cat([rows, rows.new_zeros(padded_vocab_size - len(rows), *rows.shape[1:])])
        case "same":
            return sources[0]


def to_hugging_face(parameter: Parameter, value: Tensor, model: Decoder) -> tuple[Tensor, ...]:
    """The sources from the parameter's value; padding rows of the vocabulary fall away."""
    match parameter.packing:
        case "qkv":
            return unpack_qkv(
                value, query_groups=model.num_key_value_heads, head_dim=model.head_dim
            )
        case "gate_up":
            return value.chunk(2)
        case "vocabulary":
            return (value[: model.vocab_size],)
        case "same":
            return (value,)


def pack_qkv(q: Tensor, k: Tensor, v: Tensor, *, query_groups: int) -> Tensor:
    """Query, key and value projections as Megatron's ``linear_qkv``.

    Megatron's order is by KV head: the query heads that share it, its key head, its value head
    (``SelfAttention.get_query_key_value_tensors``). ``q`` [H * D, ..] has heads of one group next
    to each other, ``k`` and ``v`` are [G * D, ..]; together they are [(H + 2 * G) * D, ..].
    """
    by_group = [x.reshape(query_groups, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def unpack_qkv(qkv: Tensor, *, query_groups: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of :func:`pack_qkv`: [H * D, ..], [G * D, ..], [G * D, ..]."""
    by_group = qkv.reshape(query_groups, -1, *qkv.shape[1:])
    query_rows = by_group.shape[1] - 2 * head_dim
    q, k, v = by_group.split([query_rows, head_dim, head_dim], dim=1)
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


def is_recomputed(name: str) -> bool:
    """Whether a tensor of Hugging Face, of an old checkpoint, follows from config.json."""
    return name.endswith(".rotary_emb.inv_freq")


def experts_in(
    name: str, shape: tuple[int, ...]
) -> dict[str, tuple[tuple[int | slice, ...], tuple[int, ...]]]:
    """The matrices of single experts that a fused tensor holds: their places in it, and shapes.

    ``transformers`` 5 keeps experts fused: gate and up projections as [experts, 2 * F, hidden],
    gate first. Files have the names of single experts unless they were saved with
    ``save_original_format=False``. Empty for every other tensor.
    """
    fused = _FUSED.fullmatch(name)
    if fused is None or len(shape) != 3:
        return {}
    experts, rows, columns = shape
    parts = {"gate": (0, rows // 2), "up": (rows // 2, rows)}
    if fused["kind"] == "down":
        parts = {"down": (0, rows)}
    return {
        f"{fused['experts']}.{expert}.{part}_proj.weight": (
            (expert, slice(first, last)),
            (last - first, columns),
        )
        for expert in range(experts)
        for part, (first, last) in parts.items()
    }
