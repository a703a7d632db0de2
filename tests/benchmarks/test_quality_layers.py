# SPDX-License-Identifier: Apache-2.0
"""Budgets by layer, and wishes, in training of models that look up."""

from dataclasses import replace

import pytest
from quality import layers, wishes
from quality.lookup import Lookup

FEW_STEPS = replace(
    layers.SETTINGS,
    lookup=Lookup(keys=8, values=8, noise=8, pairs=4, tokens_per_query=6),
    stages=((128, 3),),
    sparse_steps=2,
    step_tokens=256,
    layers=2,
    base_budget=3,
)


@pytest.fixture(autouse=True)
def few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_HELD_OUT", 4)
    monkeypatch.setattr(layers, "_MEASURED", 2)


def test_budgets_by_layer_are_trained() -> None:
    found = layers.run_seed(FEW_STEPS, 0)
    assert found["arms"][layers.ALIKE]["budgets"] == [3, 3]
    assert sum(found["arms"][layers.COVERAGE]["budgets"]) == 6
    for arm in found["arms"].values():
        assert arm["trained"]["loss"] < arm["untrained"]["loss"]
    assert layers.summary([found]).keys() == found["arms"].keys()


def test_the_next_block_goes_where_it_adds_most_coverage() -> None:
    curves_LK = [[0.2, 0.4, 0.6, 0.7, 1.0], [0.3, 0.5, 0.9, 1.0, 1.0]]
    assert layers.greedy(layers.np.array(curves_LK), mean_blocks=3, least=2) == [3, 3]
    assert layers.greedy(layers.np.array(curves_LK), mean_blocks=4, least=2) == [5, 3]


def test_wishes_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists without a wish train as the package's do; with wishes more is read, at its cost."""
    chosen = {
        "dense": "dense",
        "lists": "previous-block 3 first=1",
        wishes.WHOLE: "previous-block 3 first=1",
        "no wishes": "previous-block 3 first=1 wishes=tile-8 gate=2",
        "wishes": "previous-block 3 first=1 wishes=tile-8 scores=half gate=0.01",
    }
    monkeypatch.setattr(wishes, "ARMS", chosen)
    found = wishes.run_seed(FEW_STEPS, 0)["arms"]
    assert [None in arm["budgets"] for arm in found.values()] == [True, False, True, False, False]
    for reading in ("untrained", "trained"):
        assert found["no wishes"][reading] == pytest.approx(found["lists"][reading], rel=1e-4)
    assert found["wishes"]["trained"]["loss"] != found["lists"]["trained"]["loss"]
    assert found["no wishes"]["wishes"] == 0 < found["wishes"]["wishes"]
    assert wishes.summary([{"arms": found}])["wishes"]["trained"]["loss"]["mean"]["count"] == 1
