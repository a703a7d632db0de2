# SPDX-License-Identifier: Apache-2.0
"""The samples of several data sets, mixed in the order of Megatron's blending index.

Shape legend: S samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property, reduce
from operator import add

import numpy as np

from sparsebalance_megatron.config import MissingLossMask, Overlong
from sparsebalance_megatron.data.blend import Blend
from sparsebalance_megatron.data.documents import Documents
from sparsebalance_megatron.data.packing import Sample
from sparsebalance_megatron.data.sample_order import Samples, SourceFacts
from sparsebalance_megatron.data.samples import SampleIndex, Split
from sparsebalance_megatron.errors import DataError
from sparsebalance_megatron.megatron.datasets import blending_order

_FIRST_PLACES = 2**16
_SHOWN_SOURCES = 32
_MOST_SOURCES = 2**15 - 2
"""Megatron's index stores sources as int16 and asserts this limit."""


class BlendingOrder:
    """Which source every place of the order takes its next sample from.

    Megatron's ``build_blending_indices`` decides: every place goes to the source that lacks most
    of its share so far. A longer index begins with a shorter one, so the order has no end and does
    not depend on how long training is.

    Args:
        weights: shares, in any unit.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        amounts = np.asarray(weights, dtype=np.float64)
        self.shares = amounts / amounts.sum()
        self._places = self._build(0)

    def places(self, first: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Source, and place in the order of that source, of ``size`` places from ``first`` on."""
        if len(self._places[0]) < first + size:
            # Several threads may build; each gets a complete pair.
            self._places = self._build(max(_FIRST_PLACES, 2 * (first + size)))
        sources, numbers = self._places
        return sources[first : first + size].astype(np.int64), numbers[first : first + size]

    def _build(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        try:
            return blending_order(self.shares, size)
        except ImportError as error:
            raise DataError(
                "blends need Megatron's compiled data set helpers, which this installation lacks "
                f"({error}); call megatron.core.datasets.utils.compile_helpers() once"
            ) from error


class BlendIndex(Samples):
    """The samples of one split of several data sets.

    Every data set goes through its own epochs, each in an order of its own. Samples are numbered
    data set by data set.

    Args:
        prefixes: of the data sets, for messages.
        indices: their samples.
        weights: shares of the samples, in any unit; None mixes by size.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        indices: Sequence[SampleIndex],
        weights: Sequence[float] | None,
    ) -> None:
        self._prefixes = tuple(prefixes)
        self._indices = tuple(indices)
        sizes = [len(index) for index in self._indices]
        self._firsts = np.concatenate(([0], np.cumsum(sizes)))
        self._order = BlendingOrder(sizes if weights is None else weights)
        self.counts = reduce(add, (index.counts for index in self._indices))

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        samples_S = np.asarray(samples, dtype=np.int64)
        lengths_S = np.empty_like(samples_S)
        sources_S = self.source_of(samples_S)
        for source in np.unique(sources_S):
            mine_S = sources_S == source
            within = samples_S[mine_S] - self._firsts[source]
            lengths_S[mine_S] = self._indices[source].lengths_of(within)
        return lengths_S

    def _samples_at(self, first: int, size: int) -> np.ndarray:
        sources_S, numbers_S = self._order.places(first, size)
        samples_S = np.empty(size, dtype=np.int64)
        for source in np.unique(sources_S):
            mine_S = sources_S == source
            within = self._indices[source].samples_at(numbers_S[mine_S])
            samples_S[mine_S] = self._firsts[source] + within
        return samples_S

    def read(self, sample: int) -> Sample:
        source = int(self.source_of(np.asarray([sample]))[0])
        return self._indices[source].read(sample - int(self._firsts[source]))

    def source_of(self, samples: np.ndarray) -> np.ndarray:
        """Which data set each sample comes from, int64."""
        return np.searchsorted(self._firsts[1:], samples, side="right")

    @cached_property
    def sources(self) -> tuple[SourceFacts, ...]:  # type: ignore[override]
        return tuple(
            SourceFacts(
                prefix=prefix, weight=float(share), counts=index.counts, digest=index.digest()
            )
            for prefix, index, share in zip(
                self._prefixes, self._indices, self._order.shares, strict=True
            )
        )

    def digest(self) -> str:
        digest = hashlib.sha256(np.ascontiguousarray(self._order.shares, dtype="<f8").tobytes())
        for source in self.sources:
            digest.update(source.digest.encode())
        return digest.hexdigest()

    def describe(self) -> tuple[str, ...]:
        # Weights are shares of the samples; a data set of longer samples has more of the tokens.
        facts = self.sources
        tokens = [source.weight * source.counts.tokens / source.counts.samples for source in facts]
        lines = [f"{len(facts)} sources: {self.counts.describe()}"]
        lines += [
            f"source {source.prefix}: {source.weight:.2%} of the samples, "
            f"{each / sum(tokens):.2%} of the tokens; {source.counts.samples:,} samples of "
            f"{source.counts.tokens:,} tokens"
            for source, each in list(zip(facts, tokens, strict=True))[:_SHOWN_SOURCES]
        ]
        if len(facts) > _SHOWN_SOURCES:
            more = len(facts) - _SHOWN_SOURCES
            lines.append(f"and {more} more sources; the header of steps.jsonl has all")
        if unmasked := self.without_loss_mask:
            lines.append(
                f"no loss mask beside {', '.join(unmasked)}, as other sources have: all of their "
                "tokens are trained on"
            )
        return tuple(lines)

    @property
    def without_loss_mask(self) -> tuple[str, ...]:
        """Prefixes of the data sets that have none while others have one."""
        unmasked = tuple(
            prefix
            for prefix, index in zip(self._prefixes, self._indices, strict=True)
            if not index.has_loss_mask
        )
        return unmasked if len(unmasked) < len(self._indices) else ()


def open_samples(
    blend: Blend,
    split: Split,
    *,
    max_tokens: int,
    overlong: Overlong,
    seed: int,
    split_weights: str,
    vocab_size: int | None = None,
    missing_loss_mask: MissingLossMask = "refuse",
) -> Samples | None:
    """Open one split of a blend; None if not a single document falls into it.

    Args:
        split_weights: Megatron's ``--split``, for blends that all splits share.
        missing_loss_mask: what happens to data sets without one beside others that have one.
        max_tokens, overlong, seed, vocab_size: see :class:`.samples.SampleIndex`.

    Raises:
        DataError: if files are missing, damaged or yield no sample, a split has documents of some
            data sets and none of others, or some have a loss mask and others must have one too.
    """
    if len(blend.prefixes) > _MOST_SOURCES:
        raise DataError(f"{blend.place}: {len(blend.prefixes)} data sets; at most {_MOST_SOURCES}")
    if blend.whole:
        split_weights = ",".join(
            "100" if name == split else "0" for name in ("train", "valid", "test")
        )
    found = [
        SampleIndex.open(
            prefix,
            max_tokens=max_tokens,
            overlong=overlong,
            seed=seed,
            split_weights=split_weights,
            split=split,
            vocab_size=vocab_size,
        )
        for prefix in blend.prefixes
    ]
    indices = [index for index in found if index is not None]
    if not indices:
        return None
    if len(indices) < len(found):
        empty = blend.prefixes[found.index(None)]
        raise DataError(
            f"--split {split_weights}: {empty} has too few documents for a {split} part, other "
            "sources have one; use --train-data-path and its like, or other weights"
        )
    if len(indices) == 1:
        return indices[0]
    samples = BlendIndex(blend.prefixes, indices, blend.weights)
    if missing_loss_mask == "refuse" and samples.without_loss_mask:
        raise DataError(
            f"{blend.place}: no loss mask beside {', '.join(samples.without_loss_mask)}, as other "
            "sources have; prepare-data writes one for conversations, and "
            "--sparse-balance-missing-loss-mask train trains on all tokens of such a source"
        )
    return samples


def index_lengths(blend: Blend, *, max_tokens: int | None, seed: int) -> Samples:
    """All documents of a blend for planning: their lengths and order, without their tokens.

    Args:
        max_tokens: longer documents are split; None takes the longest as it is.

    Raises:
        DataError: if an ``.idx`` file is missing or damaged, or yields no sample.
    """
    documents = [Documents.lengths_only(prefix) for prefix in blend.prefixes]
    longest = max(int(each.lengths_tokens.max()) for each in documents)
    indices = [
        SampleIndex(
            each,
            (0, len(each)),
            max_tokens=max_tokens or longest,
            overlong="split",
            seed=seed,
        )
        for each in documents
    ]
    if len(indices) == 1:
        return indices[0]
    return BlendIndex(blend.prefixes, indices, blend.weights)
