# SPDX-License-Identifier: Apache-2.0
"""Documents that are read: text, key-value look-ups, needles in prose, spans that text repeats.

All follow from a seed.

Shape legend: T tokens that are read, X scored labels.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, count

from pretrained.texts import Encode, english_texts, filled, prose_texts, python_sources, shuffled

TEXT, KEY_VALUE, NEEDLE, COPY = "text", "key-value", "needle", "copy"
KINDS = (TEXT, KEY_VALUE, NEEDLE, COPY)
DIGITS = 5
_TAIL_TOKENS = 256
"""How many of a document ask after what they ask for; needles are fewer."""
_CALIBRATION_SEED = 1_000_003
_SPANS, _SPAN_TOKENS, _GAP_TOKENS, _UNSCORED_TOKENS = 6, 28, 14, 4
_NEEDLE_EVERY_TOKENS, _QUESTION_TOKENS, _TAIL_MULTIPLE = 170, 20, 64
_WORDS = """
    barrel beacon canyon cedar chapel cobalt comet coral crater cypress dagger ember falcon
    fjord gravel harbor hazel heron ivory jasmine kernel lagoon lantern magpie maple marble
    meadow mirror nectar onyx orchid otter pebble plaza prairie raven saffron spruce thunder
    walnut
"""
_FIRST_NAMES = """
    Amara Bjorn Clara Dmitri Esther Farid Greta Hassan Ingrid Jonas Kavita Leon Mei Noah
    Olga Pablo Quentin Rosa Samuel Tessa
"""
_LAST_NAMES = """
    Adler Bianchi Castro Dahl Eriksen Fischer Gupta Haddad Ito Jansen Keller Lund
"""


@dataclass(frozen=True, kw_only=True)
class Document:
    """Tokens, and which of them are scored.

    Attributes:
        kind: one of :data:`KINDS`.
        tokens: T + 1; the last is read by nobody.
        scored: X places whose next token is a label.
        answers: X numbers of the answer that a label is a digit of, or of the span that it is
            in; empty in text.
        tail: the place where questions begin, at the earliest.
    """

    kind: str
    number: int
    tokens: tuple[int, ...]
    scored: tuple[int, ...]
    answers: tuple[int, ...]
    tail: int

    @property
    def length(self) -> int:
        """T."""
        return len(self.tokens) - 1

    @property
    def group(self) -> str:
        """Documents that are averaged together."""
        return f"{self.kind} {self.length}"

    @property
    def name(self) -> str:
        return f"{self.group} {self.number}"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Documents of a kind and a length, and the blocks that they are cut into."""

    kind: str
    tokens: int
    block_size: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.tokens}"


def make_documents(
    kind: str, tokens: int, how_many: int, encode: Encode, *, seed: int, calibration: bool = False
) -> list[Document]:
    """Documents of a kind and a length.

    Args:
        calibration: others, for what is measured before documents are scored.
    """
    if kind == TEXT:
        return list(_texts(tokens, how_many, encode, seed, calibration))
    if kind == COPY:
        return list(_copies(tokens, how_many, encode, seed, calibration))
    seed += _CALIBRATION_SEED * calibration
    make = _key_values if kind == KEY_VALUE else _needles
    return [make(tokens, number, encode, seed) for number in range(how_many)]


def digest(documents: Sequence[Document]) -> str:
    """Short, and equal for equal tokens."""
    return sha256(repr([each.tokens for each in documents]).encode()).hexdigest()[:16]


def _texts(
    tokens: int, how_many: int, encode: Encode, seed: int, calibration: bool
) -> Iterator[Document]:
    """Code and English in turn. Every document is scored throughout."""
    code, english = (
        shuffled(texts, seed, backwards=calibration)
        for texts in (python_sources(), english_texts())
    )
    for number in range(how_many):
        yield Document(
            kind=TEXT,
            number=number,
            tokens=tuple(filled(english if number % 2 else code, encode, tokens + 1)),
            scored=tuple(range(tokens)),
            answers=(),
            tail=tokens - _TAIL_TOKENS,
        )


