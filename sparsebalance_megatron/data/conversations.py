# SPDX-License-Identifier: Apache-2.0
"""What becomes text of a conversation, and which characters of it are trained."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from sparsebalance_megatron.data.records import Message, Tools, is_trained
from sparsebalance_megatron.errors import DataError

_PLAIN = (
    "{% for turn in messages %}{{ turn.role }}: {{ turn.content or '' }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""The template of tokenizers without one."""

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""What begins and ends a tag's text where it is marked: codes that are no characters."""
_MARK_MACRO = f"{{% macro _marked() %}}{_OPEN}{{{{ caller() }}}}{_CLOSE}{{% endmacro %}}\n"
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
"""The tags of ``transformers`` around what an assistant generates."""

_REASONING = ("reasoning_content", "reasoning", "thinking")
_THINK_TAG = re.compile(r"</?think(?:ing)?>")


class RenderError(ValueError):
    """A chat template cannot render a conversation, or not turn by turn."""


@dataclass(frozen=True, kw_only=True)
class RenderedDocument:
    """Text of a document, as the model sees it, without an end-of-document token.

    ``trained_spans`` are (start, end) characters that are trained on; None for all. Of a
    conversation these are what a chat template marks with ``{% generation %}``; of a template
    without the tag, the assistant's turns: their opening (the role) is given and not trained, what
    closes them is trained. ``ends_trained``: an end-of-document token is trained too.
    ``unwritten_reasoning`` counts turns whose reasoning the template leaves out.
    """

    text: str
    trained_spans: tuple[tuple[int, int], ...] | None = None
    ends_trained: bool = True
    unwritten_reasoning: int = 0


