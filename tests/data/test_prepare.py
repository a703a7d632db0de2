# SPDX-License-Identifier: Apache-2.0
"""prepare-data end to end: real files, read back by the sample index and by transformers."""

import json
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.tokenizers_of_tests import save_tokenizer, train_tokenizer

from sparsebalance_megatron.cli import main
from sparsebalance_megatron.data.documents import DatasetWriter, Documents
from sparsebalance_megatron.data.prepare import DocumentTokenizer, prepare
from sparsebalance_megatron.data.records import RecordFiles
from sparsebalance_megatron.errors import DataError

TEXTS = ["def f(x):\n    return x\n", "é ü 你好 🎉\n", "a", "def g(y):\n    return y + 1\n" * 20]
CONVERSATION = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2."}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train_tokenizer(TEXTS, 300, tmp_path_factory.mktemp("trained"))


def jsonl(path: Path, records: Sequence[Any]) -> RecordFiles:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return RecordFiles([path])


def texts_source(directory: Path) -> RecordFiles:
    return jsonl(directory / "in.jsonl", [{"text": text} for text in TEXTS])


def test_stored_tokens_decode_to_the_texts(tokenizer: str, tmp_path: Path) -> None:
    """As transformers encodes them with the same tokenizer."""
    from transformers import AutoTokenizer

    prefix = str(tmp_path / "out" / "data")
    summary = prepare(texts_source(tmp_path), prefix, tokenizer_name=tokenizer)
    documents = Documents.open(prefix)
    stored = np.split(documents.tokens[:], documents.starts[1:-1])
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    assert loaded.batch_decode(stored) == [f"{text}<|endoftext|>" for text in TEXTS]
    assert all(tokens.dtype == np.uint16 for tokens in stored)
    lengths = sorted(map(len, stored))
    assert summary["documents"] == len(TEXTS)
    assert summary["tokens"] == summary["loss_tokens"] == sum(lengths)
    assert summary["document_tokens"]["max"] == lengths[-1]
    assert summary["document_tokens"]["p50"] in lengths[1:3]
    assert summary["skipped"] == {}
    assert json.loads(Path(f"{prefix}.json").read_text()) == summary
    names = sorted(path.name for path in Path(prefix).parent.iterdir())
    assert names == ["data.bin", "data.idx", "data.json"]
    assert loaded.eos_token == "<|endoftext|>"
    assert summary["tokenizer"] == {"path": tokenizer, "vocab_size": len(loaded)}
    expected = [[*loaded.encode(text), loaded.eos_token_id] for text in TEXTS]
    assert [tokens.tolist() for tokens in stored] == expected


def test_megatron_reads_what_was_prepared(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

    documents = [np.arange(5), np.arange(70_000, 70_009)]
    for vocab_size in (65_499, 65_500):
        prefix = str(tmp_path / str(vocab_size))
        with DatasetWriter(prefix, vocab_size=vocab_size) as writer:
            stored = documents if vocab_size == 65_500 else documents[:1]
            for document in stored:
                writer.add(document, np.zeros(len(document), dtype=np.uint8))
            writer.commit("{}")
        read = IndexedDataset(prefix)
        assert [each.tolist() for each in read] == [each.tolist() for each in stored]
        assert read.document_indices.tolist() == list(range(len(stored) + 1))
        assert read.index.dtype == DType.optimal_dtype(vocab_size)
        masks = IndexedDataset(f"{prefix}_loss_mask")
        assert not any(each.any() for each in masks)


def test_a_tokenizer_that_cuts_or_pads_does_neither(tokenizer: str, tmp_path: Path) -> None:
    plain = DocumentTokenizer(tokenizer)
    expected = plain.backend.encode_batch(TEXTS)
    plain.backend.enable_truncation(5)
    plain.backend.enable_padding(length=7)
    shutil.copytree(tokenizer, tmp_path / "cutting")
    plain.backend.save(str(tmp_path / "cutting" / "tokenizer.json"))
    loaded = DocumentTokenizer(str(tmp_path / "cutting"))
    assert [e.ids for e in loaded.backend.encode_batch(TEXTS)] == [e.ids for e in expected]


def test_bad_records_stop_or_are_counted(tokenizer: str, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"text": "good"}, {"text": ""}, {"tex": "bad"}, 7])
    prefix = str(tmp_path / "data")
    with pytest.raises(DataError, match=r"in.jsonl:2: text "):
        prepare(source, prefix, tokenizer_name=tokenizer)
    assert not list(tmp_path.glob("data*"))
    summary = prepare(source, prefix, tokenizer_name=tokenizer, skip_bad_records=True)
    assert summary["documents"] == 1
    assert sorted(summary["skipped"].values()) == [1, 1, 1]
    empty = jsonl(tmp_path / "in.jsonl", [{"text": ""}])
    with pytest.raises(DataError, match=r"/in\.jsonl: no document to write; .*: 1 text"):
        prepare(empty, prefix, tokenizer_name=tokenizer, skip_bad_records=True, overwrite=True)


