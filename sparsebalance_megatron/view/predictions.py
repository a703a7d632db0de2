# SPDX-License-Identifier: Apache-2.0
"""Predicted outcomes as tables, and what follows from them as sentences."""

from __future__ import annotations

from collections.abc import Mapping

from sparsebalance_megatron.cost.memory import GIBIBYTE
from sparsebalance_megatron.predict.layouts import Advice, named
from sparsebalance_megatron.predict.outcome import Outcome
from sparsebalance_megatron.predict.rows import ROWS_LEGEND
from sparsebalance_megatron.predict.workload import Workload
from sparsebalance_megatron.text_table import shown_ms, text_table, wrapped

_MOSTLY_DENSE = 0.8
_MUCH_ROUTING = 0.15
_MUCH_WAITING = 0.15
_ROWS_SHOWN = 24

WEIGHTS_SOURCE = (
    "weights, gradients and optimizer with the formula of Megatron's theoretical_memory_usage, for "
    "--sequence-parallel and --use-distributed-optimizer"
)
_ROW_COLUMNS = {
    "speedup": "total time of the baseline over that of the row",
    "bound ratio": "step time over the least that any placement and allowed budgets could take",
    "imbal": "largest over mean time, of micro-batches and of ranks",
    "work ratio": "predicted work over that at base budgets: below 1 attention was cut",
}
_CHOICE_COLUMNS = {
    "coverage": "router coverage of the base budgets, by the prior (k/n)^0.35; * below the "
    "reference's",
    "over dense": "time with dense attention, placed alike, over this time",
    "bubble": "share of the GPUs' time that no micro-batch fills",
    "GiB at most": "of the fullest stage, with every micro-batch at the token cap",
}


def header_line(workload: Workload, *, recompute: str, order: str) -> str:
    """Line above every prediction: what numbers depend on besides job and data."""
    steps = len(workload.batches)
    return (
        f"{steps} step{'s' if steps != 1 else ''}, recompute {recompute}, order {order}; costs: "
        f"{workload.cost.source}"
    )


def remarks(workload: Workload) -> list[str]:
    """What a prediction leaves out of this job."""
    job, memory = workload.job, workload.memory
    found = []
    if memory.shape.experts is not None:
        found.append(
            "experts: every expert is taken to get as many tokens as the others; how far routing "
            "is from that is not known here and comes on top, in time and in memory"
        )
    if job.lockstep_ranks > 1:
        found.append(
            f"groups of {job.lockstep_ranks} data-parallel ranks wait for one another in every "
            "layer: a step takes the slowest of each group, layer by layer"
        )
    if memory.shape.tensor_parallel_size > 1:
        found.append(
            "tensor parallelism: what its ranks send one another takes no time here, which "
            "flatters layouts with more of it"
        )
    if memory.sharded_parameters:
        found.append("sharded parameters: gathering them takes no time here")
    if len({sum(map(len, stage)) for stage in job.stage_layers}) > 1:
        found.append(
            f"{job.layers} layers on {job.pipeline_stages} stages are uneven: Megatron needs "
            "--pipeline-model-parallel-layout for that"
        )
    return found


def break_even_line(workload: Workload, slowness: float) -> str:
    """Sentence of what sparse attention must reach for the job to gain over dense attention.

    Args:
        slowness: from :func:`.break_even_slowness`.
    """
    efficiency = workload.cost.efficiency
    if efficiency is None:
        if slowness == 0.0:
            return "break-even: no sparse attention makes this job faster than dense attention"
        return (
            f"break-even: this job gains over dense attention while sparse attention takes less "
            f"than {slowness:.2f} times as long as in the cost table"
        )
    share = efficiency.sparse / slowness if slowness else float("inf")
    if share > 1.0:
        return (
            "break-even: this job cannot gain over dense attention, whatever share of the peak "
            "sparse attention reaches"
        )
    return (
        f"break-even: sparse attention must reach {share:.0%} of peak for this job to gain over "
        f"dense attention at {efficiency.dense:.0%}; predictions above take {efficiency.sparse:.0%}"
    )


def outcome_lines(outcomes: Mapping[str, Outcome], columns: int) -> list[str]:
    """Lines with one row per way to plan, at most so wide."""
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


