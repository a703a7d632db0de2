# SPDX-License-Identifier: Apache-2.0
"""Tokenizers that ``transformers`` reads like their file, and those that it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data.tokenizers_of_tests import save_tokenizer

from sparsebalance_megatron.data.tokenizer import load_tokenizer
from sparsebalance_megatron.errors import DataError

TEXT = "In 2024 it's 12345 tokens, 3.14159. \n\n  two <|im_end|> \u00e9\u00e8 \u4f60\u597d"


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizer", "Unheard"])
def test_classes_that_follow_the_file_give_its_tokens(name: str, tmp_path: Path) -> None:
    reference = save_tokenizer(tmp_path, tokenizer_class=name)
    (encoding,) = load_tokenizer(str(tmp_path)).encode([TEXT], with_offsets=True)
    assert encoding.ids == reference.encode(TEXT).ids


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, r"\.\. otherwise") for name in ("GPT2Tokenizer", "BlenderbotTokenizer")),
        ("Qwen2TokenizerFast", r"\.\. otherwise"),
        *((name, r"tokenizer.json \(.*\);") for name in ("GemmaTokenizer", "BertTokenizer")),
    ],
)
def test_classes_that_do_not_are_named(name: str, reason: str, tmp_path: Path) -> None:
    """Some encode otherwise, some cannot encode at all, which is the reason given."""
    save_tokenizer(tmp_path, tokenizer_class=name)
    with pytest.raises(DataError, match=f"{reason}.*or to PreTrainedTokenizerFast$") as error:
        load_tokenizer(str(tmp_path))
    kind = name.removesuffix("Fast")
    assert str(error.value).startswith(f"--tokenizer {tmp_path}: transformers, as {kind}, ")


@pytest.mark.parametrize("template", [5, ["a"], {"default": 5}])
def test_a_chat_template_that_is_no_text_is_refused(template: object, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    with pytest.raises(DataError, match=f"--tokenizer {tmp_path}: "):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("begins", [False, True])
def test_the_token_that_texts_begin_with(begins: bool, tmp_path: Path) -> None:
    """A token may be there without beginning texts."""
    reference = save_tokenizer(tmp_path, begins_texts=begins)
    expected = reference.token_to_id("<s>") if begins else None
    assert load_tokenizer(str(tmp_path)).bos == expected


def test_a_tokenizer_that_knows_few_words_encodes_those(tmp_path: Path) -> None:
    """Where neither reading of it encodes a probe."""
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="<unk>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(str(tmp_path))
    assert [each.ids for each in loaded.encode(["a", "b"], with_offsets=False)] == [[0], [1]]
    with pytest.raises(DataError, match=f"--tokenizer {tmp_path}: it cannot encode a document"):
        loaded.encode(["c"], with_offsets=True)
