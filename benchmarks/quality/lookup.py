# SPDX-License-Identifier: Apache-2.0
"""Documents of keys, values and noise: associative recall, and a needle at ten depths.

A key and its value are one token, which one layer of attention can look up (the one-layer form of
multi-query associative recall in HazyResearch/zoology, ``stacked_mqar``). Queries end the document:
a query token, then the value, which alone is scored.
"""

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
    """

    keys: int = 16
    values: int = 16
    noise: int = 16
    pairs: int = 8
    shortest_tokens: int = 80
    longest_tokens: int = 256
    tokens_per_query: int = 10

    @property
    def vocabulary(self) -> int:
        """Values come first, then queries, noise, and pairs."""
        return self.values + self.keys + self.noise + self.keys * self.values

    @property
    def chance(self) -> float:
        """Accuracy of a guess among the values."""
        return 1.0 / self.values

    def recall(self, generator: np.random.Generator) -> Document:
        """Pairs anywhere in the noise, then queries for them in random order."""
        length = self._length(generator)
        queries = max(1, length // self.tokens_per_query)
        return self._document(generator, length, pairs=self.pairs, queries=queries)

    def needle(self, generator: np.random.Generator, depth: int) -> Document:
        """One pair in tenth ``depth`` of the noise, and one query; ``places`` are the depth."""
        document = self._document(
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
    ) -> Document:
        """A document, whose ``places`` are distances."""
        body = length + 1 - 2 * queries
        first_noise = self.values + self.keys
        tokens = first_noise + generator.integers(0, self.noise, length + 1)
        low, high = (0, body) if depth is None else _tenth(depth, body)
        at = low + generator.choice(high - low, pairs, replace=False)
        keys = generator.choice(self.keys, pairs, replace=False)
        values = generator.integers(0, self.values, pairs)
        tokens[at] = first_noise + self.noise + keys * self.values + values
        asked = generator.integers(0, pairs, queries)
        query = body + 2 * np.arange(queries)
        tokens[query], tokens[query + 1] = self.values + keys[asked], values[asked]
        scored, places = np.zeros(length, dtype=bool), np.zeros(length, dtype=np.int64)
        scored[query], places[query] = True, query - at[asked]
        return Document(tokens=tokens, scored=scored, places=places)


def _tenth(depth: int, spots: int) -> tuple[int, int]:
    low, high = (spots * edge // DEPTHS for edge in (depth, depth + 1))
    return low, max(high, low + 1)
