# SPDX-License-Identifier: Apache-2.0
"""The text of budgets by layer: read back as written, and refused part by part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.errors import ConfigError
from sparsebalance_megatron.layer_budgets import (
    DENSE,
    FLAG,
    MAX_BLOCKS,
    base_budgets,
    has_dense_layers,
    layer_budgets_text,
    parse_layer_budgets,
)

BUDGETS = st.one_of(st.just(DENSE), st.integers(1, 4), st.integers(1, MAX_BLOCKS))


@given(st.dictionaries(st.integers(0, 40), BUDGETS, min_size=1), st.randoms())
def test_what_is_written_is_read_back(budgets: dict[int, int], random) -> None:
    text = layer_budgets_text(budgets)
    assert dict(parse_layer_budgets(text)) == budgets
    # However it is typed: layer by layer, in any order.
    words = [
        f"{'dense' if budget == DENSE else budget}:{layer}" for layer, budget in budgets.items()
    ]
    random.shuffle(words)
    assert SparseBalanceConfig(layer_budgets=words).layer_budgets == text
    layers = max(budgets) + 3
    assert base_budgets(7, text, layers) == tuple(budgets.get(i, 7) for i in range(layers))
    assert has_dense_layers(text) == (DENSE in budgets.values())


def test_all_are_the_layers_that_have_no_budget_of_their_own() -> None:
    assert SparseBalanceConfig(layer_budgets=["4:1", "dense:all"]).layer_budgets == (
        "4:1 dense:all"
    )
    assert base_budgets(7, "4:1 dense:all", 3) == (DENSE, 4, DENSE)
    assert base_budgets(7, "5:all", 2) == (5, 5)


def test_the_text_is_short() -> None:
    typed = ["16:2-4,5", "dense:7,0-1", "8:9"]
    assert SparseBalanceConfig(layer_budgets=typed).layer_budgets == "dense:0-1,7 16:2-5 8:9"


@pytest.mark.parametrize(
    ("text", "part", "remedy"),
    [
        ("16:0 dense:", "dense:", "such as 0-3,7"),
        ("dense", "dense", "such as 0-3,7"),
        ("dense:3-1", "dense:3-1", "such as 0-3,7"),
        ("dense:-1", "dense:-1", "such as 0-3,7"),
        ("16:0,,1", "16:0,,1", "such as 0-3,7"),
        ("16:0-99999", "16:0-99999", "such as 0-3,7"),
        ("0:1", "0:1", f"1 to {MAX_BLOCKS} blocks"),
        (f"{DENSE}:1", f"{DENSE}:1", f"1 to {MAX_BLOCKS} blocks"),
        ("sparse:1", "sparse:1", "must begin with dense"),
        ("8:0-3 dense:3", "dense:3", "layer 3 is named twice"),
        ("8:all dense:all", "dense:all", "all is named twice"),
        (" ", "' '", "drop the flag"),
    ],
)
def test_refusals_name_flag_part_and_remedy(text: str, part: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SparseBalanceConfig(layer_budgets=text)
    assert str(caught.value).startswith(f"{FLAG} {part}: ")
    assert remedy in str(caught.value)


def test_layers_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match=f"{FLAG} dense:3-4: names layer 4; .* are 0 to 3"):
        base_budgets(8, "dense:3-4", 4)


def test_dense_layers_have_an_implementation() -> None:
    with pytest.raises(ConfigError, match="attention tokens: serves no dense layers"):
        SparseBalanceConfig(attention="tokens", layer_budgets="dense:0")
    SparseBalanceConfig(attention="tokens", layer_budgets="4:0")
