# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of data preparation, and what becomes text and what is trained of conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsebalance_megatron.data.records import Message
from sparsebalance_megatron.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding

END_OF_TEXT = "<|endoftext|>"

_SMALLEST_VOCABULARY = 257
"""The 256 bytes and the end-of-text token."""
_LARGEST_VOCABULARY = 1_000_000
"""Several times that of any model; the trainer allocates by it."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""The tag of ``transformers`` around what an assistant generates."""


Render = Callable[[Sequence[Message], bool], str]
"""Text of a conversation; the flag asks for the opening of an assistant's turn at its end."""


class RenderError(ValueError):
    """A chat template cannot render a conversation, or not turn by turn."""


@dataclass(frozen=True, kw_only=True)
class RenderedDocument:
    """Text of a document, as the model sees it, without an end-of-document token.

    ``trained_spans`` are (start, end) characters that are trained on; None for all. Of a
    conversation these are what a chat template marks with ``{% generation %}``; of a template
    without the tag, the assistant's turns: their opening (the role) is given and not trained, what
    closes them is trained. ``ends_trained``: an end-of-document token is trained too.
    """

    text: str
    trained_spans: tuple[tuple[int, int], ...] | None = None
    ends_trained: bool = True


ConversationRenderer = Callable[[Sequence[Message]], RenderedDocument]


def render_plain(messages: Sequence[Message], open_assistant_turn: bool) -> str:
    """The template of tokenizers without one: a line ``role: content`` per turn."""
    turns = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    return turns + "assistant: " if open_assistant_turn else turns


def render_conversation(messages: Sequence[Message], render: Render) -> RenderedDocument:
    """Render, and find the assistant's turns by rendering the conversation up to each of them.

    Raises:
        RenderError: if a shorter conversation is not the beginning of a longer one (templates that
            rewrite earlier turns), or the template refuses the messages.
    """
    text = render(messages, False)
    spans = []
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:position], True)
        through = render(messages[: position + 1], False)
        if not (text.startswith(through) and through.startswith(before)):
            raise RenderError(f"the chat template does not render turn {position + 1} as a suffix")
        spans.append((len(before), len(through)))
    return RenderedDocument(
        text=text, trained_spans=tuple(spans), ends_trained=messages[-1]["role"] == "assistant"
    )


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
    ``render`` says how conversations become text. ``openings_trained``: the chat template cannot
    say where an assistant's turn is opened, so openings are trained.
    """

    name: str
    backend: Any
    vocab_size: int
    eod: int | None
    render: ConversationRenderer
    openings_trained: bool = False

    def encode(self, texts: Sequence[str], *, with_offsets: bool) -> list[Encoding]:
        """Token ids per text, with character offsets if asked for; no special tokens are added."""
        encode = self.backend.encode_batch if with_offsets else self.backend.encode_batch_fast
        return encode(list(texts), add_special_tokens=False)


def train_bpe(texts: Iterable[str], vocab_size: int, name: str) -> DocumentTokenizer:
    """Train a byte-level BPE; it encodes any text without an unknown token."""
    if vocab_size > _LARGEST_VOCABULARY:
        raise DataError(
            f"--tokenizer-train {vocab_size}: at most {_LARGEST_VOCABULARY} tokens; models have "
            "about 150000"
        )
    if vocab_size < _SMALLEST_VOCABULARY:
        raise DataError(
            f"--tokenizer-train {vocab_size}: at least {_SMALLEST_VOCABULARY} tokens are needed "
            "(256 bytes and the end of text)"
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return DocumentTokenizer(
        name=name,
        backend=backend,
        vocab_size=backend.get_vocab_size(),
        eod=backend.token_to_id(END_OF_TEXT),
        render=partial(render_conversation, render=render_plain),
    )


def transformers_files(tokenizer: DocumentTokenizer) -> dict[str, str]:
    """Contents by name of the files that ``AutoTokenizer`` reads; for trained tokenizers."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    return {
        "tokenizer.json": tokenizer.backend.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }


def load_tokenizer(name: str) -> DocumentTokenizer:
    """Load a HuggingFace tokenizer from a directory, or by its name on the model hub."""
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
            "tokenizer_config.json, or train one with --tokenizer-train"
        ) from error
    if not loaded.is_fast:
        raise DataError(
            f"--tokenizer {name}: no tokenizer.json; convert it to a fast tokenizer first"
        )
    backend = loaded.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    openings_trained = False
    render: ConversationRenderer = partial(render_conversation, render=render_plain)
    if template := loaded.chat_template:
        if isinstance(template, dict):
            template = template.get("default", "")
        turns = _template_renderer(loaded)
        if _GENERATION.search(template):
            render = _marked_renderer(template, loaded)
        else:
            render = partial(render_conversation, render=turns)
            openings_trained = _opens_no_turn(turns)
    return DocumentTokenizer(
        name=name,
        backend=backend,
        vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values()),
        eod=loaded.eos_token_id,
        render=render,
        openings_trained=openings_trained,
    )


def _template_renderer(loaded: Any) -> Render:
    # Templates need it; where it is missing, the error names the extra that brings it.
    import jinja2  # noqa: F401

    def render(messages: Sequence[Message], open_assistant_turn: bool) -> str:
        if not messages:
            raise RenderError(
                "it begins with the assistant's turn; begin with a user or system turn"
            )
        with _refusals():
            return loaded.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=open_assistant_turn
            )

    return render


def _marked_renderer(template: str, loaded: Any) -> ConversationRenderer:
    """Renders with a template that marks what the assistant generates."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: Sequence[Message]) -> RenderedDocument:
        with _refusals():
            (text,), (spans,) = render_jinja_template(
                [list(messages)],
                chat_template=template,
                return_assistant_tokens_mask=True,
                **loaded.special_tokens_map,
            )
        ends_trained = messages[-1]["role"] == "assistant"
        return RenderedDocument(text=text, trained_spans=tuple(spans), ends_trained=ends_trained)

    return render


@contextmanager
def _refusals() -> Iterator[None]:
    """A template is a program, which may raise anything."""
    try:
        yield
    except Exception as error:
        raise RenderError(f"the chat template refuses it: {error}") from error


def _opens_no_turn(render: Render) -> bool:
    """Whether a chat template ignores ``add_generation_prompt``."""
    question: list[Message] = [{"role": "user", "content": "?"}]
    try:
        return render(question, True) == render(question, False)
    except RenderError:
        return False
