# SPDX-License-Identifier: Apache-2.0
"""Which lengths were trained, and what budgets they got in every layer.

Shape legend: L layers, U length buckets, S samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sparsebalance_megatron.report.charts.figure import MUTED, PREDICTED, RUN, Picture, absent, draw
from sparsebalance_megatron.telemetry.rank_log import RankLogs
from sparsebalance_megatron.telemetry.rank_record import RankMicroBatch

NO_RANKS = "Lengths and budgets are in ranks/, which holds nothing of this run's steps."
_BINS_PER_DOUBLING = 2
_LARGEST_ANNOTATED = 80
_RATIO_LIMIT = 4.0


def lengths_picture(ranks: RankLogs, config: Mapping[str, Any], sampled: str) -> Picture:
    """Samples and tokens by length of sample.

    Args:
        config: of the run's header; may lack anything.
        sampled: what the logs read stand for, in words.
    """
    key, title = "lengths", "Lengths"
    lengths_S = np.array(sorted(_lengths(ranks)), dtype=np.int64)
    if not len(lengths_S):
        return absent(key, title, NO_RANKS)
    low, high = np.log2([lengths_S[0], lengths_S[-1] + 1])
    first, last = np.floor(low * _BINS_PER_DOUBLING), np.ceil(high * _BINS_PER_DOUBLING)
    edges = 2.0 ** (np.arange(first, last + 1) / _BINS_PER_DOUBLING)
    samples = np.histogram(lengths_S, edges)[0] / len(lengths_S)
    tokens = np.histogram(lengths_S, edges, weights=lengths_S)[0] / lengths_S.sum()
    block_size, base = _whole(config, "block_size"), _whole(config, "base_budget")
    bound = None if block_size is None or base is None else block_size * base

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        axis.stairs(samples * 100, edges, color=RUN, fill=True, alpha=0.35, label="of samples")
        axis.stairs(tokens * 100, edges, color=PREDICTED, linewidth=1.4, label="of tokens")
        if bound is not None and edges[0] < bound < edges[-1]:
            axis.axvline(bound, color=MUTED, linewidth=0.8, linestyle=(0, (3, 2)))
            axis.annotate(
                "base budget",
                (bound, 1.0),
                (4, 0),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                va="top",
                fontsize=8,
                color=MUTED,
            )
        axis.set_xscale("log", base=2)
        _token_ticks(axis)
        axis.set_title("% per half doubling of length")
        axis.set_xlabel("length of the sample, tokens")
        axis.legend(frameon=False, fontsize=8, loc="upper left")

    middle, longest = int(np.median(lengths_S)), int(lengths_S[-1])
    words = (
        "How samples are spread over lengths (filled) and which lengths the tokens are in (line). "
        "The further apart the two, the more a few long samples decide."
    )
    if bound is not None:
        words += (
            f" Left of the dashed line, {bound:,} tokens, the base budget covers a whole sample "
            "and attention is dense."
        )
    return Picture(
        key=key,
        title=title,
        caption=f"{words} {len(lengths_S):,} samples of {sampled}.",
        alt=f"Histogram of sample lengths: median {middle:,} tokens, longest {longest:,}.",
        svg=draw(key, paint, height=2.5),
    )


def budgets_picture(ranks: RankLogs, config: Mapping[str, Any], sampled: str) -> Picture:
    """Mean of budget over base budget, by layer and length bucket; arguments as above."""
    key, title = "budgets", "Budgets"
    block_size, base = _whole(config, "block_size"), _whole(config, "base_budget")
    if not ranks.steps:
        return absent(key, title, NO_RANKS)
    if block_size is None or base is None:
        return absent(
            key, title, "Block size and base budget are in the log's header, which is missing."
        )
    ratio_LU, buckets = budget_ratios(ranks, block_size, base)
    if not np.isfinite(ratio_LU).any():
        return absent(key, title, "No micro-batch with layers was logged.")
    layers = len(ratio_LU)

    def paint(figure: Any) -> None:
        from matplotlib.colors import TwoSlopeNorm

        axis = figure.subplots()
        reach = float(
            np.log2(np.clip(np.nanmax(np.maximum(ratio_LU, 1 / ratio_LU)), 1.1, _RATIO_LIMIT))
        )
        image = axis.imshow(
            np.log2(ratio_LU),
            aspect="auto",
            cmap="RdBu_r",
            norm=TwoSlopeNorm(0.0, -reach, reach),
            interpolation="none",
        )
        if ratio_LU.size <= _LARGEST_ANNOTATED:
            _annotate(axis, ratio_LU, reach)
        axis.set_xticks(range(len(buckets)), [blocks_in(u) for u in buckets])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        axis.yaxis.get_major_locator().set_params(integer=True)
        axis.set_xlabel(f"length of the sample, blocks of {block_size} tokens")
        axis.set_ylabel("layer")
        bar = figure.colorbar(image, ax=axis, shrink=0.8, aspect=30, pad=0.02)
        marks = [
            ratio
            for ratio in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4)
            if abs(np.log2(ratio)) <= reach + 1e-9
        ]
        bar.set_ticks(np.log2(marks), labels=[f"{ratio:g}" for ratio in marks])
        bar.ax.minorticks_off()
        bar.outline.set_visible(False)
        axis.set_title("budget over base budget")

    return Picture(
        key=key,
        title=title,
        caption="Planned budget over base budget, the mean over samples of that length in that "
        "layer. Blue was cut, red was raised, white stayed. Budgets count up to a sample's own "
        "blocks, so samples shorter than the base budget can be cut but not raised. "
        f"From {sampled}.",
        alt=f"Heat map of {layers} layers by {len(buckets)} length buckets: budget over base "
        f"budget from {np.nanmin(ratio_LU):.2f} to {np.nanmax(ratio_LU):.2f}.",
        svg=draw(key, paint, height=float(np.clip(0.9 + 0.2 * layers, 2.4, 5.5))),
    )


def budget_ratios(
    ranks: RankLogs, block_size: int, base_budget: int
) -> tuple[np.ndarray, tuple[int, ...]]:
    """[L, U] mean of min(k, n) / min(k0, n), and the buckets floor(log2 n) of its columns.

    n: blocks of the sample, k its budget. NaN where no sample was seen.
    """
    layers = 1 + max(
        (each for header in ranks.headers.values() for each in header.layers), default=-1
    )
    sums: dict[int, np.ndarray] = {}
    counts: dict[int, np.ndarray] = {}
    for place, micro_batch in _micro_batches(ranks):
        rows = list(ranks.headers[place].layers)
        blocks_S = -(-np.array(micro_batch.lengths_tokens) // block_size)
        ratio_LS = np.minimum(micro_batch.budgets_LS, blocks_S) / np.minimum(base_budget, blocks_S)
        for sample, blocks in enumerate(blocks_S):
            bucket = int(blocks).bit_length() - 1
            sums.setdefault(bucket, np.zeros(layers))[rows] += ratio_LS[:, sample]
            counts.setdefault(bucket, np.zeros(layers))[rows] += 1
    buckets = tuple(sorted(sums))
    if not buckets:
        return np.full((layers, 0), np.nan), ()
    sums_LU = np.stack([sums[bucket] for bucket in buckets], axis=1)
    counts_LU = np.stack([counts[bucket] for bucket in buckets], axis=1)
    return np.divide(
        sums_LU, counts_LU, out=np.full_like(sums_LU, np.nan), where=counts_LU > 0
    ), buckets


def _micro_batches(ranks: RankLogs) -> Iterable[tuple[tuple[int, int], RankMicroBatch]]:
    """Every one once in a stage, though several ranks may share its row."""
    for by_place in ranks.steps.values():
        for place, step in by_place.items():
            yield from ((place, each) for each in step.micro_batches if each.member == 0)


def _lengths(ranks: RankLogs) -> Iterable[int]:
    """Every sample once: all stages of a rank, and all ranks that share a row, run the same."""
    for by_place in ranks.steps.values():
        first = dict(sorted(by_place, reverse=True))
        for place in first.items():
            for micro_batch in by_place[place].micro_batches:
                if micro_batch.member == 0:
                    yield from micro_batch.lengths_tokens


def _annotate(axis: Any, ratio_LU: np.ndarray, reach: float) -> None:
    for (layer, column), ratio in np.ndenumerate(ratio_LU):
        if np.isfinite(ratio):
            strong = abs(np.log2(ratio)) > 0.65 * reach
            axis.text(
                column,
                layer,
                f"{ratio:.2f}",
                ha="center",
                va="center_baseline",
                fontsize=6.5,
                color="white" if strong else "black",
            )


def blocks_in(bucket: int, longest: int | None = None) -> str:
    """The lengths of a bucket, floor(log2 of blocks), in blocks: 4-7."""
    first, last = 1 << bucket, (2 << bucket) - 1
    last = last if longest is None else min(last, longest)
    return str(first) if first == last else f"{first}-{last}"


def _short_tokens(tokens: float) -> str:
    """64, 2k, 16k: thousands are 1,024."""
    return f"{tokens / 1024:.3g}k" if tokens >= 1024 else f"{tokens:.0f}"


def _token_ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: _short_tokens(tokens)))
    axis.minorticks_off()


def _whole(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else None
