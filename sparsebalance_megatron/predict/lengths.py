# SPDX-License-Identifier: Apache-2.0
"""Sample lengths with published parameters, and lengths from a file. Lengths count tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from sparsebalance_megatron.config import Overlong
from sparsebalance_megatron.json_file import checked, parse_json, read_text

MAX_TOKENS = 65536
_Lengths = Annotated[list[Annotated[int, msgspec.Meta(ge=1, le=2**30)]], msgspec.Meta(min_length=1)]
"""Tokens; the limit is a thousand times what models are trained on."""


class WorkloadError(ValueError):
    """A workload cannot be built from what the user named."""


def longalign_like(samples: int, seed: int) -> np.ndarray:
    """LongAlign-10k (arXiv:2401.18058): 8,192 + Exp(17,000), truncated at 64K.

    Fitted to the bins above 19K tokens of the length histogram in the paper's figure 3; mean
    about 22,000 tokens, 58 % of the samples of 16K and more.
    """
    return 8192 + _truncated_exponential(samples, seed, mean=17000.0, limit=MAX_TOKENS - 8192)


def chatqa2_like(samples: int, seed: int) -> np.ndarray:
    """ChatQA2-Long-SFT (arXiv:2407.14482) in shape: half below 4K, half from 16K to 32K.

    No quantiles are published; known are the two modes and that at least 44 % of the samples have
    16K tokens and more. The short half is log-normal (median 1,024, sigma 0.8) below 4,096, the
    long half uniform.
    """
    long = np.random.default_rng([seed, 3]).integers(16384, 32769, samples)
    return _bimodal(samples, seed, long)


def prolong_like(samples: int, seed: int) -> np.ndarray:
    """Documents for long-context pre-training, from quantiles of 77,932 ProLong lengths.

    Those of ``dist_prolong.json`` (hao-ai-lab/DistCA), truncated at 64K; between them lengths grow
    geometrically. Half of the documents have less than 2K tokens, one in a hundred more than 16K.
    """
    uniform = np.random.default_rng([seed, 4]).random(samples)
    levels, lengths = zip(*_PROLONG_QUANTILES, strict=True)
    return np.exp(np.interp(uniform, levels, np.log(lengths))).astype(np.int64)


_PROLONG_QUANTILES = (
    (0.0, 512),
    (0.01, 678),
    (0.10, 919),
    (0.25, 1237),
    (0.50, 1914),
    (0.75, 3467),
    (0.90, 6051),
    (0.95, 8378),
    (0.99, 16270),
    (0.999, 47398),
    (1.0, MAX_TOKENS),
)


def _bimodal(samples: int, seed: int, long: np.ndarray) -> np.ndarray:
    generator = np.random.default_rng([seed, 2])
    short = np.exp(np.log(1024.0) + 0.8 * generator.standard_normal(samples))
    short = np.clip(short, 16, 4095).astype(np.int64)
    return np.where(generator.random(samples) < 0.5, short, long)


def _truncated_exponential(samples: int, seed: int, *, mean: float, limit: int) -> np.ndarray:
    """Inverse of the distribution function, so that nothing has to be drawn twice."""
    uniform = np.random.default_rng([seed, 1]).random(samples)
    return (-mean * np.log1p(-uniform * -np.expm1(-limit / mean))).astype(np.int64)


GENERATORS: Mapping[str, Callable[[int, int], np.ndarray]] = {
    "longalign": longalign_like,
    "chatqa2": chatqa2_like,
    "prolong": prolong_like,
}
"""Name to ``generator(samples, seed) -> int64 lengths``."""


def read_lengths(path: Path) -> np.ndarray:
    """Lengths from a JSON list, or from text with one length per line.

    Raises:
        WorkloadError: the file is missing, empty, or holds something else than positive integers.
    """
    try:
        text = read_text(path)
        as_json = text.lstrip().startswith("[")
        values = parse_json(text) if as_json else [int(word) for word in text.split()]
        lengths = checked(values, _Lengths)
    except ValueError as error:
        raise WorkloadError(
            f"{path}: {str(error)[:200]}; give a JSON list of lengths in tokens, or one per line"
        ) from error
    return np.array(lengths, dtype=np.int64)


def batches_of(
    lengths: np.ndarray, batch_size: int, steps: int, place: object
) -> tuple[tuple[int, ...], ...]:
    """Consecutive global batches, at most ``steps``; an incomplete last one is left out.

    Args:
        place: where the lengths come from, for the error.

    Raises:
        WorkloadError: there is not one.
    """
    batches = min(steps, len(lengths) // batch_size)
    if not batches:
        raise WorkloadError(
            f"{place}: {len(lengths)} samples, and a step takes --global-batch-size {batch_size}; "
            "give more, or lower it"
        )
    whole = lengths[: batches * batch_size].reshape(batches, batch_size)
    return tuple(map(tuple, whole.tolist()))


def samples_of(lengths: np.ndarray, seq_length: int, overlong: Overlong) -> np.ndarray:
    """Lengths of the samples that documents become: none above ``seq_length``."""
    if overlong == "drop":
        return lengths[lengths <= seq_length]
    if overlong == "truncate":
        return np.minimum(lengths, seq_length)
    pieces = -(-lengths // seq_length)
    cut = np.full(int(pieces.sum()), seq_length, dtype=np.int64)
    cut[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * seq_length
    return cut
