# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of Hugging Face's models, as `transformers` itself has them; fused matrices."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from convert.tiny_models import VARIANTS, stored_tensors, tiny_config, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from oracles.convert import linear_fc1_rows, linear_qkv_rows

from sparsebalance_megatron.convert.hf_config import read_config
from sparsebalance_megatron.convert.mapping import (
    Parameter,
    is_recomputed,
    pack_qkv,
    parameters,
    to_hugging_face,
    to_megatron,
    unpack_qkv,
)

SIZES = st.integers(1, 5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_of_transformers_is_the_source_of_one_parameter(
    variant: str, tmp_path: Path
) -> None:
    tiny_config(variant).save_pretrained(tmp_path)
    mapped = parameters(read_config(tmp_path))
    sources = [source for parameter in mapped for source in parameter.sources]
    assert max(Counter(sources).values()) == 1
    assert max(Counter(parameter.name for parameter in mapped).values()) == 1
    shapes = {source: shape for each in mapped for source, shape in each.sources.items()}
    written = stored_tensors(tiny_model(variant))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in written.items()}


def test_only_what_config_json_determines_is_left_out() -> None:
    assert is_recomputed("model.layers.11.self_attn.rotary_emb.inv_freq")
    assert is_recomputed("model.rotary_emb.inv_freq")
    assert not is_recomputed("model.layers.0.self_attn.q_proj.weight")
    assert not is_recomputed("model.layers.0.self_attn.rotary_emb.inv_freq_scale")


def numbered(rows: int, start: int, columns: int | None) -> torch.Tensor:
    """Every row holds its own number; a vector where there are no columns."""
    numbers = torch.arange(start, start + rows, dtype=torch.float32)
    return numbers if columns is None else numbers[:, None].expand(-1, columns).contiguous()


@pytest.mark.parametrize("columns", [None, 3])
@given(groups=SIZES, heads_per_group=SIZES, head_dim=SIZES)
def test_qkv(columns: int | None, groups: int, heads_per_group: int, head_dim: int) -> None:
    q_rows, kv_rows = groups * heads_per_group * head_dim, groups * head_dim
    q = numbered(q_rows, 0, columns)
    k = numbered(kv_rows, 1000, columns)
    v = numbered(kv_rows, 2000, columns)
    packed = pack_qkv(q, k, v, query_groups=groups)
    expected = linear_qkv_rows(q.tolist(), k.tolist(), v.tolist(), groups=groups, head_dim=head_dim)
    assert packed.tolist() == expected
    for back, source in zip(
        unpack_qkv(packed, query_groups=groups, head_dim=head_dim), (q, k, v), strict=True
    ):
        assert torch.equal(back, source)


@given(rows=SIZES, columns=SIZES, padding=st.integers(0, 4))
def test_gate_up_and_vocabulary(rows: int, columns: int, padding: int) -> None:
    gate, up = numbered(rows, 0, columns), numbered(rows, 1000, columns)
    model = SimpleNamespace(vocab_size=rows)
    fused = Parameter(name="fc1", sources={"gate": gate.shape, "up": up.shape}, packing="gate_up")
    packed = to_megatron(fused, [gate, up], model, padded_vocab_size=0)
    assert packed.tolist() == linear_fc1_rows(gate.tolist(), up.tolist())
    back = to_hugging_face(fused, packed, model)
    assert torch.equal(back[0], gate) and torch.equal(back[1], up)
    words = Parameter(name="words", sources={"words": up.shape}, packing="vocabulary")
    padded = to_megatron(words, [up], model, padded_vocab_size=rows + padding)
    assert torch.equal(padded[:rows], up)
    assert padded[rows:].tolist() == [[0.0] * columns] * padding
    assert torch.equal(to_hugging_face(words, padded, model)[0], up)
