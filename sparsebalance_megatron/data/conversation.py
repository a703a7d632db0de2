# SPDX-License-Identifier: Apache-2.0
"""Conversations as text, and which part of that text is trained on: the assistant's turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.data.records import Message

Render = Callable[[Sequence[Message], bool], str]
"""Text of a conversation; the flag asks for the opening of an assistant's turn at its end."""


class RenderError(ValueError):
    """A chat template cannot render a conversation, or not turn by turn."""


@dataclass(frozen=True, kw_only=True)
class RenderedDocument:
    """Text of a document, as the model sees it, without an end-of-document token.

    Attributes:
        text: all of it.
        trained_spans: (start, end) characters that are trained on; None for all of them. Of a
            conversation these are the assistant's turns: their opening (the role) is given and not
            trained, what closes them is trained.
        ends_trained: whether an end-of-document token is trained too.
    """

    text: str
    trained_spans: tuple[tuple[int, int], ...] | None = None
    ends_trained: bool = True


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
        text=text,
        trained_spans=tuple(spans),
        ends_trained=messages[-1]["role"] == "assistant",
    )


def trained_tokens(token_ends: Sequence[int], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Which tokens are trained, uint8: those whose last character lies in a span.

    A token that begins before the assistant's turn and ends in it is the model's to predict.

    Args:
        token_ends: end of each token in characters of the text, ascending.
        spans: (start, end) characters.
    """
    ends = np.asarray(token_ends, dtype=np.int64)
    mask = np.zeros(len(ends), dtype=np.uint8)
    for start, end in spans:
        mask[(start < ends) & (ends <= end)] = 1
    return mask
