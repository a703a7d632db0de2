# SPDX-License-Identifier: Apache-2.0
"""Tokenizers in a folder: with a chat template of choice, or trained on texts."""

import json
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import REPOSITORY

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<s>")
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
_TEXT = "user assistant system 2024 1999 12345 7162534 918273 4455 667788 it's ok, tools call"


def save_tokenizer(
    directory: Path,
    *,
    chat_template: str | None = None,
    eos: str = "<|endoftext|>",
    begins_texts: bool = False,
    tokenizer_class: str = "PreTrainedTokenizerFast",
) -> Any:
    """Write the files; the ``tokenizers.Tokenizer`` that tokenizer.json holds."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers, processors

    path = directory / "tokenizer.json"
    train_tokenizer([_TEXT] * 20, 400, directory)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if begins_texts:
        begin = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[begin]
        )
    tokenizer.save(str(path))
    config = {"tokenizer_class": tokenizer_class, "eos_token": eos, "bos_token": "<s>"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> str:
    """Train one as examples/train_tokenizer.py does; the folder's path."""
    example = runpy.run_path(str(REPOSITORY / "examples" / "train_tokenizer.py"))
    example["train"](texts, vocab_size, folder)
    return str(folder)
