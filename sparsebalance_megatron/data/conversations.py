# SPDX-License-Identifier: Apache-2.0
"""What becomes text of a conversation, and which characters of it are trained."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from sparsebalance_megatron.data.records import Message, Tools
from sparsebalance_megatron.errors import DataError

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""The tag of ``transformers`` around what an assistant generates."""
_THINKING = {"enable_thinking": False}

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


RenderConversation = Callable[[Sequence[Message], Tools | None], RenderedDocument]


@dataclass(frozen=True, kw_only=True)
class ConversationRenderer:
    """Renders conversations, with the definitions of the tools that they may call.

    ``notes`` say what a user may want otherwise.
    """

    render: RenderConversation
    notes: tuple[str, ...] = ()

    def __call__(self, messages: Sequence[Message], tools: Tools | None) -> RenderedDocument:
        """The text, and what of it is trained.

        Raises:
            RenderError: the template refuses the conversation, or leaves out tools or calls.
        """
        document = self.render(messages, tools)
        if tools:
            self._check_written("tools", document, messages, None)
        if any(message.get("tool_calls") for message in messages):
            silent = [{**message, "tool_calls": None} for message in messages]
            self._check_written("tool_calls", document, silent, tools)
        return document

    def _check_written(
        self, key: str, document: RenderedDocument, rest: Sequence[Message], tools: Tools | None
    ) -> None:
        try:
            written = self.render(rest, tools).text != document.text
        except RenderError:
            written = True
        if not written:
            raise RenderError(f"it does not write {key}; use a tokenizer whose chat template does")


def render_plain(messages: Sequence[Message], open_assistant_turn: bool) -> str:
    """The template of tokenizers without one: a line ``role: content`` per turn."""
    turns = "".join(f"{message['role']}: {message['content'] or ''}\n" for message in messages)
    return turns + "assistant: " if open_assistant_turn else turns


PLAIN = ConversationRenderer(
    render=lambda messages, tools: render_conversation(messages, render_plain)
)


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
            if render(messages, False) != text:
                raise RenderError("it writes another text each time, such as seconds")
            raise RenderError(
                f"it does not render turn {position + 1} as a suffix; mark what is generated in it "
                "with {% generation %}"
            )
        spans.append((len(before), len(through)))
    return RenderedDocument(
        text=text, trained_spans=tuple(spans), ends_trained=messages[-1]["role"] == "assistant"
    )


def template_renderer(loaded: Any, arguments: Mapping[str, Any]) -> ConversationRenderer:
    """Renders with the chat template of a ``transformers`` tokenizer.

    Args:
        arguments: for the template, by name.

    Raises:
        DataError: the template is no text, or an argument has a name that is taken.
    """
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
    turns = _turn_renderer(loaded, arguments)
    notes: list[str] = []
    if _GENERATION.search(template):
        render = _marked_renderer(template, loaded, arguments)
    else:

        def render(messages: Sequence[Message], tools: Tools | None) -> RenderedDocument:
            return render_conversation(messages, partial(turns, tools))

        notes += _notes_of_openings(turns, _turn_renderer(loaded, {**_THINKING, **arguments}))
    if "strftime_now" in template:
        notes.append(
            "the chat template may write the time (strftime_now), and other days give other tokens;"
            " where it takes a date instead, such as date_string, give it with "
            "--chat-template-kwargs"
        )
    return ConversationRenderer(render=render, notes=tuple(notes))


TurnRenderer = Callable[[Tools | None, Sequence[Message], bool], str]


def _turn_renderer(loaded: Any, arguments: Mapping[str, Any]) -> TurnRenderer:
    def render(tools: Tools | None, messages: Sequence[Message], open_assistant_turn: bool) -> str:
        if not messages:
            raise RenderError(
                "it begins with the assistant's turn; begin with a user or system turn"
            )
        with _refusals():
            text: str = loaded.apply_chat_template(
                list(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=open_assistant_turn,
                **arguments,
            )
        return text

    return render


def _marked_renderer(
    template: str, loaded: Any, arguments: Mapping[str, Any]
) -> RenderConversation:
    """Renders with a template that marks what the assistant generates."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: Sequence[Message], tools: Tools | None) -> RenderedDocument:
        with _refusals():
            (text,), (spans,) = render_jinja_template(
                [list(messages)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **{**loaded.special_tokens_map, **arguments},
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
        raise RenderError(f"it refuses the conversation: {error}") from error


def _notes_of_openings(turns: TurnRenderer, not_thinking: TurnRenderer) -> Iterator[str]:
    """What a template without the tag trains at the beginning of turns, beside the answer."""
    question: list[Message] = [{"role": "user", "content": "?"}]
    try:
        opened = turns(None, question, True)
        if opened == turns(None, question, False):
            yield (
                "the chat template ignores add_generation_prompt, so the openings of the "
                "assistant's turns are trained too; mark what is generated with {% generation %}"
            )
        if opened != not_thinking(None, question, True):
            yield (
                "the chat template knows enable_thinking; an empty think block that it writes "
                "before an answer is trained, unless --chat-template-kwargs "
                """'{"enable_thinking": false}' makes it part of the opening"""
            )
    except RenderError:
        return
