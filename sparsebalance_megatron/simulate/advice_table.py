# SPDX-License-Identifier: Apache-2.0
"""Advice as a table of at most 80 columns, and as sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsebalance_megatron.cost.memory import GIBIBYTE
from sparsebalance_megatron.simulate.advice import Advice, Outlook

if TYPE_CHECKING:
    from rich.console import Console

_MOSTLY_DENSE = 0.8
_MUCH_ROUTING = 0.15
_MUCH_WAITING = 0.15

_COLUMNS = (
    *("block\nsize", "base\nbudget", "micro\nbatches", "context\nparallel", "dense\ntokens"),
    *("router\nshare", "step\nms", "over\ndense", "tokens/s\nper GPU", "bubble", "GiB"),
)
_LEGEND = {
    "dense tokens": "in documents that fit the budget whole: attention cannot get cheaper for them",
    "router share": "choosing blocks; where counted, dot products only, which is the least",
    "over dense": "time with dense attention and no router over this time",
    "bubble": "share of the GPUs' time that no micro-batch fills",
    "GiB": "of the fullest stage; * does not fit",
}


def best_fitting(advice: Advice, gpu_memory_gib: float) -> Outlook:
    """The outlook of most tokens per second among those that fit; where none does, the smallest."""
    fitting = [each for each in advice.outlooks if _fits(each, gpu_memory_gib)]
    if not fitting:
        return min(advice.outlooks, key=lambda each: each.fullest_bytes)
    return max(fitting, key=lambda each: each.tokens_per_second_per_gpu)


def findings(advice: Advice, gpu_memory_gib: float, best: Outlook) -> list[str]:
    """What follows from the numbers, in sentences; ``best`` is the outlook they are about."""
    choice = best.choice
    name = (
        f"block size {choice.block_size}, base budget {choice.base_budget}, "
        f"{choice.micro_batches} micro-batches, context parallel {choice.context_parallel_size}"
    )
    if not _fits(best, gpu_memory_gib):
        return [
            f"No choice fits {gpu_memory_gib:g} GiB. The smallest is {name}, with "
            f"{best.fullest_bytes / GIBIBYTE:.3g} GiB on its fullest stage: raise --tp, --pp or "
            "--context-parallel-sizes, use more micro-batches, or --recompute full."
        ]
    sentences = [
        f"Fastest that fits {gpu_memory_gib:g} GiB: {name}. How well a model learns is not "
        "predicted: of choices that are about as fast take the larger budget x block size."
    ]
    if best.dense_tokens_share > _MOSTLY_DENSE:
        sentences.append(
            f"{best.dense_tokens_share:.0%} of the tokens stay dense: sparse attention has little "
            "to save on these samples, and what is gained comes from balance."
        )
    if best.router_share > _MUCH_ROUTING:
        sentences.append(
            f"Selecting blocks takes {best.router_share:.0%} of the compute time: a larger block "
            "size makes it cheaper."
        )
    if best.bubble_share > _MUCH_WAITING:
        sentences.append(
            f"{best.bubble_share:.0%} of the GPUs' time is not filled: more micro-batches (a larger"
            " --global-batch) shorten the pipeline's bubble, and --context-parallel-sizes above 1 "
            "share samples too long for one rank."
        )
    return sentences


def show(console: Console, advice: Advice, gpu_memory_gib: float) -> None:
    """Print one row per choice."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for outlook in advice.outlooks:
        table.add_row(*_cells(outlook, gpu_memory_gib))
    console.print(table)
    for name, meaning in _LEGEND.items():
        console.print(f"{name}: {meaning}", markup=False, highlight=False)


def _fits(outlook: Outlook, gpu_memory_gib: float) -> bool:
    return outlook.fullest_bytes <= gpu_memory_gib * GIBIBYTE


def _cells(outlook: Outlook, gpu_memory_gib: float) -> list[str]:
    choice = outlook.choice
    return [
        *(str(choice.block_size), str(choice.base_budget), str(choice.micro_batches)),
        str(choice.context_parallel_size),
        f"{outlook.dense_tokens_share:.0%}",
        f"{outlook.router_share:.1%}",
        format(outlook.step_ms, ".0f" if outlook.step_ms >= 100 else ".3g"),
        f"{outlook.speedup_over_dense:.2f}x",
        f"{outlook.tokens_per_second_per_gpu:.0f}",
        f"{outlook.bubble_share:.0%}",
        f"{outlook.fullest_bytes / GIBIBYTE:.1f}{'' if _fits(outlook, gpu_memory_gib) else '*'}",
    ]
