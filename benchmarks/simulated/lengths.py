# SPDX-License-Identifier: Apache-2.0
"""Sample lengths with published parameters, in tokens."""

from collections.abc import Callable, Mapping

import numpy as np

MAX_TOKENS = 65536


def longalign_like(samples: int, seed: int) -> np.ndarray:
    """LongAlign-10k (arXiv:2401.18058): 8,192 + Exp(17,000), truncated at 64K.

    Fitted to the bins above 19K tokens of the length histogram in the paper's figure 3; mean
    about 22,000 tokens, 58 % of the samples of 16K and more.
    """
    return 8192 + _truncated_exponential(samples, seed, mean=17000.0, limit=MAX_TOKENS - 8192)


def longalign_128k_like(samples: int, seed: int) -> np.ndarray:
    """As :func:`longalign_like` with a tail of twice the mean, truncated at 131,072 tokens."""
    return 8192 + _truncated_exponential(samples, seed, mean=34000.0, limit=131072 - 8192)


def chatqa2_like(samples: int, seed: int) -> np.ndarray:
    """ChatQA2-Long-SFT (arXiv:2407.14482) in shape: half below 4K, half from 16K to 32K.

    No quantiles are published; known are the two modes and that at least 44 % of the samples have
    16K tokens and more. The short half is log-normal (median 1,024, sigma 0.8) below 4,096, the
    long half uniform.
    """
    long = np.random.default_rng([seed, 3]).integers(16384, 32769, samples)
    return _bimodal(samples, seed, long)


def chatqa2_tail_like(samples: int, seed: int) -> np.ndarray:
    """As :func:`chatqa2_like`, but the long half is 16,384 + Exp(8,000), truncated at 64K.

    How far the long half reaches is not published, and the largest sample bounds what balance can
    do; this shows how much depends on it.
    """
    long = 16384 + _truncated_exponential(samples, seed, mean=8000.0, limit=MAX_TOKENS - 16384)
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


LENGTHS: Mapping[str, Callable[[int, int], np.ndarray]] = {
    "longalign": longalign_like,
    "longalign-128k": longalign_128k_like,
    "chatqa2": chatqa2_like,
    "chatqa2-tail": chatqa2_tail_like,
    "prolong": prolong_like,
}
"""Name to ``generator(samples, seed) -> int64 lengths``."""
