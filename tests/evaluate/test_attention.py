# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models with sparse attention, against dense ones, documents alone, and caches."""

import itertools

import pytest
import torch
from sparse_hf_models import BLOCK, FAMILIES, make_bare_model, make_model, make_tokens
from test_selector_registry import EXAMPLE, install

from sparsebalance_megatron.attention.api import budgeted_attention
from sparsebalance_megatron.errors import ConfigError
from sparsebalance_megatron.evaluate import configure, settings_of
from sparsebalance_megatron.evaluate.attention import document_starts, sparse_balance_attention
from sparsebalance_megatron.evaluate.settings import KEY
from sparsebalance_megatron.selector_registry import BUILT_IN

TOKENS = 9 * BLOCK + 5
ROUNDING = 1e-12
FIRST_QUERY = "query_block:FIRST_QUERY"
BY_TOKEN = ("token-query-head", "token-kv-head")
"""Selections that need no queries of other tokens, so that models can decode with a cache."""


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_covering_budget_is_dense_attention_and_a_small_one_is_not(family):
    model, tokens = make_model(family, budget=50), make_tokens(2, TOKENS)
    covered = model(tokens).logits
    configure(model, sparse_topk_blocks=2)
    sparse = model(tokens).logits
    model.set_attn_implementation("sdpa")
    dense = model(tokens).logits
    same(covered, dense)
    same(sparse[:, : 2 * BLOCK], dense[:, : 2 * BLOCK])
    assert (sparse - dense)[:, 4 * BLOCK :].abs().amax() > 1e-3


@pytest.mark.parametrize("selection", BUILT_IN)
def test_every_layer_attends_as_training_does(selection):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, heads, TOKENS, 8, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2)
    )
    layer = torch.nn.Module()
    layer.config, layer.layer_idx = make_model(selection=selection).config, 1
    starts = torch.zeros(2, TOKENS, dtype=torch.int64)
    starts[1, 40:] = 40
    starts[1, 70:] = -1
    out, _ = sparse_balance_attention(layer, q, k, v, starts, scaling=0.3)
    for row, begin, end in ((0, 0, TOKENS), (1, 0, 40), (1, 40, 70)):
        expected, _ = budgeted_attention(
            *(x[row, :, begin:end].transpose(0, 1).contiguous() for x in (q, k, v)),
            [0, end - begin],
            3,
            block_size=BLOCK,
            softmax_scale=0.3,
            selection=selection,
        )
        same(out[row, begin:end], expected)
    assert not out[1, 70:].any()


@pytest.mark.parametrize(
    "settings",
    [
        *({"selection": name} for name in (*BY_TOKEN, "quest")),
        {"sparse_layer_topk_blocks": (2, None)},
    ],
    ids=[*BY_TOKEN, "quest", "a-dense-layer"],
)
def test_tokens_after_a_cache_read_what_they_read_in_one_pass(settings, other_selectors):
    model, tokens = make_model(**settings), make_tokens(2, TOKENS)
    whole = model(tokens).logits
    cuts = [0, 37, 38, 39, 64, 65, *range(66, TOKENS + 1)]
    cache, logits = None, []
    for begin, end in itertools.pairwise(cuts):
        answer = model(tokens[:, begin:end], past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        logits.append(answer.logits)
    same(torch.cat(logits, 1), whole)


@pytest.fixture
def other_selectors(tmp_path, monkeypatch):
    """What an installer leaves of the package in examples/selectors."""
    install(tmp_path, "selectors", {"quest": "quest:QUEST", "first-query": FIRST_QUERY})
    for folder in (tmp_path, EXAMPLE):
        monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize("selection", [*sorted(BUILT_IN.keys() - BY_TOKEN), "first-query"])
def test_a_cache_is_refused_where_other_queries_count(selection, other_selectors):
    model, tokens = make_model(selection=selection), make_tokens(2, TOKENS)
    refused(f"{selection} .*use_cache=False", model.generate, tokens, max_new_tokens=2)
    model.generate(tokens, max_new_tokens=2, use_cache=False)


def test_rows_padded_on_the_right_are_rows_alone():
    """Whatever positions the padding has."""
    model, tokens = make_model(), make_tokens(3, TOKENS)
    mask = torch.ones_like(tokens)
    mask[1, 100:] = 0
    for positions in (None, (mask.cumsum(1) - 1) * mask):
        padded = model(tokens, attention_mask=mask, position_ids=positions).logits
        same(padded[1, :100], model(tokens[1:2, :100]).logits[0])
        same(padded[[0, 2]], model(tokens[[0, 2]]).logits)


def test_packed_documents_are_documents_alone():
    model, tokens = make_model(), make_tokens(1, TOKENS)
    positions = torch.cat([torch.arange(60), torch.arange(TOKENS - 60)])[None]
    packed = model(tokens, position_ids=positions, use_cache=False).logits
    alone = [model(tokens[:, :60]).logits, model(tokens[:, 60:]).logits]
    same(packed, torch.cat(alone, 1))


@pytest.mark.parametrize("family", [*FAMILIES, "Mistral"])
def test_packed_documents_that_the_mask_joins_are_refused(family):
    """With a cache, which is the default, or a mask, transformers does not look for them."""
    model, tokens = make_model(family), make_tokens(1, TOKENS)
    positions = torch.cat([torch.arange(60), torch.arange(TOKENS - 60)])[None]
    match = "position_ids start again.*use_cache=False"
    refused(match, model, tokens, position_ids=positions)
    ones = torch.ones_like(tokens)
    refused(match, model, tokens, position_ids=positions, attention_mask=ones, use_cache=False)
    cache = model(tokens[:, :60], use_cache=True).past_key_values
    refused(match, model, tokens[:, 60:], position_ids=positions[:, 60:], past_key_values=cache)


def test_a_layer_may_be_dense_and_short_documents_too():
    tokens = make_tokens(1, TOKENS)
    model = make_model(sparse_layer_topk_blocks=(None, None))
    by_layer = model(tokens).logits
    configure(model, sparse_layer_topk_blocks=None, sparse_dense_up_to_tokens=TOKENS)
    by_length = model(tokens).logits
    configure(model, sparse_dense_up_to_tokens=TOKENS - BLOCK)
    assert (model(tokens).logits - by_length).abs().amax() > 1e-3
    model.set_attn_implementation("sdpa")
    same(by_layer, model(tokens).logits)
    same(by_length, model(tokens).logits)


def test_settings_survive_saving(tmp_path):
    model = make_model(sparse_layer_topk_blocks=(2, None))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="sparse_balance")
    assert settings_of(loaded.config) == settings_of(model.config)
    tokens = make_tokens(1, TOKENS)
    same(loaded.double()(tokens).logits, model(tokens).logits)


