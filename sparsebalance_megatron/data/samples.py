# SPDX-License-Identifier: Apache-2.0
"""The samples of a run: of one data set, or of several in Megatron's order of a blend.

Flags for data are read by the rules of Megatron's ``get_blend_from_list`` and
``get_blend_and_blend_per_split``; what these would misread or assert on is refused in one line.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from sparsebalance_megatron.config import MissingLossMask, Overlong
from sparsebalance_megatron.data.data_set import DataSet, Split, split_range
from sparsebalance_megatron.data.documents import Documents
from sparsebalance_megatron.data.packing import Sample
from sparsebalance_megatron.errors import DataError
from sparsebalance_megatron.json_file import UnreadableFileError, read_json, read_text
from sparsebalance_megatron.megatron.datasets import blending_order

_FIRST_PLACES = 2**16
_SAMPLES_LOOKED_AT = 1024
"""Samples whose loss masks are read before training."""
_SHOWN_SOURCES = 32
_MOST_SOURCES = 2**15 - 2
"""Megatron's index stores sources as int16 and asserts this limit."""
_ALTERNATE = "give prefixes only, or a weight before every prefix, such as 0.7 web 0.3 books"


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Data sets that are mixed, named at ``place``, a flag or a file.

    ``weights`` are positive, in any unit; None mixes by size. ``whole``: every document counts,
    whatever ``--split`` says.
    """

    place: str
    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    whole: bool = False


class _PerSplit(msgspec.Struct):
    """Weights and prefixes of every split; null or an empty list is none."""

    train: list[str | float] | str | None
    valid: list[str | float] | str | None
    test: list[str | float] | str | None


def read_blends(flags: Any) -> Mapping[Split, Blend | None]:
    """The blend of every split, from ``flags`` as Megatron names them; None where there is none."""
    splits = get_args(Split)
    words_of = {f"--{split}-data-path": getattr(flags, f"{split}_data_path") for split in splits}
    kinds = words_of | {
        "--data-path": flags.data_path,
        "--data-args-path": flags.data_args_path,
        "--per-split-data-args-path": flags.per_split_data_args_path,
    }
    given = sorted(flag for flag, value in kinds.items() if value)
    if not given:
        raise DataError(
            "no --data-path: plans need the lengths of documents; give a prefix of "
            "files made by `sparse-balance prepare-data`"
        )
    if len(given) > 1 and not words_of.keys() >= set(given):
        raise DataError(f"{' and '.join(given)}: all of them name the data; give one of them")
    if flags.data_path:
        return dict.fromkeys(splits, parse_blend(flags.data_path, "--data-path"))
    place, remedy = f"{given[0]} {kinds[given[0]]}", "list weights and prefixes in it"
    try:
        if path := flags.data_args_path:
            return dict.fromkeys(splits, parse_blend(read_text(Path(path)), place))
        if path := flags.per_split_data_args_path:
            remedy += " for each of train, valid and test"
            content = msgspec.structs.asdict(read_json(Path(path), _PerSplit))
            words_of = {f"{place}, {split}": content[split] for split in splits}
    except UnreadableFileError as error:
        raise DataError(f"{place}: {error}; {remedy}") from error
    return {
        split: parse_blend(words, where, whole=True) if words else None
        for split, (where, words) in zip(splits, words_of.items(), strict=True)
    }


def parse_blend(words: Sequence[str | float] | str, place: str, *, whole: bool = False) -> Blend:
    """Read prefixes, or weights and prefixes in turn, that were given at ``place``."""
    words = words.split() if isinstance(words, str) else [str(word).strip() for word in words]
    if not words:
        raise DataError(f"{place}: names no data set; {_ALTERNATE}")
    pairs = list(zip(words[::2], words[1::2], strict=False))
    numbers = [_number(weight) for weight, _ in pairs]
    if len(words) % 2 or all(number is None for number in numbers):
        for word in words:
            # A number among prefixes is a misplaced weight, unless a file has that name.
            if _number(word) is not None and not Path(f"{word}.idx").exists():
                raise DataError(
                    f"{place}: {word} is no prefix, and not every prefix has a weight "
                    f"before it; {_ALTERNATE}"
                )
        return Blend(place=place, prefixes=tuple(words), whole=whole)
    for (word, prefix), number in zip(pairs, numbers, strict=True):
        if number is None:
            raise DataError(f"{place}: the weight {word!r} of {prefix} is no number; {_ALTERNATE}")
        if not (math.isfinite(number) and number > 0):
            raise DataError(
                f"{place}: the weight {word} of {prefix} must be a number above 0; leave a data "
                "set out that is not to be used"
            )
    weights = tuple(number for number in numbers if number is not None)
    return Blend(
        place=place, prefixes=tuple(prefix for _, prefix in pairs), weights=weights, whole=whole
    )


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


class BlendingOrder:
    """Order in which sources give samples, by ``weights`` in any unit.

    Megatron's ``build_blending_indices`` decides: every place goes to the source that lacks most of
    its share so far. A longer index begins with a shorter one, so the order has no end and does not
    depend on how long training is.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        amounts = np.asarray(weights, dtype=np.float64)
        self.shares = amounts / amounts.sum()
        self._places = (np.empty(0, dtype=np.int16), np.empty(0, dtype=np.int64))

    def places(self, first: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Source, and place in the order of that source, of ``size`` places from ``first`` on."""
        if len(self.shares) == 1:
            return np.zeros(size, dtype=np.int64), np.arange(first, first + size)
        if len(self._places[0]) < first + size:
            # Several threads may build; each gets a complete pair.
            try:
                self._places = blending_order(self.shares, max(_FIRST_PLACES, 2 * (first + size)))
            except ImportError as error:
                raise DataError(
                    "blends need Megatron's compiled data set helpers, which this installation "
                    f"lacks ({error}); call megatron.core.datasets.utils.compile_helpers() once"
                ) from error
        sources, numbers = self._places
        return sources[first : first + size].astype(np.int64), numbers[first : first + size]


class SampleIndex:
    """An endless order of the samples of one split, of one data set or of several.

    Every data set goes through its own epochs, each in an order of its own. Samples are numbered
    data set by data set. ``counts`` are of one epoch of every data set.
    """

    def __init__(
        self, data_sets: Sequence[DataSet], weights: Sequence[float] | None = None
    ) -> None:
        self._data_sets = tuple(data_sets)
        sizes = [data_set.counts.samples for data_set in data_sets]
        self._firsts = np.concatenate(([0], np.cumsum(sizes)))
        self._order = BlendingOrder(sizes if weights is None else weights)
        self.counts = reduce(add, (data_set.counts for data_set in data_sets))

    def __len__(self) -> int:
        return self.counts.samples

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Input tokens of each sample, int64, in the order given."""
        samples_S = np.asarray(samples, dtype=np.int64)
        lengths_S = np.empty_like(samples_S)
        for data_set, first, mine_S in self._by_source(self.source_of(samples_S)):
            lengths_S[mine_S] = data_set.lengths_of(samples_S[mine_S] - first)
        return lengths_S

    def global_batch(self, first: int, size: int) -> np.ndarray:
        """Samples number ``first`` to ``first + size`` of training, in order of arrival, int64.

        It depends on the arguments alone: resuming needs only the number of consumed samples.
        """
        if first < 0 or size < 1:
            raise ValueError(f"batch of {size} samples from {first}: need size >= 1 and first >= 0")
        sources_S, numbers_S = self._order.places(first, size)
        samples_S = np.empty(size, dtype=np.int64)
        for data_set, first_of_source, mine_S in self._by_source(sources_S):
            samples_S[mine_S] = first_of_source + data_set.samples_at(numbers_S[mine_S])
        return samples_S

    def _by_source(self, sources_S: np.ndarray) -> Iterator[tuple[DataSet, int, np.ndarray]]:
        """Each data set among those of the samples, its first sample, and which are its own."""
        for source in np.unique(sources_S):
            yield self._data_sets[source], int(self._firsts[source]), sources_S == source

    def read(self, sample: int) -> Sample:
        """Tokens of a sample, and its loss mask where its data set has one."""
        source = int(self.source_of(np.asarray([sample]))[0])
        return self._data_sets[source].read(sample - int(self._firsts[source]))

    def source_of(self, samples: np.ndarray) -> np.ndarray:
        """Number of the data set that each sample comes from, int64."""
        return np.searchsorted(self._firsts[1:], samples, side="right")

    @property
    def sources(self) -> tuple[tuple[DataSet, float], ...]:
        """The data sets that are mixed, in the order given, and their shares of the samples; none
        where there is but one."""
        if len(self._data_sets) == 1:
            return ()
        return tuple(zip(self._data_sets, self._order.shares.tolist(), strict=True))

    def digest(self) -> str:
        """Hexadecimal SHA-256 of what order and lengths depend on; equal on ranks that agree."""
        if not self.sources:
            return self._data_sets[0].digest
        digest = hashlib.sha256(np.ascontiguousarray(self._order.shares, dtype="<f8").tobytes())
        for data_set, _ in self.sources:
            digest.update(data_set.digest.encode())
        return digest.hexdigest()

    def describe(self) -> tuple[str, ...]:
        # Weights are shares of the samples; a data set of longer samples has more of the tokens.
        sources = self.sources
        if not sources:
            return (self.counts.describe(),)
        tokens = [share * each.counts.tokens / each.counts.samples for each, share in sources]
        lines = [f"{len(sources)} sources: {self.counts.describe()}"]
        lines += [
            f"source {each.prefix}: {share:.2%} of the samples, {mean / sum(tokens):.2%} of the "
            f"tokens; {each.counts.samples:,} samples of {each.counts.tokens:,} tokens"
            for (each, share), mean in list(zip(sources, tokens, strict=True))[:_SHOWN_SOURCES]
        ]
        if (more := len(sources) - _SHOWN_SOURCES) > 0:
            lines.append(f"and {more} more sources; the header of steps.jsonl has all")
        if unmasked := self.without_loss_mask:
            lines.append(
                f"no loss mask beside {', '.join(unmasked)}, as other sources have: all of their "
                "tokens are trained on"
            )
        return tuple(lines)

    def untrained(self) -> str:
        """How many of the first samples have no trained token, as pieces of long conversations may,
        in one line; "" if all have some."""
        if not any(data_set.has_loss_mask for data_set in self._data_sets):
            return ""
        looked_at = min(len(self), _SAMPLES_LOOKED_AT)
        masks = (self.read(int(each)).loss_mask for each in self.global_batch(0, looked_at))
        count = sum(mask is not None and not mask.any() for mask in masks)
        if not count:
            return ""
        return (
            f"{count:,} of the first {looked_at:,} samples have no trained token: they only take "
            "time, and the loss of a batch of them alone is shown as 0"
        )

    @property
    def without_loss_mask(self) -> tuple[str, ...]:
        """Prefixes of the data sets that have none while others have one."""
        unmasked = tuple(each.prefix for each in self._data_sets if not each.has_loss_mask)
        return unmasked if len(unmasked) < len(self._data_sets) else ()


def open_samples(
    blend: Blend,
    split: Split,
    *,
    max_tokens: int,
    overlong: Overlong,
    seed: int,
    split_weights: str = "100,0,0",
    vocab_size: int | None = None,
    missing_loss_mask: MissingLossMask = "refuse",
    lengths_only: bool = False,
) -> SampleIndex | None:
    """Open one split of a blend; None if not a single document falls into it.

    ``split_weights`` is Megatron's ``--split``, for blends that all splits share;
    ``missing_loss_mask`` says what happens to data sets without one beside others that have one.
    ``lengths_only``: from ``.idx`` files alone. Other arguments as of :class:`.data_set.DataSet`.
    """
    if len(blend.prefixes) > _MOST_SOURCES:
        raise DataError(f"{blend.place}: {len(blend.prefixes)} data sets; at most {_MOST_SOURCES}")
    documents = [Documents.open(prefix, lengths_only=lengths_only) for prefix in blend.prefixes]
    ranges = [
        (0, len(each)) if blend.whole else split_range(len(each), split_weights, split)
        for each in documents
    ]
    empty = [
        prefix for prefix, (first, end) in zip(blend.prefixes, ranges, strict=True) if first == end
    ]
    if len(empty) == len(documents):
        return None
    if empty:
        raise DataError(
            f"--split {split_weights}: {empty[0]} has too few documents for a {split} part, other "
            "sources have one; use --train-data-path and its like, or other weights"
        )
    data_sets = [
        DataSet(
            each, range_, max_tokens=max_tokens, overlong=overlong, seed=seed, vocab_size=vocab_size
        )
        for each, range_ in zip(documents, ranges, strict=True)
    ]
    samples = SampleIndex(data_sets, blend.weights)
    if missing_loss_mask == "refuse" and samples.without_loss_mask:
        raise DataError(
            f"{blend.place}: no loss mask beside {', '.join(samples.without_loss_mask)}, as other "
            "sources have; prepare-data writes one for conversations, and "
            "--sparse-balance-config missing-loss-mask=train trains on all tokens of such a source"
        )
    return samples
