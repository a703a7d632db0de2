# SPDX-License-Identifier: Apache-2.0
"""Packs samples into rows of equal height, for ranks that wait for one another in every layer.

A row is the micro-batches of a lockstep group at one position, one bin for each member. It takes as
long as its fullest bin, its height.
"""

from __future__ import annotations

import numpy as np


def packed_rows(
    weights_S: np.ndarray, tokens_S: np.ndarray, rows: int, members: int, cap_tokens: int
) -> list[list[list[tuple[int, ...]]]]:
    """Up to two packings: the samples of the bins of every row, the fullest bin first. None where
    the samples do not fit.

    1. One sample for each bin opens the bins in falling order of weight: so neighbours in weight
       share a row, and no bin is empty. These are the heaviest samples in the one packing, the
       lightest in the other. One sample a bin is the least sum of heights at once.
    2. Each other sample, heaviest first, goes where its row grows least; of equals, where it leaves
       least room below the height. No bin exceeds the cap of tokens.

    Args:
        weights_S: predicted ms of every sample.
        cap_tokens: of a bin.

    >>> packed_rows(np.array([9.0, 4.0, 4.0, 1.0]), np.ones(4, int), 2, 2, 4)
    [[[(0,), (1,)], [(2,), (3,)]]]
    """
    bins = rows * members
    order_S = np.argsort(-weights_S, kind="stable")
    if len(order_S) < bins:
        return []
    packings = []
    for first in dict.fromkeys((0, len(order_S) - bins)):
        opening = slice(first, first + bins)
        bin_S = _filled(weights_S, tokens_S, order_S, opening, members, cap_tokens)
        if bin_S is None:
            continue
        samples: list[list[int]] = [[] for _ in range(bins)]
        for sample, chosen in enumerate(bin_S.tolist()):
            samples[chosen].append(sample)
        load_XW = np.bincount(bin_S, weights_S).reshape(rows, members)
        order_XW = np.argsort(-load_XW, axis=1, kind="stable") + members * np.arange(rows)[:, None]
        packings.append(
            [[tuple(samples[chosen]) for chosen in of_row] for of_row in order_XW.tolist()]
        )
    return packings


def _filled(
    weights_S: np.ndarray,
    tokens_S: np.ndarray,
    order_S: np.ndarray,
    opening: slice,
    members: int,
    cap_tokens: int,
) -> np.ndarray | None:
    """The bin of every sample; None where one finds no room."""
    first = order_S[opening]
    bin_S = np.empty(len(order_S), dtype=np.int64)
    bin_S[first] = np.arange(len(first))
    load_J, used_J = weights_S[first].astype(np.float64), tokens_S[first].copy()
    if used_J.max() > cap_tokens:
        return None
    for sample in np.delete(order_S, opening).tolist():
        weight, tokens = weights_S[sample], tokens_S[sample]
        height_J = np.repeat(load_J.reshape(-1, members).max(axis=1), members)
        over_J = load_J + weight - height_J
        grows_J = np.where(used_J + tokens > cap_tokens, np.inf, np.maximum(over_J, 0.0))
        least = grows_J.min()
        if not np.isfinite(least):
            return None
        chosen = int(np.where(grows_J <= least, over_J, -np.inf).argmax())
        bin_S[sample] = chosen
        load_J[chosen] += weight
        used_J[chosen] += tokens
    return bin_S
