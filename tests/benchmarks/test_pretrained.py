# SPDX-License-Identifier: Apache-2.0
"""The pretrained model's benchmark: documents, measures, budgets, and every arm on a tiny model."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from data.tokenizers_of_tests import train_tokenizer
from pretrained import arms, command, measures, model, sensitivities
from pretrained.budgets import layer_budgets, proportional
from pretrained.documents import (
    COPY,
    DIGITS,
    KEY_VALUE,
    KINDS,
    NEEDLE,
    TEXT,
    Document,
    digest,
    make_documents,
)
from pretrained.reading import Reader, Scores
from pretrained.results import summarised
from pretrained.rules import EXPERIMENTS, best_blocks, masses, rule_of
from pretrained_inputs import (
    BLOCK,
    LAYERS,
    TOKENS,
    VOCABULARY,
    asked_of,
    documents,
    encode,
    tiny_model,
    tiny_reader,
)

from sparsebalance_megatron.layer_budgets import DENSE

KNOWN = {
    "peaks": [0.1, 0.4, 0.2],
    "cuts-text": [0.0, 0.1, 0.3],
    "cuts-lookups": [-0.1, 1.0, 0.2],
}


@pytest.fixture(scope="module")
def reader() -> Reader:
    return tiny_reader()


@pytest.mark.parametrize("kind", KINDS)
def test_documents_follow_from_the_seed(kind: str) -> None:
    found = documents(kind)
    assert digest(found) == digest(documents(kind))
    others = make_documents(kind, TOKENS, 2, encode, seed=1), documents(kind, calibration=True)
    assert len({digest(each) for each in (found, *others)}) == 3
    assert [each.length for each in found] == [TOKENS, TOKENS]
    assert found[:1] == documents(kind, how_many=1)


@pytest.mark.parametrize(
    ("kind", "labels", "cue"), [(KEY_VALUE, DIGITS, 8), (NEEDLE, DIGITS, 8), (COPY, 24, 4)]
)
def test_every_answer_stands_before_the_tail(kind: str, labels: int, cue: int) -> None:
    """With the tokens that ask for it; of a look-up once."""
    for document in documents(kind):
        before = document.tokens[: document.tail]
        for answer in set(document.answers):
            places = [
                place + 1
                for place, each in zip(document.scored, document.answers, strict=True)
                if each == answer
            ]
            assert places == list(range(places[0], places[0] + labels))
            assert places[0] > document.tail
            asked = document.tokens[places[0] - cue : places[-1] + 1]
            starts = [n for n in range(len(before)) if before[n : n + len(asked)] == asked]
            assert len(starts) == 1 or (starts and kind == COPY)


def scores(loss: list[float], right: list[bool] | None = None) -> Scores:
    return Scores(loss_X=torch.tensor(loss), right_X=torch.tensor(right or [False] * len(loss)))


def document_of(kind: str, labels: int, answers: tuple[int, ...] = ()) -> Document:
    places = tuple(range(labels))
    tokens = (0,) * (labels + 1)
    return Document(kind=kind, number=0, tokens=tokens, scored=places, answers=answers, tail=0)


def test_figures_of_look_ups() -> None:
    document = document_of(KEY_VALUE, 4, (0, 0, 1, 1))
    found = scores([0.0, 1.0, 2.0, 3.0], [True, True, True, False])
    figures = measures.figures(document, found, found, None)
    assert figures == {"exact": 0.5, "digits": 0.75, "nats": 1.5}


def test_figures_of_text() -> None:
    """Far tokens are the tenth that loses most to a window: here the last but one of 20."""
    dense, window = [1.0] * 20, [1.0] * 20
    window[18], window[3] = 9.0, 5.0
    read = [1.0 + 0.1 * (each >= 10) for each in range(20)]
    read[18] = 4.0
    figures = measures.figures(document_of(TEXT, 20), *map(scores, (read, dense, window)))
    assert figures == pytest.approx(
        {
            "loss over dense": (9 * 0.1 + 3.0) / 20,
            "far": 1.5,
            "quarter 1": 0.0,
            "quarter 2": 0.0,
            "quarter 3": 0.1,
            "quarter 4": (4 * 0.1 + 3.0) / 5,
        },
        abs=1e-6,
    )


def test_differences_are_paired_by_document() -> None:
    mine, theirs = [{"nats": 1.0}, {"nats": 3.0}], [{"nats": 2.0}, {"nats": 4.0}]
    found = summarised(mine, theirs)["nats"]
    assert found["mean"] == 2.0 and found["values"] == [1.0, 3.0]
    assert found["difference"] == {"mean": -1.0, "half_width": 0.0}
    # Student's t with one degree of freedom.
    assert found["half_width"] == pytest.approx(12.7062 * math.sqrt(2) / math.sqrt(2), rel=1e-4)
    assert summarised(mine[:1], theirs[:1])["nats"]["half_width"] is None


@pytest.mark.parametrize(
    ("values", "power", "most", "expected"),
    [
        ([0.1, 0.4, 0.2, -3.0], 1.0, 99, (7, 14, 9, 5)),
        ([0.1, 0.4, 0.2, 0.0], 2.0, 99, (6, 16, 8, 5)),
        # What the second cannot use goes to the others.
        ([0.1, 0.4, 0.2, 0.0], 2.0, 10, (10, 10, 10, 5)),
        ([0.0, 0.0, 0.0, 0.0], 1.0, 99, (9, 9, 9, 8)),
    ],
)
def test_the_rest_is_in_proportion(
    values: list[float], power: float, most: int, expected: tuple[int, ...]
) -> None:
    found = proportional(values, total=35, floor=5, most=most, power=power)
    assert found == expected and sum(found) == 35


def test_budgets_by_name() -> None:
    def budgets(layers: str) -> tuple[int, ...]:
        arm = arms.parse_arm(f"previous-block 8 layers={layers}")
        return layer_budgets(arm, LAYERS, 32, KNOWN)

    assert budgets("uniform") == (8, 8, 8)
    assert budgets("dense:0,2") == (DENSE, 8, DENSE)
    assert budgets("dense-1-cuts-lookups") == (8, DENSE, 8)
    # Not whole: 15 blocks are as many pairs as the other two layers leave.
    assert budgets("least-5-peaks") == (5, 15, 5)
    assert sum(budgets("peaks")) == sum(budgets("cuts-text")) == 24
    with pytest.raises(model.PretrainedError, match="no sensitivities are called gut"):
        budgets("gut")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_budget_of_everything_is_dense(name: str, reader: Reader) -> None:
    (document,) = documents(KEY_VALUE, 1)
    rule = rule_of(name, (TOKENS // BLOCK,) * LAYERS, 1)
    dense = reader.dense(document)
    torch.testing.assert_close(reader.by_rule(document, BLOCK, rule).loss_X, dense.loss_X)


@pytest.mark.parametrize("name", ["window", "oracle-token"])
def test_rules_do_not_look_ahead(name: str, reader: Reader) -> None:
    (document,) = documents(TEXT, 1)
    changed = 301
    tokens = (*document.tokens[:changed], *((7,) * (TOKENS + 1 - changed)))
    rule = rule_of(name, (4,) * LAYERS, 1)
    one, other = (
        reader.by_rule(each, BLOCK, rule).loss_X[: changed - 1]
        for each in (document, replace(document, tokens=tokens))
    )
    torch.testing.assert_close(one, other)


def test_masses_are_those_of_softmax() -> None:
    asked = asked_of(5, 4)
    (mass_HQN,) = masses(asked)
    torch.testing.assert_close(mass_HQN.sum(-1), torch.ones(4, 20))
    row, head = 13, 3
    score_T = (asked.k_TGD[: row + 1, 1] @ asked.q_QHD[row, head] * 8**-0.5).softmax(0)
    torch.testing.assert_close(mass_HQN[head, row, 1], score_T[4:8].sum())
    assert mass_HQN[head, row, 4] == 0


def test_the_best_blocks_are_listed_with_own_and_first() -> None:
    asked = asked_of(4, 2)
    score_CQN = torch.tensor([[0.0, 0.1, 0.9, 0.2]]).expand(2, 4, -1)
    found = best_blocks(asked, score_CQN, 3, 1, by_token=False)
    lists = [
        set(row[0, : count[0]].tolist())
        for row, count in zip(found.indices_QCK, found.counts_QC, strict=True)
    ]
    assert lists == [{0}, {0, 1}, {0, 1, 2}, {0, 2, 3}]
    assert found.indices_QCK[:, 0, 0].tolist() == [0, 1, 2, 3]


def test_a_cut_of_a_layer_costs_what_the_whole_pass_says(reader: Reader) -> None:
    some = documents(KEY_VALUE, 1)
    uncut = [arms.REFERENCE.blocks] * LAYERS
    losses = []
    for layer in (None, *range(LAYERS)):
        budgets = [2 if each == layer else 8 for each in range(LAYERS)]
        read = reader.product(
            some[0],
            block_size=BLOCK,
            selection=arms.REFERENCE.selection,
            budgets=uncut if layer is None else budgets,
            sparse_init_block=1,
        )
        losses.append(float(read.loss_X.mean()))
    expected = [each - losses[0] for each in losses[1:]]
    assert sensitivities.cuts(reader, some, BLOCK) == pytest.approx(expected, abs=1e-5)


def test_the_command_reads_all_kinds_by_all_arms(tmp_path: Path) -> None:
    """A second time what the first has kept."""
    tiny_model().save_pretrained(tmp_path / "model")
    train_tokenizer(["A text of words, 12345."], VOCABULARY, tmp_path / "model")
    path = tmp_path / "result.json"

    def read(*words: str) -> dict[str, Any]:
        common = ("--directory", str(tmp_path), "--documents", "1", "--json", str(path))
        assert command.main([*common, *words]) == 0
        return json.loads(path.read_text())["groups"]

    groups = ("--groups", *(f"{kind}-1024" for kind in KINDS))
    found = read(*groups)
    assert found == read(*groups)
    for group in found.values():
        assert group["arms"].keys() >= {each.name for each in arms.SHORT_ARMS}
    dense = found["text-1024"]["arms"][arms.ALL]["figures"]
    assert dense["loss over dense"]["mean"] == dense["far"]["mean"] == 0.0
    wished = read("--groups", "copy-1024", "--arms", "wishes", "--no-window")["copy-1024"]["arms"]
    assert wished.keys() >= {each.name for each in arms.WISH_ARMS}
