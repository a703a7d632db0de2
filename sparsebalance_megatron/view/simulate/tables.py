# SPDX-License-Identifier: Apache-2.0
"""Planned variants and advised choices as tables, and advice as sentences."""

from __future__ import annotations

from collections.abc import Mapping

from sparsebalance_megatron.cost.memory import GIBIBYTE
from sparsebalance_megatron.text_table import shown_ms, text_table, wrapped
from sparsebalance_megatron.view.simulate.advice import Advice, Outlook
from sparsebalance_megatron.view.simulate.variants import Outcome

_MOSTLY_DENSE = 0.8
_MUCH_ROUTING = 0.15
_MUCH_WAITING = 0.15

_VARIANT_LEGEND = {
    "speedup": "total time of the baseline over that of the row",
    "bound ratio": "step time over the least that any placement and allowed budgets could take",
    "imbal": "largest over mean time, of micro-batches and of ranks",
    "work ratio": "predicted work over that at base budgets: below 1 attention was cut",
    "base coverage": "the fastest step whose mean coverage is not below the base budgets'",
}
_CHOICE_LEGEND = {
    "dense tokens": "in documents that fit the budget whole: attention cannot get cheaper for them",
    "router share": "choosing blocks; where counted, dot products only, which is the least",
    "over dense": "time with dense attention and no router over this time",
    "bubble": "share of the GPUs' time that no micro-batch fills",
    "GiB": "of the fullest stage; * does not fit",
}


def variant_lines(outcomes: Mapping[str, Outcome], columns: int) -> list[str]:
    """Lines with one row per variant, at most so wide."""
    rows = [
        {
            "": name,
            "step\nms": shown_ms(outcome.makespan_ms),
            "speedup": f"{outcome.speedup:.2f}",
            "bound\nratio": f"{outcome.bound_ratio:.2f}",
            "batch\nimbal": f"{outcome.imbalance_microbatch:.2f}",
            "rank\nimbal": f"{outcome.imbalance_rank:.2f}",
            "coverage": "-" if outcome.coverage_mean is None else f"{outcome.coverage_mean:.3f}",
            "work\nratio": f"{outcome.work_ratio:.2f}",
            "plan\nms": f"{outcome.plan_ms:.1f}",
        }
        for name, outcome in outcomes.items()
    ]
    return text_table(rows, columns=columns)


def variant_legend(columns: int) -> list[str]:
    """The columns of :func:`variant_lines`, explained."""
    return _legend(_VARIANT_LEGEND, columns)


def choice_lines(advice: Advice, gpu_memory_gib: float, columns: int) -> list[str]:
    """Lines with one row per choice."""
    rows = [
        {
            "block\nsize": str(outlook.choice.block_size),
            "base\nbudget": str(outlook.choice.base_budget),
            "micro\nbatches": str(outlook.choice.micro_batches),
            "context\nparallel": str(outlook.choice.context_parallel_size),
            "dense\ntokens": f"{outlook.dense_tokens_share:.0%}",
            "router\nshare": f"{outlook.router_share:.1%}",
            "step\nms": shown_ms(outlook.step_ms),
            "over\ndense": f"{outlook.speedup_over_dense:.2f}x",
            "tokens/s\nper GPU": f"{outlook.tokens_per_second_per_gpu:.0f}",
            "bubble": f"{outlook.bubble_share:.0%}",
            "GiB": f"{outlook.fullest_bytes / GIBIBYTE:.1f}"
            + ("" if _fits(outlook, gpu_memory_gib) else "*"),
        }
        for outlook in advice.outlooks
    ]
    return [*text_table(rows, columns=columns, keys=4), *_legend(_CHOICE_LEGEND, columns)]


def _legend(meanings: Mapping[str, str], columns: int) -> list[str]:
    return [
        line
        for name, meaning in meanings.items()
        for line in wrapped(f"{name}: {meaning}", columns)
    ]


def best_fitting(advice: Advice, gpu_memory_gib: float) -> Outlook:
    """The outlook of most tokens per second among those that fit; where none does, the smallest."""
    fitting = [each for each in advice.outlooks if _fits(each, gpu_memory_gib)]
    if not fitting:
        return min(advice.outlooks, key=lambda each: each.fullest_bytes)
    return max(fitting, key=lambda each: each.tokens_per_second_per_gpu)


def findings(advice: Advice, gpu_memory_gib: float, best: Outlook) -> list[str]:
    """Conclusions from the numbers, in sentences; ``best`` is the outlook that they are about."""
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


def _fits(outlook: Outlook, gpu_memory_gib: float) -> bool:
    return outlook.fullest_bytes <= gpu_memory_gib * GIBIBYTE
