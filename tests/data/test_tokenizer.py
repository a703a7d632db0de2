# SPDX-License-Identifier: Apache-2.0
"""Which characters, and which tokens, of a conversation are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import data as oracle

from sparsebalance_megatron.data.records import Message
from sparsebalance_megatron.data.tokenizer import (
    RenderError,
    render_conversation,
    render_plain,
    trained_tokens,
)

words = st.text(alphabet="ab \n", min_size=1, max_size=5)
turns = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), words), min_size=1)


def messages_of(pairs: Sequence[tuple[str, str]]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in pairs]


@given(pairs=turns)
def test_plain_template_trains_what_assistants_say(pairs: list[tuple[str, str]]) -> None:
    document = render_conversation(messages_of(pairs), render_plain)
    assert document.text == "".join(f"{role}: {content}\n" for role, content in pairs)
    assert document.trained_spans is not None
    trained = [document.text[start:end] for start, end in document.trained_spans]
    assert trained == [f"{content}\n" for role, content in pairs if role == "assistant"]
    assert document.ends_trained == (pairs[-1][0] == "assistant")


def test_template_that_rewrites_earlier_turns_is_refused() -> None:
    def only_the_last_turn(messages: Sequence[Message], open_assistant_turn: bool) -> str:
        return render_plain(messages[-1:], open_assistant_turn)

    conversation = messages_of([("user", "a"), ("assistant", "b"), ("user", "c")])
    with pytest.raises(RenderError, match="turn 2"):
        render_conversation(conversation, only_the_last_turn)


def test_template_whose_prompt_is_not_what_a_turn_begins_with_is_refused() -> None:
    """Where the assistant's words begin cannot be told."""

    def another_prompt(messages: Sequence[Message], open_assistant_turn: bool) -> str:
        return render_plain(messages, False) + ("Now you: " if open_assistant_turn else "")

    with pytest.raises(RenderError, match="turn 2"):
        render_conversation(messages_of([("user", "a"), ("assistant", "b")]), another_prompt)


@given(
    token_lengths=st.lists(st.integers(0, 4), max_size=12),
    boundaries=st.lists(st.integers(0, 30), max_size=4, unique=True).map(sorted),
)
def test_token_is_trained_if_its_last_character_is(
    token_lengths: list[int], boundaries: list[int]
) -> None:
    token_ends = list(accumulate(token_lengths))
    spans = list(zip(boundaries[::2], boundaries[1::2], strict=False))
    mask = trained_tokens(token_ends, spans)
    assert mask.tolist() == oracle.trained_tokens(token_ends, spans)
