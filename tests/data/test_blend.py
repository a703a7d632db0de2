# SPDX-License-Identifier: Apache-2.0
"""Flags for data, read as Megatron reads them; mixed data sets against Megatron's own blend."""

import json
import re
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.stored_documents import write_stored
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance_megatron.data.samples import (
    Blend,
    BlendingOrder,
    SampleIndex,
    open_samples,
    parse_blend,
    read_blends,
)
from sparsebalance_megatron.errors import DataError

NAMES_OF_FLAGS = (
    *("data_path", "data_args_path", "per_split_data_args_path"),
    *("train_data_path", "valid_data_path", "test_data_path"),
)


def flags(**given: object) -> Namespace:
    return Namespace(**(dict.fromkeys(NAMES_OF_FLAGS) | given))


LISTS = [
    ["web"],
    ["web", "books"],
    ["web", "books", "code"],
    ["0.7", "web", "0.3", "books"],
    ["7", "web"],
    ["1e2", "web", "50", "books", ".5", "code"],
    [" 7", "web "],
]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["0.7", "web", "much", "books"], "the weight 'much' of books is no number"),
        (["0", "web", "1", "books"], "the weight 0 of web must be a number above 0"),
        (["nan", "web", "1", "books"], "the weight nan of web"),
        (["web", "0.7", "books", "0.3"], "0.7 is no prefix"),
        (["0.7", "web", "books"], "0.7 is no prefix"),
        ([], "names no data set"),
    ],
)
def test_a_bad_list_is_one_line_that_names_the_word(words: list[str], named: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_blend(words, "--data-path")
    assert named in str(caught.value)
    assert str(caught.value).startswith("--data-path: ")
    assert "\n" not in str(caught.value)


def test_a_data_set_may_be_named_by_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "2024.idx").touch()
    monkeypatch.chdir(tmp_path)
    assert parse_blend(["web", "2024"], "--data-path").prefixes == ("web", "2024")


def test_every_flag_gives_the_blends_that_megatron_gives(tmp_path: Path) -> None:
    from megatron.training.utils import get_blend_and_blend_per_split

    (tmp_path / "blend.txt").write_text("0.7 web\n0.3 books\n")
    per_split = {"train": "2 web 1 books", "valid": ["web"], "test": None}
    (tmp_path / "splits.json").write_text(json.dumps(per_split))
    for named in (
        *({"data_path": words} for words in LISTS),
        {"data_args_path": str(tmp_path / "blend.txt")},
        {"train_data_path": ["web", "books"], "valid_data_path": ["code"]},
        {"per_split_data_args_path": str(tmp_path / "splits.json")},
    ):
        shared, each = get_blend_and_blend_per_split(flags(**named))
        blends = read_blends(flags(**named))
        for number, blend in enumerate(blends.values()):
            expected = shared or each[number]
            if blend is None:
                assert expected is None
                continue
            weights = None if blend.weights is None else list(blend.weights)
            assert (list(blend.prefixes), weights) == tuple(expected)
            assert blend.whole == (shared is None)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        ("{", "not valid JSON"),
        ('{"train": ["web"]}', "required field valid"),
        ('{"train": 3, "valid": null, "test": null}', "train 3: "),
        ('{"train": ["x", "web", "1", "b"], "valid": null, "test": null}', "train: the weight 'x'"),
    ],
)
def test_a_bad_file_of_splits_is_named(tmp_path: Path, content: str | None, named: str) -> None:
    path = tmp_path / "splits.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_blends(flags(per_split_data_args_path=str(path)))
    assert named in str(caught.value)
    assert str(caught.value).startswith(f"--per-split-data-args-path {path}")


def test_flags_that_contradict_one_another_are_named() -> None:
    with pytest.raises(DataError, match="--data-path and --train-data-path: all of them name"):
        read_blends(flags(data_path=("web",), train_data_path=("web",)))
    with pytest.raises(DataError, match="no --data-path"):
        read_blends(flags())
    with pytest.raises(DataError, match="--data-args-path /nonexistent: cannot be read"):
        read_blends(flags(data_args_path="/nonexistent"))


