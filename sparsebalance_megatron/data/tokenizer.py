# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of data preparation, and which of their tokens are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsebalance_megatron.data.conversations import (
    PLAIN,
    ConversationRenderer,
    template_renderer,
)
from sparsebalance_megatron.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding

TOKENIZER_FILE = "tokenizer.json"

_SUFFIXES = ("s", "t", "re", "ve", "m", "ll", "d")
_PROBES = (
    "Hello World, it's ok  two   spaces\n\n\tdef f_1(x):\r\n    return x+1.5e-3  # ok\n\n\n  \n!\n",
    " éÉ e\u0301 \ufb01 \u2460 \uff21 你好\uff0c世界。 При 🎉👍\U0001f3fd \u200b—“x”\t ",
    "\nhttps://a.org/B_c?d=1&e=2 <tag> {% x %} [INST] ### '' $5,000.00 (a)(b) ال กำ 한국 ",
    " ".join(f"I'{suffix} HE'{suffix.upper()} '{suffix}" for suffix in _SUFFIXES),
    " ".join(f"{number**5} x{number}y.{number}" for number in range(300)),
)
"""Texts on which pre-tokenizers and normalisers differ: digits, blanks, accents, scripts."""
_PROBED_TOKENS = 4000


def trained_tokens(token_ends: Sequence[int], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Mask of trained tokens, uint8: those whose last character, by ``token_ends``, lies in a span.

    A token that begins before the assistant's turn and ends in it is trained.
    """
    ends = np.asarray(token_ends, dtype=np.int64)
    mask = np.zeros(len(ends), dtype=np.uint8)
    for start, end in spans:
        mask[(start < ends) & (ends <= end)] = 1
    return mask


@dataclass(frozen=True, kw_only=True)
class DocumentTokenizer:
    """A fast tokenizer and what preparation must know of it.

    ``name`` is a directory or model name, for the summary; ``backend`` a ``tokenizers.Tokenizer``;
    ``vocab_size`` one more than the largest token id; ``eod`` the id that ends a document, or None;
    ``bos`` the id that the tokenizer itself begins texts with, or None; ``conversations`` makes
    conversations text.
    """

    name: str
    backend: Any
    vocab_size: int
    eod: int | None
    bos: int | None = None
    conversations: ConversationRenderer = PLAIN

    def encode(self, texts: Sequence[str], *, with_offsets: bool) -> list[Encoding]:
        """Token ids per text, with character offsets if asked for; no special tokens are added."""
        encode = self.backend.encode_batch if with_offsets else self.backend.encode_batch_fast
        try:
            return encode(list(texts), add_special_tokens=False)
        except Exception as error:
            raise DataError(
                f"--tokenizer {self.name}: it cannot encode a document ({error}); give one that "
                "encodes every text"
            ) from error


def load_tokenizer(
    name: str, template_arguments: Mapping[str, Any] | None = None
) -> DocumentTokenizer:
    """Load a HuggingFace tokenizer from a directory, or by its name on the model hub.

    Args:
        template_arguments: for the chat template, by name.

    Raises:
        DataError: it is damaged, gives other tokens than its tokenizer.json, or its chat template
            is unusable.
    """
    path = Path(name).expanduser()
    is_directory = path.is_dir()
    if not is_directory and name.startswith(("/", "./", "../", "~")):
        raise DataError(f"--tokenizer {name}: no such directory")

    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            path if is_directory else name, trust_remote_code=False
        )
    # The libraries raise whatever damaged files lead to: KeyError, or the bare Exception of Rust.
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        problem = "" if is_directory else "not a directory, and not downloaded: "
        raise DataError(
            f"--tokenizer {name}: {problem}{reason}; give a directory with tokenizer.json and "
            "tokenizer_config.json, or train one with examples/train_tokenizer.py"
        ) from error
    if not getattr(loaded, "is_fast", False):
        raise DataError(
            f"--tokenizer {name}: no tokenizer.json; convert it to a fast tokenizer first"
        )
    backend = loaded.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    _check_encoding(name, loaded, path / TOKENIZER_FILE if is_directory else _downloaded(name))
    conversations = PLAIN
    if loaded.chat_template:
        try:
            conversations = template_renderer(loaded, template_arguments or {})
        except DataError as error:
            raise DataError(f"--tokenizer {name}: {error}") from error
    elif template_arguments:
        raise DataError(f"--chat-template-kwargs: the tokenizer {name} has no chat template")
    return DocumentTokenizer(
        name=name,
        backend=backend,
        vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values()),
        eod=loaded.eos_token_id,
        bos=loaded.bos_token_id if _begins_with(backend, loaded.bos_token_id) else None,
        conversations=conversations,
    )


def _downloaded(name: str) -> Path | None:
    """The tokenizer.json of a name on the model hub, which has been downloaded; None without."""
    from transformers.utils import cached_file

    with suppress(OSError):
        return Path(cached_file(name, TOKENIZER_FILE))
    return None


def _check_encoding(name: str, loaded: Any, file: Path | None) -> None:
    """Raise unless ``transformers`` encodes as tokenizer.json says.

    Some classes of ``transformers`` replace the file's pre-tokenizer or normaliser by their own.
    """
    from tokenizers import Tokenizer

    remedy = (
        "set tokenizer_class in tokenizer_config.json to the class that saved the file, or to "
        "PreTrainedTokenizerFast"
    )
    if file is None or not file.is_file():
        return
    reference = Tokenizer.from_file(str(file))
    reference.no_truncation()
    reference.no_padding()
    added = reference.get_added_tokens_decoder().values()
    # Neighbours that the vocabulary knows to merge, in the order of merging.
    step = 1 + reference.get_vocab_size() // _PROBED_TOKENS
    words = reference.decode_batch([[each] for each in range(0, reference.get_vocab_size(), step)])
    marked = [f"a{token.content} b {token.content}c" for token in added]
    for text in (*_PROBES, *marked, "".join(words), " ".join(words)):
        found = _ids_or_error(loaded.backend_tokenizer, text)
        expected = _ids_or_error(reference, text)
        if found != expected:
            reason = f" ({found})" if isinstance(found, str) else ""
            raise DataError(
                f"--tokenizer {name}: transformers, as {type(loaded).__name__}, encodes "
                f"{text[:30]!r}.. otherwise than {TOKENIZER_FILE}{reason}; {remedy}"
            )


def _ids_or_error(backend: Any, text: str) -> list[int] | str:
    try:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    # The library raises the bare Exception of Rust, at a text with an unknown token for example.
    except Exception as error:
        return str(error)
    return ids


def _begins_with(backend: Any, token: int | None) -> bool:
    """Whether the tokenizer puts a token before every text."""
    if token is None or isinstance(without := _ids_or_error(backend, "a"), str):
        return False
    return backend.encode("a").ids[:1] == [token] != without[:1]
