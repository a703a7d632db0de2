# SPDX-License-Identifier: Apache-2.0
"""Records to a data set in Megatron's format, and the tokenizers that it takes."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsebalance_megatron.data.conversations import ConversationRenderer, RenderedDocument
from sparsebalance_megatron.data.documents import DatasetWriter, check_output
from sparsebalance_megatron.data.records import (
    BadRecords,
    Record,
    RecordFiles,
    check_encodable,
    is_trained,
)
from sparsebalance_megatron.errors import DataError, listed

if TYPE_CHECKING:
    from tokenizers import Encoding

_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 4_000_000
"""Limits of one encoding batch; bounds the memory that token offsets take."""

_NOTHING_LEARNT = (
    "the chat template's {% generation %} marks nothing in them, or no turn is to be learnt"
)
_COUNTED = ("loss_tokens", "untrained_documents", "untrained_tokens")
_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
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


def prepare(
    source: RecordFiles,
    prefix: str,
    *,
    tokenizer_name: str,
    append_eod: bool = True,
    prepend_bos: bool = False,
    template_arguments: Mapping[str, Any] | None = None,
    skip_bad_records: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Tokenise all documents of a source and write the data set; its summary.

    Texts, not conversations, begin with the tokenizer's token for that if ``prepend_bos``.

    Raises:
        DataError: an input, the tokenizer or the prefix cannot be used; nothing is left behind.
        OSError: a file cannot be written; nothing is left behind.
    """
    check_output(prefix, overwrite=overwrite, inputs=source.paths)
    tokenizer = DocumentTokenizer(tokenizer_name, template_arguments)
    if append_eod and tokenizer.eod is None:
        raise DataError(
            f"--tokenizer {tokenizer.name}: it has no end-of-sequence token; pass --no-append-eod"
        )
    if prepend_bos and tokenizer.bos is None:
        raise DataError(
            f"--prepend-bos: the tokenizer {tokenizer.name} begins no text with a token"
        )
    bad = BadRecords(skip=skip_bad_records)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    with DatasetWriter(prefix, vocab_size=tokenizer.vocab_size) as writer:
        counts: Counter[str] = Counter()
        eod, bos = tokenizer.eod if append_eod else None, tokenizer.bos if prepend_bos else None
        documents = _rendered(source, tokenizer.conversations, bad)
        for tokens, mask in _encoded(documents, tokenizer, eod, bos, bad, counts):
            writer.add(tokens, mask)
            trained = int(mask.sum())
            counts["loss_tokens"] += trained
            if not trained:
                counts["untrained_documents"] += 1
                counts["untrained_tokens"] += len(tokens)
        place, lengths_tokens = listed(map(str, source.paths)), np.asarray(writer.lengths_tokens)
        if not len(lengths_tokens):
            raise DataError(
                f"{place}: no document to write; records left out: {counts_text(bad.counts)}"
            )
        if not counts["loss_tokens"]:
            raise DataError(
                f"{place}: none of {len(lengths_tokens):,} documents has a token that is trained; "
                + _NOTHING_LEARNT
            )
        summary = {
            "documents": len(lengths_tokens),
            "tokens": int(lengths_tokens.sum()),
            **{name: counts[name] for name in _COUNTED},
            "loss_mask": writer.any_masked,
            "document_tokens": {
                name: int(np.percentile(lengths_tokens, rank, method="nearest"))
                for name, rank in _PERCENTILES.items()
            },
            "skipped": dict(sorted(bad.counts.items())),
            "tokenizer": {"path": tokenizer.name, "vocab_size": tokenizer.vocab_size},
            "append_eod": append_eod,
            "prepend_bos": prepend_bos,
            "chat_template_kwargs": dict(template_arguments or {}),
            "notes": _notes(counts, bad.unread, tokenizer, prepend_bos=prepend_bos),
        }
        writer.commit(json.dumps(summary, indent=2) + "\n")
    return summary


_Rendered = tuple[Record, RenderedDocument]


