# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance advise``: the layout in which a job is predicted to be fastest."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from itertools import product

from sparsebalance_megatron.cli.output import print_json, print_wrapped
from sparsebalance_megatron.cli.prediction_flags import (
    add_prediction_flags,
    check_flags,
    costs_of,
    progress_bar,
    samples_of,
    scenario_of,
)
from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.memory import GIBIBYTE, memory_lines
from sparsebalance_megatron.plan.job import whole_parts
from sparsebalance_megatron.predict.even_stages import even_stages
from sparsebalance_megatron.predict.layouts import Advice, Choice, advise
from sparsebalance_megatron.predict.outcome import MOST_TRIES, break_even_slowness
from sparsebalance_megatron.predict.workload import Workload
from sparsebalance_megatron.text_table import terminal_columns
from sparsebalance_megatron.view.predictions import (
    WEIGHTS_SOURCE,
    break_even_line,
    choice_lines,
    findings,
    header_line,
    remarks,
)


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``advise``."""
    parser.description = (
        "Look for the layout in which your samples and your model are predicted to train fastest "
        "within the GPUs' memory, at no less coverage. Give several values of a flag to compare "
        "them. Times are estimated from counted operations unless a cost table is given."
    )
    parser.add_argument("--gpus", type=int, required=True, help="of the job")
    parser.add_argument("--global-batch", type=int, required=True, help="samples of a step")
    for names, default, text in (
        (("--tp",), [1], "tensor-parallel ranks"),
        (("--pp",), [1], "pipeline stages"),
        (("--cp", "--context-parallel-sizes"), [1], "ranks that share a sample"),
        (("--ep",), [1], "expert-parallel ranks"),
        (("--block-sizes",), None, "tokens; default: 256, or that of the cost table"),
        (("--base-budgets",), [SparseBalanceConfig.base_budget], "blocks"),
        (("--micro-batches",), None, "per rank and step; default: one sample in each"),
    ):
        dest = names[-1][2:].replace("-", "_")
        parser.add_argument(
            *names, dest=dest, type=int, nargs="+", default=default, metavar="N", help=text
        )
    add_prediction_flags(parser)


def run(arguments: Namespace) -> int:
    """Predict every choice, print."""
    check_flags(arguments)
    progress = progress_bar("advise")
    costs, batch = costs_of(arguments), arguments.global_batch
    samples = samples_of(arguments, arguments.steps * batch)
    batches = samples.batches(batch, arguments.steps)

    def workload_of(choice: Choice) -> Workload:
        sizes = {"--tp": choice.tensor_parallel_size, "--pp": choice.pipeline_stages}
        ranks = whole_parts(arguments.gpus, "--gpus", sizes)
        scenario = scenario_of(arguments, costs, samples, choice, ranks=ranks, global_batch=batch)
        return scenario.workload(batches)

    found = advise(
        _choices(arguments, costs.block_size), workload_of, arguments.gpu_memory, progress
    )
    best = found.best
    slowness = break_even_slowness(
        best.workload,
        best.sparse,
        best.dense,
        progress_bar("break-even")(MOST_TRIES * len(batches)),
    )
    stages = even_stages(best.workload)
    header = header_line(best.workload, recompute=arguments.recompute, order=samples.order)
    sentences = [
        *findings(found, arguments.gpu_memory),
        break_even_line(best.workload, slowness),
        *([] if stages is None else [str(stages)]),
        *remarks(best.workload),
    ]
    if arguments.json:
        print_json(
            {
                "header": header,
                "costs": best.workload.cost.source,
                "memory": WEIGHTS_SOURCE,
                "advice": sentences,
                "break_even_slowness": slowness,
                "layers_per_stage": None if stages is None else stages.layers,
                "left_out": found.left_out,
                "choices": _choices_json(found),
            }
        )
        return 0
    print_wrapped([header])
    print("\n".join(choice_lines(found, terminal_columns())))
    print_wrapped(
        [
            *sentences,
            *memory_lines(best.sparse.stages, best.sparse.stages_at_most, WEIGHTS_SOURCE),
            *(f"left out: {reason}" for reason in found.left_out),
        ]
    )
    return 0


def _choices_json(found: Advice) -> list[dict[str, object]]:
    return [
        {
            "choice": asdict(each.choice),
            "speedup_over_dense": each.speedup_over_dense,
            "covers_less": found.covers_less(each),
            "at_most_gib": each.sparse.at_most_bytes / GIBIBYTE,
            **asdict(each.sparse),
        }
        for each in found.predictions
    ]


def _choices(arguments: Namespace, block_size: int) -> list[Choice]:
    """Combinations whose ranks are whole; those of others are left out where they are predicted."""
    found = []
    for tp, pp, cp, ep, block, budget in product(
        arguments.tp,
        arguments.pp,
        arguments.context_parallel_sizes,
        arguments.ep,
        arguments.block_sizes or [block_size],
        arguments.base_budgets,
    ):
        one_sample_each = max(1, arguments.global_batch * cp // max(1, arguments.gpus // (tp * pp)))
        for micro_batches in arguments.micro_batches or [one_sample_each]:
            found.append(
                Choice(
                    tensor_parallel_size=tp,
                    pipeline_stages=pp,
                    context_parallel_size=cp,
                    expert_parallel_size=ep,
                    micro_batches=micro_batches,
                    block_size=block,
                    base_budget=budget,
                )
            )
    return found