NAMES = ("web", "books", "code")
DOCUMENTS = (17, 5, 11)
"""Documents of every data set."""
FIRST_TOKENS = (0, 100, 200)
"""Tokens say which data set they come from."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blend")
    for name, documents, first in zip(NAMES, DOCUMENTS, FIRST_TOKENS, strict=True):
        rows = [[first + i] * (3 + i % 4) for i in range(documents)]
        write_stored(folder / name, rows)
    masks = [[1] * (3 + i % 4) for i in range(DOCUMENTS[1])]
    write_stored(folder / "books_loss_mask", masks, dtype=np.uint8)
    return folder


def blend_of(folder: Path, *names: str, weights: tuple[float, ...] | None = None) -> Blend:
    return Blend(
        place="--data-path", prefixes=tuple(str(folder / name) for name in names), weights=weights
    )


def open_blend(blend: Blend, split: str = "train", **options: Any) -> SampleIndex:
    options = {"missing_loss_mask": "train", **options}
    found = open_samples(blend, split, max_tokens=64, overlong="split", seed=5, **options)
    assert found is not None
    return found


@given(
    weights=st.lists(st.floats(0.01, 10.0), min_size=2, max_size=6),
    consumed=st.integers(0, 90),
)
@settings(max_examples=40, deadline=None)
def test_a_resumed_order_goes_on(weights: list[float], consumed: int) -> None:
    resumed = BlendingOrder(weights).places(consumed, 10)
    never_stopped = BlendingOrder(weights).places(0, consumed + 10)
    assert all(map(np.array_equal, resumed, (each[consumed:] for each in never_stopped)))


@pytest.mark.parametrize("weights", [None, (0.6, 0.1, 0.3), (3.0, 3.0, 1.0)])
def test_the_order_is_that_of_megatrons_own_blend(
    folder: Path, weights: tuple[float, ...] | None
) -> None:
    """Megatron's builder, its blend and its data sets, of samples of one document each."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 0, 0, 1000, {}

    prefixes = [str(folder / name) for name in NAMES]
    config = GPTDatasetConfig(
        random_seed=5,
        sequence_length=4,
        blend=(prefixes, None if weights is None else list(weights)),
        split="100,0,0",
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [30, 0, 0], lambda: True, config)
    theirs = builder.build()[0]
    index = open_blend(blend_of(folder, *NAMES, weights=weights))
    if weights is None:
        # There, sizes count samples of a fixed length; the rule is the same for any sizes.
        order = BlendingOrder([len(data_set) for data_set in theirs.datasets])
    else:
        order = index._order
    sources, numbers = order.places(0, len(theirs.dataset_index))
    assert sources.tolist() == theirs.dataset_index.tolist()
    assert numbers.tolist() == theirs.dataset_sample_index.tolist()
    ours = index.source_of(index.global_batch(0, 30))
    assert ours.tolist() == index._order.places(0, 30)[0].tolist()


@pytest.mark.parametrize("weights", [None, (1.0, 5.0, 2.0)])
def test_every_place_has_the_next_sample_of_its_source_alone(
    folder: Path, weights: tuple[float, ...] | None
) -> None:
    index = open_blend(blend_of(folder, *NAMES, weights=weights))
    alone = [open_blend(blend_of(folder, name)) for name in NAMES]
    samples = index.global_batch(0, 200)
    taken = [0] * len(NAMES)
    places = zip(samples, index.lengths_of(samples), index.source_of(samples), strict=True)
    for sample, length, source in places:
        found = index.read(int(sample))
        expected = alone[source].read(int(alone[source].global_batch(taken[source], 1)[0]))
        assert found.length_tokens == length
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.loss_mask, expected.loss_mask)
        assert (found.loss_mask is not None) == (NAMES[source] == "books")
        taken[source] += 1
    shares = np.array(DOCUMENTS if weights is None else weights)
    assert np.abs(taken - 200 * shares / shares.sum()).max() < len(NAMES)


def test_a_source_without_a_mask_beside_masked_ones_is_refused(folder: Path) -> None:
    message = f"--data-path: no loss mask beside {folder / 'web'}, {folder / 'code'}, as other"
    with pytest.raises(DataError, match=re.escape(message)):
        open_blend(blend_of(folder, *NAMES), missing_loss_mask="refuse")
    for names in (("web", "code"), ("books",)):
        open_blend(blend_of(folder, *names), missing_loss_mask="refuse")


def test_splits_cut_every_source(folder: Path) -> None:
    blend = blend_of(folder, "web", "code")
    parts = [
        open_blend(blend, split=split, split_weights="60,30,10") for split in ("train", "valid")
    ]
    assert [part.counts.documents for part in parts] == [10 + 7, 5 + 3]
    with pytest.raises(DataError, match="books has too few documents for a test part"):
        open_blend(blend_of(folder, "web", "books"), split="test", split_weights="90,2,8")
    whole = Blend(place="--valid-data-path", prefixes=blend.prefixes, whole=True)
    assert open_blend(whole, split="valid").counts.documents == 28


def test_digests_follow_weights_and_sources(folder: Path) -> None:
    blends = [
        blend_of(folder, "web", "code"),
        blend_of(folder, "code", "web"),
        blend_of(folder, "web", "code", weights=(1.0, 2.0)),
        blend_of(folder, "web", "code", weights=(1.0, 3.0)),
        blend_of(folder, "web", "books"),
    ]
    digests = Counter(open_blend(blend).digest() for blend in blends)
    assert set(digests.values()) == {1}
    percent = open_blend(blend_of(folder, "web", "code", weights=(25.0, 75.0)))
    assert percent.digest() == open_blend(blends[3]).digest()
    alone = [open_blend(blend_of(folder, "web", weights=each)) for each in (None, (0.3,))]
    assert alone[0].digest() == alone[1].digest() and alone[0].sources == ()