def _copies(
    tokens: int, how_many: int, encode: Encode, seed: int, calibration: bool
) -> Iterator[Document]:
    """Text whose last tokens repeat spans of it, with new text before each span.

    A span is scored but for its first tokens, which nothing announces.
    """
    repeated = _SPANS * _SPAN_TOKENS
    for text in _texts(tokens - repeated, how_many, encode, seed, calibration):
        draw = random.Random(f"{COPY} {seed} {calibration} {text.number}")
        tail = len(text.tokens) - _SPANS * _GAP_TOKENS
        found, news = list(text.tokens[:tail]), text.tokens[tail:]
        # From equal stretches, so that no two spans overlap.
        stretch = tail // _SPANS
        begins = [
            number * stretch + draw.randrange(stretch - _SPAN_TOKENS) for number in range(_SPANS)
        ]
        draw.shuffle(begins)
        scored: list[int] = []
        answers = []
        for span, begin in enumerate(begins):
            found += news[span * _GAP_TOKENS : (span + 1) * _GAP_TOKENS]
            found += found[begin : begin + _SPAN_TOKENS]
            labels = _SPAN_TOKENS - _UNSCORED_TOKENS
            scored += range(len(found) - 1 - labels, len(found) - 1)
            answers += [span] * labels
        yield Document(
            kind=COPY,
            number=text.number,
            tokens=tuple(found),
            scored=tuple(scored),
            answers=tuple(answers),
            tail=tail,
        )


def _key_values(tokens: int, number: int, encode: Encode, seed: int) -> Document:
    """Lines ``word-word: 12345``, then some of them again in another order."""
    draw = random.Random(f"{KEY_VALUE} {seed} {number}")
    words = _WORDS.split()
    keys = [f"{one}-{other}" for one in words for other in words if one != other]
    draw.shuffle(keys)
    context, questions, tail = encode("Registry of codes.\n"), [], tokens - _TAIL_TOKENS
    for key in keys:
        question = encode(f"{key}:"), _code(draw, encode), encode("\n")
        if len(context) + sum(map(len, question)) > tail:
            break
        context += chain(*question)
        questions.append(question)
    return _asking(KEY_VALUE, number, tokens, tail, context, questions, draw, encode)


def _needles(tokens: int, number: int, encode: Encode, seed: int) -> Document:
    """Sentences ``The access code of NAME is 12345.`` in prose, then the same in another order."""
    draw = random.Random(f"{NEEDLE} {seed} {number}")
    people = [f"{one} {other}" for one in _FIRST_NAMES.split() for other in _LAST_NAMES.split()]
    draw.shuffle(people)
    needles = tokens // _NEEDLE_EVERY_TOKENS
    tail = tokens - -(-needles * _QUESTION_TOKENS // _TAIL_MULTIPLE) * _TAIL_MULTIPLE
    questions = [
        (encode(f" The access code of {person} is"), _code(draw, encode), encode("."))
        for person in people[:needles]
    ]
    prose_tokens = tail - sum(len(part) for question in questions for part in question)
    seed_of_prose = draw.randrange(2**32)
    prose = filled(shuffled(prose_texts(), seed_of_prose, backwards=False), encode, prose_tokens)
    # After sentences, one in each of equal stretches of the prose.
    stops = set(encode(".")) | set(encode(" end.")[-1:])
    context: list[int] = []
    stretch = len(prose) // len(questions)
    for place, question in enumerate(questions):
        part = prose[place * stretch : (place + 1) * stretch]
        ends = [at + 1 for at, token in enumerate(part) if token in stops]
        cut = draw.choice(ends) if ends else len(part)
        context += [*part[:cut], *chain(*question), *part[cut:]]
    context += prose[len(questions) * stretch :]
    return _asking(NEEDLE, number, tokens, tail, context, questions, draw, encode)


def _code(draw: random.Random, encode: Encode) -> list[int]:
    return encode(f" {draw.randrange(10 ** (DIGITS - 1), 10**DIGITS)}")


def _asking(
    kind: str,
    number: int,
    tokens: int,
    tail: int,
    context: list[int],
    questions: list[tuple[list[int], list[int], list[int]]],
    draw: random.Random,
    encode: Encode,
) -> Document:
    """Append questions to a context while they fit. The last digits of an answer are scored.

    Raises:
        ValueError: the tokenizer joins digits.
    """
    filler = encode("\n")[-1:]
    found = context + filler * (tail - len(context))
    scored: list[int] = []
    answers = []
    draw.shuffle(questions)
    for answer, (question, code, end) in zip(count(), questions):
        if len(found) + len(question) + len(code) + len(end) > tokens + 1:
            break
        if len(code) < DIGITS:
            raise ValueError(f"look-ups: {DIGITS} digits are {len(code)} tokens: must be one each")
        found += [*question, *code]
        scored += range(len(found) - 1 - DIGITS, len(found) - 1)
        answers += [answer] * DIGITS
        found += end
    found += filler * (tokens + 1 - len(found))
    return Document(
        kind=kind,
        number=number,
        tokens=tuple(found),
        scored=tuple(scored),
        answers=tuple(answers),
        tail=tail,
    )
