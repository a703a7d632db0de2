# SPDX-License-Identifier: Apache-2.0
"""Placements of other frameworks against ours, by one cost model.

    python benchmarks/host_placements.py --hosts DIR

DIR holds checkouts DIR/slime, DIR/verl and DIR/Megatron-LM (main); their own functions place the
samples. Steps are those
of Qwen2.5-7B with counted operations of an H200, budgets are fixed, so only the placement differs.
The times are predicted by the model that ours minimises: they say what a placement leaves on the
table, not how long a step takes anywhere.

Shape legend: S samples, R data-parallel ranks, P pipeline stages, M micro-batches.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import heapq
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.learn.host_planner import HostJob, HostPlanner
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.view.simulate.lengths import GENERATORS
from sparsebalance_megatron.view.simulate.models import MODELS, counted_cost

RANKS, SAMPLES, BLOCK_SIZE, CAP_TOKENS = 8, 128, 256, 65_536
MODEL = MODELS["qwen2.5-7b"]
SELECTION = "previous-block"
OURS = "ours"
WORKLOADS = ("longalign", "prolong")
Placement = list[list[list[int]]]
"""[rank][position] -> samples."""


@dataclass
class Row:
    """What one way to place gave, a value per step."""

    step_ms: list[float] = field(default_factory=list)
    above_cap: int = 0
    micro_batches: int = 0
    cpu_s: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, and print a line per setup and way to place."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=Path, required=True, help="folder of checkouts")
    parser.add_argument("--steps", type=int, default=12, help="global batches of each setup")
    arguments = parser.parse_args(argv)
    places = {
        "verl": verl_placement(arguments.hosts / "verl"),
        **slime_placements(arguments.hosts / "slime"),
        "Megatron, dp_balanced": megatron_placement(arguments.hosts / "Megatron-LM"),
    }
    print("| lengths | stages | budget | placed by | step / ours | above the cap | CPU ms |")
    print("|---|---|---|---|---|---|---|")
    for stages in (1, 4):
        for budget, name in ((32, "32"), (CAP_TOKENS // BLOCK_SIZE, "dense")):
            for workload in WORKLOADS:
                rows = compare(places, workload, stages, budget, arguments.steps)
                for who, row in rows.items():
                    ratio = np.divide(row.step_ms, rows[OURS].step_ms)
                    print(
                        f"| {workload} | {stages} | {name} | {who} | {ratio.mean():.3f} "
                        f"({ratio.min():.3f} to {ratio.max():.3f}) "
                        f"| {row.above_cap} of {row.micro_batches} "
                        f"| {1e3 * float(np.mean(row.cpu_s)):.0f} |",
                        flush=True,
                    )


def compare(
    places: dict[str, Callable[[list[int]], Placement]],
    workload: str,
    stages: int,
    budget: int,
    steps: int,
) -> dict[str, Row]:
    """All ways to place on the same steps; ours last."""
    planner = make_planner(stages, budget)
    lengths = np.minimum(GENERATORS[workload](SAMPLES * steps, 0), CAP_TOKENS)
    rows = {who: Row() for who in (*places, OURS)}
    for batch in lengths.reshape(steps, SAMPLES).tolist():
        for who, row in rows.items():
            began_s = time.process_time()
            planned = planner.plan(batch) if who == OURS else places[who](batch)
            row.cpu_s.append(time.process_time() - began_s)
            if not isinstance(planned, PlannedStep):
                planned = planner.plan(batch, placement=planned)
            micro_batches = planned.plan.micro_batches
            row.step_ms.append(planned.plan.expectation.makespan_ms)
            row.above_cap += sum(micro_batch.tokens > CAP_TOKENS for micro_batch in micro_batches)
            row.micro_batches += len(micro_batches)
    return rows


def make_planner(stages: int, budget: int) -> HostPlanner:
    """Ours, with fixed budgets; it also says what any other placement takes."""
    per_stage = -(-MODEL.layers // stages)
    layers = tuple(range(MODEL.layers))
    job = HostJob(
        layout=Job(
            stage_layers=tuple((layers[s * per_stage :][:per_stage],) for s in range(stages)),
            data_parallel_size=RANKS,
        ),
        shape=MODEL.shape,
        max_sample_tokens=CAP_TOKENS,
        global_batch_size=SAMPLES,
    )
    config = SparseBalanceConfig(
        block_size=BLOCK_SIZE,
        base_budget=budget,
        selection=SELECTION,
        tuning="off",
        max_tokens_per_micro_batch=CAP_TOKENS,
    )
    cost = counted_cost(MODEL, block_size=BLOCK_SIZE, selection=SELECTION)
    return HostPlanner(config, job, cost=cost)


def verl_placement(checkout: Path) -> Callable[[list[int]], Placement]:
    """As verl's trainer deals samples to ranks and its engine cuts them into micro-batches.

    Its functions are taken out of their file, which imports torch and Ray's protocol.
    """
    own = taken_out(
        checkout / "verl" / "utils" / "seqlen_balancing.py",
        *("calculate_workload", "karmarkar_karp", "get_seqlen_balanced_partitions"),
    )

    def place(lengths: list[int]) -> Placement:
        work = [own["calculate_workload"](tokens) for tokens in lengths]
        of_rank = own["get_seqlen_balanced_partitions"](work, RANKS, True)
        # Every rank takes the largest number that one needs, as rearrange_micro_batches does.
        count = max(-(-sum(lengths[i] for i in mine) // CAP_TOKENS) for mine in of_rank)
        placement = []
        for mine in of_rank:
            weights = [work[i] for i in mine]
            groups = own["get_seqlen_balanced_partitions"](weights, count, False)
            groups.sort(key=lambda group: -sum(weights[i] for i in group))
            # The smallest at both ends, as use_dynamic_bsz_balance has them.
            groups = groups[::2][::-1] + groups[1::2]
            placement.append([[mine[i] for i in group] for group in groups])
        return placement

    return place


def megatron_placement(checkout: Path) -> Callable[[list[int]], Placement]:
    """Megatron's ``DpBalancedScheduler``: samples in order of arrival, packed up to the cap."""
    own = taken_out(
        checkout / "megatron" / "core" / "datasets" / "data_schedule.py",
        *("BasePackingScheduler", "DpBalancedScheduler"),
    )
    scheduler = own["DpBalancedScheduler"](CAP_TOKENS, 1, RANKS, None)

    def place(lengths: list[int]) -> Placement:
        groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)))
        return [[group[rank] for group in groups] for rank in range(RANKS)]

    return place


