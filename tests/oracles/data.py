# SPDX-License-Identifier: Apache-2.0
"""Samples and packed sequences, built token by token."""

from collections.abc import Sequence

Pair = tuple[int, int]
"""An input token and its label."""


def predictions(document: Sequence[int]) -> list[Pair]:
    """All (token, next token) pairs of a document."""
    return [(document[i], document[i + 1]) for i in range(len(document) - 1)]


def samples(document: Sequence[int], max_tokens: int, overlong: str) -> list[list[Pair]]:
    """The samples of one document, each a list of pairs."""
    pairs = predictions(document)
    if not pairs:
        return []
    if len(pairs) <= max_tokens:
        return [pairs]
    if overlong == "drop":
        return []
    if overlong == "truncate":
        return [pairs[:max_tokens]]
    pieces: list[list[Pair]] = []
    for position, pair in enumerate(pairs):
        if position % max_tokens == 0:
            pieces.append([])
        pieces[-1].append(pair)
    return pieces


def packed_sequence(
    samples_of_pairs: Sequence[Sequence[Pair]], multiple: int, pad_token: int
) -> list[tuple[int, int, int, float]]:
    """(token, label, position, loss weight) per place of the sequence."""
    row: list[tuple[int, int, int, float]] = []
    for pairs in samples_of_pairs:
        for position, (token, label) in enumerate(pairs):
            row.append((token, label, position, 1.0))
    position = 0
    while len(row) % multiple:
        row.append((pad_token, pad_token, position, 0.0))
        position += 1
    return row