class ConversationRenderer:
    """Renders conversations, with the definitions of the tools that they may call, by the chat
    template of a ``transformers`` tokenizer, which takes the arguments; plainly where it has none.

    ``notes`` say what a user may want otherwise.

    Raises:
        DataError: the template is no text, or an argument has a name that is taken.
    """

    def __init__(self, loaded: Any, arguments: Mapping[str, Any]) -> None:
        # Templates need it; where it is missing, the error names the extra that brings it.
        import jinja2  # noqa: F401

        taken = {"messages", *inspect.signature(loaded.apply_chat_template).parameters}
        if taken := taken & arguments.keys():
            raise DataError(f"--chat-template-kwargs: {min(taken)} is set for every conversation")
        self._loaded, self._arguments = loaded, dict(arguments)
        template = loaded.chat_template
        if isinstance(template, dict):
            template = template.get("default", "")
        if not loaded.chat_template:
            template = self._arguments["chat_template"] = _PLAIN
        if not isinstance(template, str):
            raise DataError(f"chat_template is {type(template).__name__}, not text")
        self._template = template
        self._is_marked = _GENERATION.search(template) is not None
        self._marking_template = _MARK_MACRO + _GENERATION.sub(
            lambda word: f"{word[1]}{'endcall' if word[2] else 'call _marked()'}{word[3]}", template
        )
        self.notes = tuple(self._notes())

    def document(self, messages: Sequence[Message], tools: Tools | None) -> RenderedDocument:
        """The text, and what of it is trained.

        Raises:
            RenderError: the template refuses the conversation, or leaves out tools, calls, a turn's
                content, or all reasoning; or which text is trained is not known.
        """
        try:
            find = self._marked_turns if self._is_marked else self._turns
            text, spans = find(messages, tools)
        except RenderError:
            if self._text(messages, tools) != self._text(messages, tools):
                raise RenderError("it writes another text each time, such as seconds") from None
            raise
        unwritten = ""
        if tools and not self._differs(text, messages, None):
            unwritten = "tools"
        elif any(message.get("tool_calls") for message in messages):
            silent = [{**message, "tool_calls": None} for message in messages]
            unwritten = "" if self._differs(text, silent, tools) else "tool_calls"
        if unwritten:
            raise RenderError(
                f"it does not write {unwritten}; use a tokenizer whose chat template does"
            )
        return RenderedDocument(
            text=text,
            trained_spans=tuple(spans),
            ends_trained=is_trained(messages[-1]),
            unwritten_reasoning=self._unwritten_reasoning(text, messages, tools),
        )

    def _text(
        self, messages: Sequence[Message], tools: Tools | None, *, open_assistant_turn: bool = False
    ) -> str:
        """The conversation, and the opening of an assistant's turn at its end if asked for."""
        opening = {"add_generation_prompt": open_assistant_turn}
        return self._applied(messages, **self._arguments, **opening, tools=tools)

    def _applied(self, messages: Sequence[Message], **arguments: Any) -> str:
        try:
            # As a batch of one, a conversation may have no turn.
            (text,) = self._loaded.apply_chat_template(
                [list(messages)], tokenize=False, **arguments
            )
        # A template is a program, which may raise anything.
        except Exception as error:
            raise RenderError(f"it refuses the conversation: {error}") from error
        return str(text)

    def _differs(self, text: str, messages: Sequence[Message], tools: Tools | None) -> bool:
        """Whether a conversation is rendered as another text, or refused."""
        try:
            return self._text(messages, tools) != text
        except RenderError:
            return True

    def _turns(
        self, messages: Sequence[Message], tools: Tools | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and where in it the assistant's turns are, each found by rendering the
        conversation up to it.

        Raises:
            RenderError: a shorter conversation is not the beginning of a longer one, as in
                templates that rewrite earlier turns.
        """
        text = self._text(messages, tools)
        spans = []
        for position, message in enumerate(messages):
            if not is_trained(message):
                continue
            if position == 0 and self._template != _PLAIN:
                raise RenderError(
                    "it begins with the assistant's turn; begin with a user or system turn"
                )
            before = self._text(messages[:position], tools, open_assistant_turn=True)
            through = self._text(messages[: position + 1], tools)
            if not (text.startswith(through) and through.startswith(before)):
                raise RenderError(
                    f"it does not render turn {position + 1} as a suffix; mark what is generated "
                    "in it with {% generation %}"
                )
            spans.append((len(before), len(through)))
        return text, spans

    def _marked_turns(
        self, messages: Sequence[Message], tools: Tools | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and where in it what is generated in turns that are learnt is."""
        text, spans = self._marked(messages, tools)
        trained = [*spans]
        for position, message in enumerate(messages):
            if message["role"] == "assistant" and not is_trained(message):
                _, through = self._marked(messages[: position + 1], tools)
                earlier = messages[:position]
                is_first = all(each["role"] != "assistant" for each in earlier)
                before = [] if is_first else self._marked(earlier, tools)[1]
                if through != spans[: len(through)] or before != through[: len(before)]:
                    raise RenderError(
                        f"it writes turn {position + 1}, which is not to be learnt, otherwise "
                        "where others follow, so that it is not found; leave out the record"
                    )
                trained = [each for each in trained if each not in through[len(before) :]]
        return text, trained

    def _marked(
        self, messages: Sequence[Message], tools: Tools | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and where in it the text of ``{% generation %}`` is.

        ``transformers`` itself counts from where a macro or a block that holds the tag begins.
        """
        text = self._text(messages, tools)
        marking = self._arguments | {"chat_template": self._marking_template}
        marked = self._applied(messages, tools=tools, **marking)
        # Every other part was generated.
        parts = re.split(f"{_OPEN}(.*?){_CLOSE}", marked, flags=re.DOTALL)
        if "".join(parts) != text:
            raise RenderError(
                "it changes what {% generation %} marks, so that what is trained is not known; "
                "print it as it is"
            )
        ends = [*accumulate(map(len, parts))]
        return text, list(zip(ends[::2], ends[1::2], strict=False))

    def _unwritten_reasoning(
        self, text: str, messages: Sequence[Message], tools: Tools | None
    ) -> int:
        """Turns whose reasoning is not in the text, while that of others is."""
        pieces = [
            (turn, *piece)
            for turn, message in enumerate(messages)
            for piece in _pieces(message)
            if piece[1].strip()
        ]
        if _stand_in_order((said for _, _, said, _ in pieces), text):
            return 0
        # Templates may write turns in another order, or quote them.
        silent = set()
        for turn, is_reasoning, _, changed in pieces:
            if self._differs(text, [*messages[:turn], changed, *messages[turn + 1 :]], tools):
                continue
            if not is_reasoning:
                raise RenderError(
                    f"it does not write the content of turn {turn + 1} "
                    f"({messages[turn]['role']}); use a chat template that does"
                )
            silent.add(turn)
        if silent and silent == {turn for turn, is_reasoning, *_ in pieces if is_reasoning}:
            raise RenderError(
                f"it does not write the reasoning of turn {min(silent) + 1}, nor any other; use a "
                "chat template that does, or remove it"
            )
        return len(silent)

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
        opened = self._text(question, None, open_assistant_turn=True)
        if opened == self._text(question, None):
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


def _pieces(message: Message) -> Iterator[tuple[bool, str, Message]]:
    """The reasoning of a turn, and its content, cut at tags around reasoning: whether it is
    reasoning, its text, and the turn with a longer one."""
    content, is_assistant = message["content"] or "", message["role"] == "assistant"
    given = {key: message[key] for key in _REASONING if isinstance(message.get(key), str)}
    for text in dict.fromkeys(given.values()) if is_assistant else ():
        yield True, text, message | {key: f"{text}x" for key in given if given[key] == text}
    tags = _THINK_TAG.finditer(content) if is_assistant else ()
    bounds = [0, *(place for tag in tags for place in tag.span()), len(content)]
    for start, end in zip(bounds[::2], bounds[1::2], strict=True):
        changed = {**message, "content": f"{content[:end]}x{content[end:]}"}
        yield end < len(content), content[start:end], changed


def _stand_in_order(parts: Iterable[str], text: str) -> bool:
    """Whether a text holds all parts one after the other, whitespace aside."""
    compact, place = "".join(text.split()), 0
    for part in parts:
        wanted = "".join(part.split())
        if (found := compact.find(wanted, place)) < 0:
            return False
        place = found + len(wanted)
    return True
