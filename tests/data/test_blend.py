# SPDX-License-Identifier: Apache-2.0
"""Flags for data, read as Megatron reads them, and refused where it would misread them."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from sparsebalance_megatron.data.blend import parse_blend, read_blends
from sparsebalance_megatron.errors import DataError

NOTHING = {
    **{"data_path": (), "data_args_path": None, "per_split_data_args_path": None},
    **dict.fromkeys(("train_data_path", "valid_data_path", "test_data_path"), ()),
}


def flags(**given: object) -> Namespace:
    return Namespace(**(NOTHING | given))


@pytest.mark.parametrize(
    "words",
    [
        ["web"],
        ["web", "books"],
        ["web", "books", "code"],
        ["0.7", "web", "0.3", "books"],
        ["7", "web"],
        ["1e2", "web", "50", "books", ".5", "code"],
        [" 7", "web "],
    ],
)
def test_lists_are_read_as_megatron_reads_them(words: list[str]) -> None:
    from megatron.core.datasets.utils import get_blend_from_list

    prefixes, weights = get_blend_from_list(words)
    blend = parse_blend(words, "--data-path")
    assert list(blend.prefixes) == prefixes
    assert blend.weights == (None if weights is None else tuple(weights))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["0.7", "web", "much", "books"], "the weight 'much' of books is no number"),
        (["0", "web", "1", "books"], "the weight 0 of web must be a number above 0"),
        (["-1", "web", "1", "books"], "the weight -1 of web"),
        (["nan", "web", "1", "books"], "the weight nan of web"),
        (["inf", "web", "1", "books"], "the weight inf of web"),
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
    for given in (
        {"data_path": ["0.7", "web", "0.3", "books"]},
        {"data_args_path": str(tmp_path / "blend.txt")},
        {"train_data_path": ["web", "books"], "valid_data_path": ["code"]},
        {"per_split_data_args_path": str(tmp_path / "splits.json")},
    ):
        theirs = Namespace(**({name: None for name in NOTHING} | given))
        shared, each = get_blend_and_blend_per_split(theirs)
        blends = read_blends(flags(**given))
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