def outcome_legend(outcomes: Mapping[str, Outcome], columns: int) -> list[str]:
    """Columns and rows of :func:`outcome_lines`, explained."""
    rows = {
        name: meaning
        for name, meaning in ROWS_LEGEND.items()
        if name in outcomes or any(row.endswith(name) for row in outcomes)
    }
    return _legend(_ROW_COLUMNS | rows, columns)


def memory_sentence(outcome: Outcome) -> str:
    """Memory of the fullest stage in the steps that were planned, and at most."""
    held = max(stage.total_bytes for stage in outcome.stages)
    return (
        f"memory: {held / GIBIBYTE:.1f} GiB of the fullest rank in these steps, at most "
        f"{outcome.at_most_bytes / GIBIBYTE:.1f} with every micro-batch at the token cap (counted)"
    )


def choice_lines(advice: Advice, columns: int) -> list[str]:
    """Lines with one row per choice, the best first."""
    rows = [
        {
            "TP": str(each.choice.tensor_parallel_size),
            "PP": str(each.choice.pipeline_stages),
            "CP": str(each.choice.context_parallel_size),
            "EP": str(each.choice.expert_parallel_size),
            "micro\nbatches": str(each.choice.micro_batches),
            "block\nsize": str(each.choice.block_size),
            "base\nbudget": str(each.choice.base_budget),
            "step\nms": shown_ms(each.sparse.makespan_ms),
            "coverage": f"{each.sparse.coverage_base:.3f}"
            + ("*" if advice.covers_less(each) else ""),
            "over\ndense": f"{each.speedup_over_dense:.2f}x",
            "tokens/s\nper GPU": f"{each.sparse.tokens_per_second_per_gpu:.0f}",
            "bubble": f"{each.sparse.bubble_share:.0%}",
            "GiB\nat most": f"{each.sparse.at_most_bytes / GIBIBYTE:.1f}",
        }
        for each in advice.predictions[:_ROWS_SHOWN]
    ]
    lines = text_table(rows, columns=columns, keys=7)
    if (hidden := len(advice.predictions) - _ROWS_SHOWN) > 0:
        lines.append(f"({hidden} slower choices are left out here; --json has them)")
    return [*lines, *_legend(_CHOICE_COLUMNS, columns)]


def _legend(meanings: Mapping[str, str], columns: int) -> list[str]:
    return [
        line
        for name, meaning in meanings.items()
        for line in wrapped(f"{name}: {meaning}", columns)
    ]


def findings(advice: Advice, gpu_memory_gib: float) -> list[str]:
    """Conclusions from the numbers, in sentences."""
    best = advice.best
    if not advice.fits:
        return [
            f"No choice fits {gpu_memory_gib:g} GiB with every micro-batch at the token cap. The "
            f"smallest is {named([best.choice])}: raise --tp, --pp, --cp or --ep, use --recompute "
            "full, or lower --max-tokens-per-micro-batch."
        ]
    sentences = [
        f"Fastest that fits {gpu_memory_gib:g} GiB at no less coverage than "
        f"{advice.reference_coverage:.3f}: {named([best.choice])}."
    ]
    faster = [
        each
        for each in advice.predictions
        if advice.covers_less(each) and each.sparse.makespan_ms < best.sparse.makespan_ms
    ]
    if faster:
        first = min(faster, key=lambda each: each.sparse.makespan_ms)
        sentences.append(
            f"With less coverage ({first.sparse.coverage_base:.3f}) {named([first.choice])} takes "
            f"{shown_ms(first.sparse.makespan_ms)} ms; how well a model then learns is not "
            "predicted."
        )
    outcome = best.sparse
    if outcome.dense_tokens_share > _MOSTLY_DENSE:
        sentences.append(
            f"{outcome.dense_tokens_share:.0%} of the tokens stay dense: sparse attention has "
            "little to save on these samples, and what is gained comes from balance."
        )
    if outcome.router_share > _MUCH_ROUTING:
        sentences.append(
            f"Selecting blocks takes {outcome.router_share:.0%} of the compute time: a larger block"
            " size makes it cheaper."
        )
    if outcome.bubble_share > _MUCH_WAITING:
        sentences.append(
            f"{outcome.bubble_share:.0%} of the GPUs' time is not filled: more micro-batches (a "
            "larger --global-batch) fill more of it, and --cp above 1 shares samples too long for "
            "one rank."
        )
    return sentences
