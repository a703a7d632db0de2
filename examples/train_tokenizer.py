#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a small tokenizer on your own documents.

    examples/train_tokenizer.py --input FILE ... --vocab-size N --output FOLDER

It is a byte-level BPE, which encodes any text without an unknown token, in the files that
``sparse-balance prepare-data --tokenizer FOLDER`` and ``AutoTokenizer`` of ``transformers`` read.
Models that start from trained weights need the tokenizer of those weights instead.
"""

import json
from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sparsebalance_megatron.data.records import BadRecords, Record, RecordFiles

END_OF_TEXT = "<|endoftext|>"
LEAST_TOKENS, MOST_TOKENS = 257, 1_000_000
"""The 256 bytes and the end of text; several times what any model has."""


def train(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Train on texts and write the folder's files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def text_of(record: Record) -> str:
    """A text, or the turns of a conversation as prepare-data writes them without a template."""
    turns = (f"{turn['role']}: {turn['content'] or ''}\n" for turn in record.messages or ())
    return record.text or "".join(turns)


def main() -> None:
    parser = ArgumentParser(description="Train a byte-level BPE on documents.")
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="as of prepare-data")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args()
    if not LEAST_TOKENS <= options.vocab_size <= MOST_TOKENS:
        parser.error(f"--vocab-size: must be {LEAST_TOKENS} to {MOST_TOKENS} tokens")
    # Records that prepare-data refuses, it names when it reads them.
    records = RecordFiles(options.input).records(BadRecords(skip=True))
    train(map(text_of, records), options.vocab_size, options.output)


if __name__ == "__main__":
    main()
