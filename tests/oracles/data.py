# SPDX-License-Identifier: Apache-2.0
"""Samples, built token by token."""

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