def refused(match, call, *arguments, **keywords):
    with pytest.raises(ConfigError, match=match):
        call(*arguments, **keywords)


def test_padding_that_moves_blocks_is_refused():
    model, tokens = make_model(), make_tokens(2, TOKENS)
    left = torch.ones_like(tokens)
    left[1, :7] = 0
    refused("padding", model, tokens, attention_mask=left)
    right = left.flip(1)
    cache = model(tokens, attention_mask=right, use_cache=True).past_key_values
    longer = torch.cat([right, torch.ones(2, 1, dtype=torch.int64)], 1)
    refused("padding", model, tokens[:, :1], attention_mask=longer, past_key_values=cache)


def test_a_mask_of_the_models_own_and_position_biases_are_refused():
    layer, x = make_model().model.layers[0].self_attn, torch.zeros(1, 4, 5, 16)
    mask = torch.zeros(1, 5, dtype=torch.int64)
    for name in ("position_bias", "sliding_window"):
        extra = {name: torch.ones(4)}
        refused("not supported", sparse_balance_attention, layer, x, x, x, mask, **extra)
    refused("mask", sparse_balance_attention, layer, x, x, x, None)


MIXED_LAYERS = {
    "layer_types": ["full_attention", "sliding_attention"],
    **{"use_sliding_window": True, "sliding_window": 8},
}


@pytest.mark.parametrize(
    ("family", "settings", "match"),
    [
        ("Mistral", {"sliding_window": 8}, "sliding windows"),
        ("Qwen2", MIXED_LAYERS, "sliding windows"),
        ("Gemma2", {"attn_logit_softcapping": 50.0}, "softcapped scores are not supported"),
        ("GptOss", {"layer_types": ["full_attention"] * 2}, "attention sinks are not supported"),
        ("Llama", {"attention_dropout": 0.5}, "attention dropout 0.5 is not supported"),
    ],
)
def test_models_that_attend_otherwise_are_refused(family, settings, match):
    model = make_bare_model(family, **settings).train("attention_dropout" in settings)
    with pytest.raises(ConfigError, match=match) as error:
        model(make_tokens(1, 40))
    assert "\n" not in str(error.value)


def test_attention_to_later_tokens_is_refused():
    everything = lambda row, head, query, key: torch.ones_like(key, dtype=torch.bool)  # noqa: E731
    refused("bidirectional", document_starts, 1, 8, 8, mask_function=everything)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"sparse_topk_blocks": 0}, "sparse_topk_blocks"),
        ({"sparse_block_size": "16"}, "sparse_block_size"),
        ({"sparse_selection": "best"}, "best"),
        ({"sparse_layer_topk_blocks": (1,)}, "2 layers"),
        ({"sparse_layer_topk_blocks": (None, 3), "sparse_init_block": 3}, "sparse_init_block 3"),
        ({"topk": 3}, "topk"),
        ({"sparse_init_block": 17}, "sparse_init_block"),
        ({"sparse_local_block": 2}, "sparse_local_block 2"),
    ],
)
def test_wrong_settings_are_refused(settings, match):
    refused(match, configure, make_model(), **settings)


@pytest.mark.parametrize("key", ["sparse_index_dim", "config_groups"])
def test_settings_of_other_projects_are_refused_by_name(key):
    """MiniMax-M3's indexer, and the groups of NVIDIA's ModelOpt, under the same key; or none."""
    model = make_model()
    setattr(model.config, KEY, getattr(model.config, KEY) | {key: 128})
    refused(key, model, make_tokens(1, 5))
    delattr(model.config, KEY)
    refused("configure", model, make_tokens(1, 5))