def taken_out(path: Path, *wanted: str) -> dict[str, Any]:
    """Functions and classes of a file whose imports are not installed here."""
    tree = ast.parse(path.read_text("utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", None) in wanted]
    names: dict[str, Any] = {"heapq": heapq}
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(path), "exec", flags=flags), names)
    return names


def slime_placements(checkout: Path) -> dict[str, Callable[[list[int]], Placement]]:
    """slime's ``build_dp_schedule``, ranks balanced by its count of dense operations.

    Micro-batches are packed by tokens, or with ``--balance-by-flops`` by operations.
    """
    sys.path.insert(0, str(checkout))
    from slime.utils.dp_schedule import build_dp_schedule

    layout = dict(dp_size=RANKS, cp_size=1, vpp_size=1, microbatch_group_size_per_vp_stage=1)
    shape = MODEL.shape

    def placed(lengths: list[int], by_flops: bool) -> Placement:
        args = SimpleNamespace(
            hidden_size=shape.hidden_size,
            ffn_hidden_size=shape.ffn_hidden_size,
            num_attention_heads=shape.num_attention_heads,
            num_query_groups=shape.num_query_groups,
            kv_channels=shape.head_dim,
            vocab_size=shape.vocab_size,
            num_layers=MODEL.layers,
            num_experts=None,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=CAP_TOKENS,
            balance_data=True,
            balance_by_flops=by_flops,
        )
        samples_of, places_of, *_ = build_dp_schedule(
            args,
            layout,
            lengths,
            global_batch_size=len(lengths),
            rollout_indices=list(range(len(lengths))),
        )
        return [
            [[samples[place] for place in places] for places in row]
            for samples, row in zip(samples_of, places_of, strict=True)
        ]

    return {
        "slime, by tokens": lambda lengths: placed(lengths, False),
        "slime, by operations": lambda lengths: placed(lengths, True),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
