# SPDX-License-Identifier: Apache-2.0
"""Documents of keys, values and noise: associative recall, and a needle at ten depths.

In the *stacked* form a key and its value are one token, which one layer of attention can look up
(the one-layer form of multi-query associative recall in HazyResearch/zoology, ``stacked_mqar``). In
the *sequential* form the value follows its key as a token of its own (``multiquery_ar``, after
arXiv:2312.04927); one layer cannot solve it. In both, queries end the document: a query token, then
the value, which alone is scored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quality.documents import Document, log_uniform_length

DEPTHS = 10
"""Tenths of the noise that a needle may lie in."""


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """How documents are drawn.

    Attributes:
        keys, values, noise: how many tokens of each kind there are.
        pairs: pairs in a recall document; a needle document has one.
        shortest_tokens, longest_tokens: inputs of a document, drawn log-uniformly.
        tokens_per_query: of a recall document.
        stacked: whether a pair is one token.
    """

    keys: int = 16
    values: int = 16
    noise: int = 16
    pairs: int = 8
    shortest_tokens: int = 80
    longest_tokens: int = 256
    tokens_per_query: int = 10
    stacked: bool = True

    @property
    def vocabulary(self) -> int:
        """Values come first, then queries, noise, and pairs or, where they are not stacked, keys,
        which are the queries' tokens."""
        pairs = self.keys * self.values if self.stacked else 0
        return self.values + self.keys + self.noise + pairs

    @property
    def chance(self) -> float:
        """Accuracy of a guess among the values."""
        return 1.0 / self.values

    def recall(self, generator: np.random.Generator) -> Document:
        """Pairs anywhere in the noise, then queries for them in random order."""
        length = self._length(generator)
        queries = max(1, length // self.tokens_per_query)
        return self._document(generator, length, pairs=self.pairs, queries=queries)[0]

    def needle(self, generator: np.random.Generator, depth: int) -> Document:
        """One pair in tenth ``depth`` of the noise, and one query; ``places`` are the depth."""
        document, _ = self._document(
            generator, self._length(generator), pairs=1, queries=1, depth=depth
        )
        return Document(
            tokens=document.tokens,
            scored=document.scored,
            places=np.where(document.scored, depth, 0),
        )

    def _length(self, generator: np.random.Generator) -> int:
        return log_uniform_length(generator, self.shortest_tokens, self.longest_tokens)

    def _document(
        self,
        generator: np.random.Generator,
        length: int,
        *,
        pairs: int,
        queries: int,
        depth: int | None = None,
    ) -> tuple[Document, np.ndarray]:
        """A document, whose ``places`` are distances, and where its pairs begin."""
        width = 1 if self.stacked else 2
        body = length + 1 - 2 * queries
        first_noise = self.values + self.keys
        tokens = first_noise + generator.integers(0, self.noise, length + 1)
        spots = body // width
        low, high = (0, spots) if depth is None else _tenth(depth, spots)
        at = width * (low + generator.choice(high - low, pairs, replace=False))
        keys = generator.choice(self.keys, pairs, replace=False)
        values = generator.integers(0, self.values, pairs)
        if self.stacked:
            tokens[at] = first_noise + self.noise + keys * self.values + values
        else:
            tokens[at], tokens[at + 1] = self.values + keys, values
        asked = generator.integers(0, pairs, queries)
        query = body + 2 * np.arange(queries)
        tokens[query], tokens[query + 1] = self.values + keys[asked], values[asked]
        scored, places = np.zeros(length, dtype=bool), np.zeros(length, dtype=np.int64)
        scored[query], places[query] = True, query - at[asked]
        return Document(tokens=tokens, scored=scored, places=places), at


def _tenth(depth: int, spots: int) -> tuple[int, int]:
    low, high = (spots * edge // DEPTHS for edge in (depth, depth + 1))
    return low, max(high, low + 1)