def _rendered(
    source: RecordFiles, conversations: ConversationRenderer, bad: BadRecords
) -> Iterator[_Rendered]:
    from tqdm import tqdm

    bar_of = {"desc": "tokenise", "unit": "B", "unit_scale": True, "disable": None}
    with tqdm(total=source.total_bytes, **bar_of) as bar:
        for record in source.records(bad):
            if record.messages is None:
                yield record, RenderedDocument(text=record.text or "")
            else:
                try:
                    document = conversations.document(record.messages, record.tools)
                    check_encodable(document.text)
                except ValueError as error:
                    reason = "the chat template cannot render it"
                    bad.found(record.place, reason, f"{reason}: {error}")
                else:
                    yield record, document
            bar.update(record.size_bytes)


def _batches(documents: Iterable[_Rendered]) -> Iterator[list[_Rendered]]:
    """Consecutive documents, bounded in number and characters."""
    batch: list[_Rendered] = []
    characters = 0
    for record, document in documents:
        batch.append((record, document))
        characters += len(document.text)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encoded(
    documents: Iterable[_Rendered],
    tokenizer: "DocumentTokenizer",
    eod: int | None,
    bos: int | None,
    bad: BadRecords,
    counts: Counter[str],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Token ids (int64), with ``eod`` at the end and ``bos`` before texts, and loss mask (uint8) of
    every document."""
    end_text = None if eod is None else tokenizer.backend.id_to_token(eod)
    for batch in _batches(documents):
        encodings = tokenizer.encode(
            [document.text for _, document in batch],
            with_offsets=any(document.trained_spans is not None for _, document in batch),
        )
        for (record, document), encoding in zip(batch, encodings, strict=True):
            tokens = np.asarray(encoding.ids, dtype=np.int64)
            if not len(tokens):
                bad.found(record.place, "no tokens", "the tokenizer drops all of its text")
                continue
            if document.trained_spans is None:
                mask = np.ones(len(tokens), dtype=np.uint8)
            else:
                token_ends = [end for _, end in encoding.offsets]
                mask = trained_tokens(token_ends, document.trained_spans)
            ends_trained = document.ends_trained and mask.any()
            (places,) = np.nonzero(tokens == eod)
            if len(places) and document.text.rstrip().endswith(str(end_text)):
                counts["already_ended"] += 1
                mask[places[-1]] |= np.uint8(ends_trained)
            elif eod is not None:
                tokens = np.append(tokens, eod)
                mask = np.append(mask, np.uint8(ends_trained))
            is_text = record.messages is None
            counts["texts" if is_text else "conversations"] += 1
            counts["unwritten_reasoning"] += document.unwritten_reasoning
            turns = record.messages or ()
            counts["untrained_turns"] += sum(
                each["role"] == "assistant" and not is_trained(each) for each in turns
            )
            if is_text and bos is not None and tokens[0] != bos:
                tokens, mask = np.insert(tokens, 0, bos), np.insert(mask, 0, 1)
            yield tokens, mask


def _notes(
    counts: Counter[str], unread: Counter[str], tokenizer: "DocumentTokenizer", *, prepend_bos: bool
) -> list[str]:
    """What was decided for documents that another user would have otherwise."""
    notes = [*(tokenizer.conversations.notes if counts["conversations"] else ())]
    if ended := counts["already_ended"]:
        notes.append(f"{ended:,} documents end with the end-of-sequence token; none was added")
    if (texts := counts["texts"]) and tokenizer.bos is not None and not prepend_bos:
        token = tokenizer.backend.id_to_token(tokenizer.bos)
        notes.append(
            f"the tokenizer would begin {texts:,} texts with {token}; --prepend-bos does so here"
        )
    if turns := counts["untrained_turns"]:
        notes.append(f"{turns:,} turns of the assistant are marked as not to be learnt")
    if turns := counts["unwritten_reasoning"]:
        notes.append(f"the chat template leaves out the reasoning of {turns:,} turns")
    notes += [
        f"{key}, found {count:,} times, is not read; it may say what is to be learnt"
        for key, count in sorted(unread.items())
    ]
    if untrained := counts["untrained_documents"]:
        notes.append(
            f"{untrained:,} documents, {counts['untrained_tokens']:,} tokens, have no token that "
            f"is trained; {_NOTHING_LEARNT}"
        )
    return notes


def counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items())) or "none"


def trained_tokens(token_ends: Sequence[int], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Mask of trained tokens, uint8: those whose last character, by ``token_ends``, lies in a span.

    A token that begins before the assistant's turn and ends in it is trained.
    """
    ends = np.asarray(token_ends, dtype=np.int64)
    mask = np.zeros(len(ends), dtype=np.uint8)
    for start, end in spans:
        mask[(start < ends) & (ends <= end)] = 1
    return mask


class DocumentTokenizer:
    """A fast HuggingFace tokenizer, from a directory or by its name on the model hub.

    ``backend`` is a ``tokenizers.Tokenizer``, ``vocab_size`` one more than the largest token id;
    ``eod`` ends a document, and ``bos`` is what the tokenizer itself begins texts with.

    Raises:
        DataError: it is damaged, gives other tokens than its tokenizer.json, or its chat template
            is unusable.
    """

    def __init__(self, name: str, template_arguments: Mapping[str, Any] | None = None) -> None:
        loaded = _loaded(name)
        self.name = name
        self.backend = loaded.backend_tokenizer
        self.vocab_size = 1 + max(self.backend.get_vocab(with_added_tokens=True).values())
        self.eod: int | None = loaded.eos_token_id
        begins = _begins_with(self.backend, loaded.bos_token_id)
        self.bos: int | None = loaded.bos_token_id if begins else None
        if template_arguments and not loaded.chat_template:
            raise DataError(f"--chat-template-kwargs: the tokenizer {name} has no chat template")
        try:
            self.conversations = ConversationRenderer(loaded, template_arguments or {})
        except DataError as error:
            raise DataError(f"--tokenizer {name}: {error}") from error

    def encode(self, texts: Sequence[str], *, with_offsets: bool) -> "list[Encoding]":
        """Token ids per text, with character offsets if asked for; no special tokens are added."""
        encode = self.backend.encode_batch if with_offsets else self.backend.encode_batch_fast
        try:
            encodings: list[Encoding] = encode(list(texts), add_special_tokens=False)
        except Exception as error:
            raise DataError(
                f"--tokenizer {self.name}: it cannot encode a document ({error}); give one that "
                "encodes every text"
            ) from error
        return encodings


def _loaded(name: str) -> Any:
    """The tokenizer of ``transformers``, which neither cuts nor pads."""
    path = Path(name).expanduser()
    source = str(path) if path.is_dir() else name
    if not path.is_dir() and name.startswith(("/", "./", "../", "~")):
        raise DataError(f"--tokenizer {name}: no such directory")

    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    # The libraries raise whatever damaged files lead to: KeyError, or the bare Exception of Rust.
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        problem = "" if path.is_dir() else "not a directory, and not downloaded: "
        raise DataError(
            f"--tokenizer {name}: {problem}{reason}; give a directory with tokenizer.json and "
            "tokenizer_config.json, or train one with examples/train_tokenizer.py"
        ) from error
    if not getattr(loaded, "is_fast", False):
        raise DataError(
            f"--tokenizer {name}: no tokenizer.json; convert it to a fast tokenizer first"
        )
    loaded.backend_tokenizer.no_truncation()
    loaded.backend_tokenizer.no_padding()
    _check_encoding(name, loaded, source)
    return loaded


def _check_encoding(name: str, loaded: Any, source: str) -> None:
    """Raise unless ``transformers`` encodes as tokenizer.json of ``source`` says, if it has one.

    Some classes of ``transformers`` replace the file's pre-tokenizer or normaliser by their own.
    """
    from tokenizers import Tokenizer
    from transformers.utils import cached_file

    remedy = (
        "set tokenizer_class in tokenizer_config.json to the class that saved the file, or to "
        "PreTrainedTokenizerFast"
    )
    try:
        file = cached_file(source, TOKENIZER_FILE)
    except OSError:
        return
    reference = Tokenizer.from_file(file)
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
    if token is None or isinstance(without := _ids_or_error(backend, "a"), str):
        return False
    return backend.encode("a").ids[:1] == [token] != without[:1]