def test_interruption_keeps_the_old_data_set_and_leaves_nothing_else(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, prefix = texts_source(tmp_path), str(tmp_path / "out" / "data")
    prepare(source, prefix, tokenizer_name=tokenizer)
    folder = Path(prefix).parent
    before = {path: path.read_bytes() for path in folder.glob("*.*")}

    def interrupt(*arguments: Any, **keywords: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(DocumentTokenizer, "encode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, prefix, tokenizer_name=tokenizer, overwrite=True)
    assert {path: path.read_bytes() for path in folder.glob("*.*")} == before


def test_data_set_is_replaced_only_when_asked_for(tokenizer: str, tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    conversations = jsonl(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}])
    prepare(conversations, prefix, tokenizer_name=tokenizer)
    assert Documents.open(prefix).loss_mask is not None
    with pytest.raises(DataError, match=r"data.idx.* exists; choose another prefix or pass"):
        prepare(texts_source(tmp_path), prefix, tokenizer_name=tokenizer)
    prepare(texts_source(tmp_path), prefix, tokenizer_name=tokenizer, overwrite=True)
    assert Documents.open(prefix).loss_mask is None, "the old data set's mask is gone"


def test_a_disk_that_is_full_is_named_by_the_prefix(
    tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit of the size of files stands for it: the error has no file's name either."""
    source, prefix = tmp_path / "in.jsonl", tmp_path / "data"
    source.write_text((json.dumps({"text": "x " * 5000}) + "\n") * 20)
    flags = ("--input", str(source), "--tokenizer", tokenizer, "--output-prefix", str(prefix))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        status = main(["prepare-data", *flags])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert status == 2
    assert f"error: --output-prefix {prefix}: File too large" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]


TEXT = "In 2024 it's 12345 tokens, 3.14159. \n\n  two <|im_end|> \u00e9\u00e8 \u4f60\u597d"


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizer", "Unheard"])
def test_classes_that_follow_the_file_give_its_tokens(name: str, tmp_path: Path) -> None:
    reference = save_tokenizer(tmp_path, tokenizer_class=name)
    (encoding,) = DocumentTokenizer(str(tmp_path)).encode([TEXT], with_offsets=True)
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
        DocumentTokenizer(str(tmp_path))
    kind = name.removesuffix("Fast")
    assert str(error.value).startswith(f"--tokenizer {tmp_path}: transformers, as {kind}, ")


@pytest.mark.parametrize("template", [5, ["a"], {"default": 5}])
def test_a_chat_template_that_is_no_text_is_refused(template: object, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    with pytest.raises(DataError, match=f"--tokenizer {tmp_path}: "):
        DocumentTokenizer(str(tmp_path))


def test_a_tokenizer_that_knows_few_words_encodes_those(tmp_path: Path) -> None:
    """Where neither reading of it encodes a probe."""
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="<unk>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = DocumentTokenizer(str(tmp_path))
    assert [each.ids for each in loaded.encode(["a", "b"], with_offsets=False)] == [[0], [1]]
    with pytest.raises(DataError, match=f"--tokenizer {tmp_path}: it cannot encode a document"):
        loaded.encode(["c"], with_offsets=True)
