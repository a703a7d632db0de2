# SPDX-License-Identifier: Apache-2.0
"""How many collectives sharing rows takes in a real run: nobody adds one unseen."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from harness import PROGRAMS, train, write_documents

pytestmark = pytest.mark.distributed

LAYERS, KV_HEADS, SAMPLES, STEPS = 4, 2, 2, 2
SELECTION = {"all_gather_into_tensor": 1, "all_reduce": 1}
"""Of a layer, forward: summaries of blocks, and the mass that coverage is read from."""


def sent_round(forward: int, backward: int) -> tuple[dict[str, int], dict[str, int]]:
    """Sends and receives of a layer's keys and values, and of their gradients."""
    return {"batch_isend_irecv": forward}, {"batch_isend_irecv": backward}


GATHERS = {"all_gather_into_tensor": KV_HEADS}
EXCHANGES = {
    "all-gather": (2, (GATHERS, GATHERS | {"reduce_scatter_tensor": KV_HEADS})),
    "ring": (2, sent_round(1, 1 + 2)),
    # Two nodes of two: three visits; sums go round in each node, and then between them.
    "hierarchical-ring": (4, sent_round(3, 3 + (2 * 2 + 2))),
}


@pytest.mark.parametrize(
    ("exchange", "recompute"), [*((name, False) for name in EXCHANGES), ("all-gather", True)]
)
def test_collectives_of_a_layer(exchange: str, recompute: bool, tmp_path: Path) -> None:
    """Selection takes two and the exchange its own, in every layer; before a step ranks agree."""
    ranks, (forward, backward) = EXCHANGES[exchange]
    documents = write_documents(tmp_path / "train", [100, 60, 200, 90] * 4)
    again = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    train(
        *(ranks, documents, "--global-batch-size", str(SAMPLES), "--train-iters", str(STEPS)),
        *("--context-parallel-size", str(ranks), "--sparse-balance-device", "cpu"),
        *("--sparse-balance-context-parallel", "static", "--sparse-balance-exchange", exchange),
        *((*again, "--recompute-num-layers", "1") if recompute else ()),
        program=(str(PROGRAMS / "counted_collectives.py"), str(tmp_path)),
    ).require_success()
    rows = LAYERS * SAMPLES * STEPS
    once = total(SELECTION, forward)
    expected = {
        "forward": total(*[once] * rows),
        "backward": total(*[total(backward, once) if recompute else total(backward)] * rows),
        "agreement": Counter(all_gather_into_tensor=STEPS),
    }
    for rank in range(ranks):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert {place: Counter(calls) for place, calls in found.items()} == expected


def total(*counts: dict[str, int]) -> Counter[str]:
    """Counts added up."""
    added: Counter[str] = Counter()
    for each in counts:
        added.update(each)
    return added
