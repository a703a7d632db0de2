# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint decides where flags leave it open."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from sparsebalance_megatron.megatron import training_arguments
from sparsebalance_megatron.megatron.training_arguments import (
    changed_attention,
    settle_attention,
)


def _arguments(dense_up_to: str, **others: Any) -> Namespace:
    values = {"block_size": 256, "base_budget": 32, "selection": "previous-block"} | others
    names = {f"sparse_balance_{name}": value for name, value in values.items()}
    return Namespace(
        sparse_balance=True,
        sparse_balance_dense_up_to=dense_up_to,
        sparse_balance_first_blocks=1,
        **names,
    )


@pytest.mark.parametrize(
    ("now", "trained", "found"),
    [
        pytest.param(_arguments("auto"), _arguments("4096"), "4096", id="kept"),
        pytest.param(_arguments("0"), _arguments("4096"), "0", id="the-flag-wins"),
        pytest.param(_arguments("auto"), None, "auto", id="no-checkpoint"),
        pytest.param(_arguments("auto"), Namespace(), "auto", id="without-the-plugin"),
        pytest.param(
            _arguments("auto", base_budget=8), _arguments("4096"), "auto", id="another-budget"
        ),
    ],
)
def test_a_checkpoint_keeps_the_length_up_to_which_documents_are_dense(
    now: Namespace, trained: Namespace | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_arguments, "arguments_of_weights", lambda args: trained)
    now = Namespace(**vars(now))
    lines = settle_attention(now)
    assert now.sparse_balance_dense_up_to == found
    assert len(lines) == (found == "4096")


def test_weights_of_another_length_are_named() -> None:
    (line,) = changed_attention(_arguments("4096"), _arguments("0"))
    assert line == "--sparse-balance-dense-up-to is 0; these weights were trained with 4096"
    earlier = _arguments("")
    del earlier.sparse_balance_dense_up_to
    assert changed_attention(earlier, _arguments("0")) == []
