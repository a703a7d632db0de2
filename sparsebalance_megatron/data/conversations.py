# SPDX-License-Identifier: Apache-2.0
"""What becomes text of a conversation, and which characters of it are trained."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from sparsebalance_megatron.data.records import Message, Tools
from sparsebalance_megatron.errors import DataError

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""The tag of ``transformers`` around what an assistant generates."""


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


def render_plain(messages: Sequence[Message], open_assistant_turn: bool = False) -> str:
    """The template of tokenizers without one: a line ``role: content`` per turn."""
    turns = "".join(f"{message['role']}: {message['content'] or ''}\n" for message in messages)
    return turns + "assistant: " if open_assistant_turn else turns


class ConversationRenderer:
    """Renders conversations, with the definitions of the tools that they may call.

    This one renders plainly; ``notes`` say what a user may want otherwise.
    """

    notes: tuple[str, ...] = ()

    def document(self, messages: Sequence[Message], tools: Tools | None) -> RenderedDocument:
        """The text, and what of it is trained.

        Raises:
            RenderError: the template refuses the conversation, or leaves out tools or calls.
        """
        document = self.rendered(messages, tools)
        if tools:
            self._check_written("tools", document, messages, None)
        if any(message.get("tool_calls") for message in messages):
            silent = [{**message, "tool_calls": None} for message in messages]
            self._check_written("tool_calls", document, silent, tools)
        return document

    def text(
        self, messages: Sequence[Message], tools: Tools | None, *, open_assistant_turn: bool = False
    ) -> str:
        """The conversation, and the opening of an assistant's turn at its end if asked for."""
        return render_plain(messages, open_assistant_turn)

    def rendered(self, messages: Sequence[Message], tools: Tools | None) -> RenderedDocument:
        """Render, and find the assistant's turns by rendering the conversation up to each of them.

        Raises:
            RenderError: a shorter conversation is not the beginning of a longer one, as in
                templates that rewrite earlier turns.
        """
        text = self.text(messages, tools)
        spans = []
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.text(messages[:position], tools, open_assistant_turn=True)
            through = self.text(messages[: position + 1], tools)
            if not (text.startswith(through) and through.startswith(before)):
                if self.text(messages, tools) != text:
                    raise RenderError("it writes another text each time, such as seconds")
                raise RenderError(
                    f"it does not render turn {position + 1} as a suffix; mark what is generated "
                    "in it with {% generation %}"
                )
            spans.append((len(before), len(through)))
        return _conversation(text, spans, messages)

    def _check_written(
        self, key: str, document: RenderedDocument, rest: Sequence[Message], tools: Tools | None
    ) -> None:
        try:
            written = self.rendered(rest, tools).text != document.text
        except RenderError:
            written = True
        if not written:
            raise RenderError(f"it does not write {key}; use a tokenizer whose chat template does")


def _conversation(
    text: str, spans: Sequence[tuple[int, int]], messages: Sequence[Message]
) -> RenderedDocument:
    return RenderedDocument(
        text=text, trained_spans=tuple(spans), ends_trained=messages[-1]["role"] == "assistant"
    )


class TemplateRenderer(ConversationRenderer):
    """Renders with the chat template of a ``transformers`` tokenizer, which takes the arguments.

    Raises:
        DataError: the template is no text, or an argument has a name that is taken.
    """

    def __init__(self, loaded: Any, arguments: Mapping[str, Any]) -> None:
        # Templates need it; where it is missing, the error names the extra that brings it.
        import jinja2  # noqa: F401

        template = loaded.chat_template
        if isinstance(template, dict):
            template = template.get("default", "")
        if not isinstance(template, str):
            raise DataError(f"chat_template is {type(template).__name__}, not text")
        taken = {"messages", *inspect.signature(loaded.apply_chat_template).parameters}
        if taken := taken & arguments.keys():
            raise DataError(f"--chat-template-kwargs: {min(taken)} is set for every conversation")
        self._loaded, self._template, self._arguments = loaded, template, arguments
        self._is_marked = _GENERATION.search(template) is not None
        self.notes = tuple(self._notes())

    def text(
        self, messages: Sequence[Message], tools: Tools | None, *, open_assistant_turn: bool = False
    ) -> str:
        if not messages:
            raise RenderError(
                "it begins with the assistant's turn; begin with a user or system turn"
            )
        return self._applied(
            messages, tools=tools, add_generation_prompt=open_assistant_turn, **self._arguments
        )

    def _applied(self, messages: Sequence[Message], **arguments: Any) -> str:
        with _refusals():
            text: str = self._loaded.apply_chat_template(
                list(messages), tokenize=False, **arguments
            )
        return text

    def rendered(self, messages: Sequence[Message], tools: Tools | None) -> RenderedDocument:
        if not self._is_marked:
            return super().rendered(messages, tools)
        from transformers.utils.chat_template_utils import render_jinja_template

        with _refusals():
            (text,), (spans,) = render_jinja_template(
                [list(messages)],
                tools=tools,
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **{**self._loaded.special_tokens_map, **self._arguments},
            )
        return _conversation(text, spans, messages)

    def _notes(self) -> Iterator[str]:
        if not self._is_marked:
            with suppress(RenderError):
                yield from self._notes_of_openings()
        if "strftime_now" in self._template:
            yield (
                "the chat template may write the time (strftime_now), and other days give other "
                "tokens; where it takes a date instead, such as date_string, give it with "
                "--chat-template-kwargs"
            )

    def _notes_of_openings(self) -> Iterator[str]:
        """What is trained at the beginning of turns, beside the answer."""
        question: list[Message] = [{"role": "user", "content": "?"}]
        opened = self.text(question, None, open_assistant_turn=True)
        if opened == self.text(question, None):
            yield (
                "the chat template ignores add_generation_prompt, so the openings of the "
                "assistant's turns are trained too; mark what is generated with {% generation %}"
            )
        not_thinking = {"add_generation_prompt": True, "enable_thinking": False, **self._arguments}
        if opened != self._applied(question, tools=None, **not_thinking):
            yield (
                "the chat template knows enable_thinking; an empty think block that it writes "
                "before an answer is trained, unless --chat-template-kwargs "
                """'{"enable_thinking": false}' makes it part of the opening"""
            )


@contextmanager
def _refusals() -> Iterator[None]:
    """A template is a program, which may raise anything."""
    try:
        yield
    except Exception as error:
        raise RenderError(f"it refuses the conversation: {error}") from error
