# SPDX-License-Identifier: Apache-2.0
"""Trains with the host of docs/INTEGRATION.md on gloo ranks; what happened goes to a JSON file.

Usage: host_loop.py HOST.py OUTPUT_DIRECTORY. HOST.py holds the document's code block as it stands.
Two ranks run their micro-batches alone and make mistakes, four share them; one rank is what both
are compared with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sparsebalance_megatron.megatron import cpu

cpu.install()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from own_loop import (  # noqa: E402
    Losses,
    balance_config,
    error_of,
    load_trainer,
    pipeline,
    transformer_config,
)

from sparsebalance_megatron import integration  # noqa: E402
from sparsebalance_megatron.attention.select import selector_named  # noqa: E402

SIZES = {"vocab_size": 256, "max_sample_tokens": 250, "global_batch_size": 8}
DENSE = 1000
STEPS = 4
TUNED: dict[str, Any] = {"coverage_target": "threshold", "coverage_threshold": 0.3}


def batches(count: int = STEPS, first: int = 0) -> list[list[torch.Tensor]]:
    """Every step has another number of samples, of long-tailed lengths."""
    made = []
    for step in range(first, first + count):
        generator = np.random.default_rng(step)
        lengths = np.clip(generator.lognormal(np.log(40), 0.9, 8 + 2 * (step % 2)), 4, 250)
        made.append([_tokens(generator, int(length) + 1) for length in lengths])
    return made


def _tokens(generator: np.random.Generator, length: int) -> torch.Tensor:
    return torch.as_tensor((generator.random(length) ** 3 * 255).astype(np.int64))


class ExecutedBudgets:
    """What a selector was asked for, by the lengths of the samples, while it is in place."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __enter__(self) -> ExecutedBudgets:
        self._kind = type(selector_named("token-kv-head"))
        self._select = self._kind.select

        def select(selector: Any, ranking: Any, budgets_S: torch.Tensor) -> Any:
            self.seen.append(budgets_S.tolist())
            return self._select(selector, ranking, budgets_S)

        self._kind.select = select
        return self

    def __exit__(self, *_: object) -> None:
        self._kind.select = self._select


def run(
    host: Any,
    stages: int,
    log: Losses,
    some: Any,
    state: Any = None,
    model: Mapping[str, Any] = MappingProxyType({}),
    **choices: Any,
) -> Any:
    config = balance_config(**{"calibration": "off", **choices})
    return host.train(transformer_config(stages, **model), config, SIZES, some, log, state)


def train_shared(host: Any) -> dict[str, Any]:
    """Dense; where a rank holds at most 64 tokens, and in layouts of which each has two groups."""
    # Counted operations take no time beside what travels at a bandwidth of this world.
    dense = {"base_budget": DENSE, "tuning": "off", "gigabytes_per_second": 1e5}
    layouts = {
        "data": (1, 1, {"max_context_parallel": 4, "max_tokens_per_micro_batch": 64}),
        "pipeline": (2, 1, {"max_context_parallel": 2, "max_tokens_per_micro_batch": 128}),
        "context": (1, 2, {"context_parallel": "static"}),
    }
    result: dict[str, Any] = {}
    run_schedule = host.run_schedule
    for name, (stages, cp_size, choices) in layouts.items():
        cp_sizes: set[int] = set()

        def recorded(run: Any, model: Any, planned: Any, batch: Any, seen: Any = cp_sizes) -> Any:
            seen |= {micro_batch.cp_size for micro_batch in planned.plan.micro_batches}
            return run_schedule(run, model, planned, batch)

        host.run_schedule, losses = recorded, Losses()
        with pipeline(stages, context_parallel_size=cp_size):
            context = {"context_parallel_size": cp_size}
            ended, _, model = run(
                host, stages, losses, batches(), None, context, **dense, **choices
            )
            host.run_schedule = run_schedule
            result[name] = {"losses": losses.values, "cp_sizes": sorted(cp_sizes)}
            if name == "data":
                result[name] |= shared_passes(host, ended, model)
    return result


def shared_passes(host: Any, ended: Any, model: Any) -> dict[str, Any]:
    """A pass that learns nothing, what a rank is given, and mistakes."""
    (batch,) = batches(1, 9)
    lengths = [len(sample) - 1 for sample in batch]
    rank = parallel_state.get_data_parallel_rank()
    planned = ended.planner.plan(lengths)
    host.run_schedule(ended, model, planned, batch, forward_only=True)
    held = []
    for position, micro_batch in enumerate(planned.plan.for_rank(rank).micro_batches):
        values = {
            "places": torch.arange(micro_batch.tokens, dtype=torch.float, requires_grad=True),
            "positions": torch.cat([torch.arange(each) for each in micro_batch.lengths_tokens]),
        }
        cut = integration.slice_of(ended, planned, position, values)
        whole = integration.whole_of(ended, planned, position, {"places": cut["places"]})["places"]
        whole.sum().backward()
        found = {**cut, "whole": whole, "own": values["places"].grad}
        held.append(
            {name: values.tolist() for name, values in found.items()}
            | {"first rank": micro_batch.rank}
        )

    def other_plans() -> None:
        step = planned if rank == 0 else ended.planner.plan(lengths, step=99)
        host.run_schedule(ended, model, step, batch, forward_only=True)

    own = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 5]))
    missing = {"labels": torch.zeros(3)}
    return {
        "held": held,
        "mistakes": {
            "own parameters": error_of(
                lambda: integration.attach(ended, planned, 0, own, model=model)
            ),
            "no model": error_of(lambda: integration.attach(ended, planned, 0)),
            "missing labels": error_of(lambda: integration.slice_of(ended, planned, 0, missing)),
            "other plans": error_of(other_plans),
        },
    }


def own_parameters(host: Any, ended: Any, model: Any) -> list[dict[str, float]]:
    """A step of a host that packs its sequences itself, with padding, and one where it does not."""
    (batch,) = batches(1, 9)
    planned = ended.planner.plan([len(sample) - 1 for sample in batch])
    attach, figures = integration.attach, []

    def attach_own(run: Any, planned: Any, position: int, **others: Any) -> Any:
        rank = parallel_state.get_data_parallel_rank()
        lengths = planned.plan.for_rank(rank).micro_batches[position].lengths_tokens
        boundaries = torch.tensor([0, *lengths]).cumsum(0).int()
        own = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        return attach(run, planned, position, own, **others)

    for way in (attach, attach_own):
        losses = Losses()
        integration.attach = way
        model.zero_grad_buffer()
        losses(host.run_schedule(ended, model, planned, batch), integration.on_step_end(ended))
        figures += losses.values
    integration.attach = attach
    return figures


def train(host: Any, stages: int) -> dict[str, Any]:
    with pipeline(stages):
        dense, tuned, resumed = Losses(), Losses(), Losses()
        run(host, stages, dense, batches(2), base_budget=DENSE, tuning="off")
        result: dict[str, Any] = {"dense": dense.values}
        if stages == 1:
            plain = Losses()
            run(host, stages, plain, batches(2), base_budget=DENSE, tuning="off", batching="length")
            result["otherwise placed"] = plain.values
            ended, _, model = run(host, stages, tuned, batches(), **TUNED)
            _, state, _ = run(host, stages, resumed, batches(2), **TUNED)
            run(host, stages, resumed, batches(2, 2), state, **TUNED)
            result |= {
                "tuned": tuned.values,
                "resumed": resumed.values,
                "figures": tuned.figures,
                "as placed": as_placed(ended),
                "own parameters": own_parameters(host, ended, model),
                "pinned": pinned_passes(host, ended, model),
                "mistakes": mistakes(host, ended, model),
            }
        return result


def pinned_passes(host: Any, ended: Any, model: Any) -> dict[str, Any]:
    """A forward-only pass and its update, with a guard that would raise what it may."""
    (batch,) = batches(1, 9)
    lengths = [len(sample) - 1 for sample in batch]
    planned = ended.planner.plan(lengths)
    with ExecutedBudgets() as forward:
        host.run_schedule(ended, model, planned, batch, forward_only=True)
    update = ended.planner.plan(lengths, pinned_LS=np.ones_like(planned.plan.budgets_LS))
    with ExecutedBudgets() as pinned:
        host.run_schedule(ended, model, update, batch)
    integration.on_step_end(ended)
    rank = parallel_state.get_data_parallel_rank()
    return {
        "forward": forward.seen,
        "forward planned": _by_layer(planned, rank),
        "update": pinned.seen,
        "update planned": _by_layer(update, rank),
        "free after": ended.planner.plan(lengths).plan.micro_batches[0].pinned,
    }


def as_placed(ended: Any) -> Any:
    """Each rank knows its own micro-batches; the plan is that of both."""
    rank = parallel_state.get_data_parallel_rank()
    plan = ended.plan_as_placed([[10 + rank, 20], [30]]).plan
    return [[each.rank, each.position, each.lengths_tokens] for each in plan.micro_batches]


def _by_layer(planned: Any, rank: int) -> list[list[int]]:
    micro_batches = planned.plan.for_rank(rank).micro_batches
    return [layer.tolist() for micro_batch in micro_batches for layer in micro_batch.budgets_LS]


def mistakes(host: Any, ended: Any, model: Any) -> dict[str, str]:
    """Name -> message, of everything a host can do wrong."""
    (batch,) = batches(1)
    planned = ended.planner.plan([len(sample) - 1 for sample in batch])
    rank = parallel_state.get_data_parallel_rank()

    def wrong_row() -> None:
        boundaries = torch.tensor([0, 5, 9], dtype=torch.int32)
        row = PackedSeqParams(qkv_format="thd", cu_seqlens_q=boundaries)
        integration.attach(ended, planned, 0, row)

    def half_a_step() -> None:
        host.run_schedule(ended, model, planned, batch)
        if rank == 1:
            ended._run.seen.pop()
        integration.on_step_end(ended)

    def other_plans() -> None:
        ended._run.begin_step()
        step = planned if rank == 0 else ended.planner.plan([len(s) - 1 for s in batch], step=99)
        host.run_schedule(ended, model, step, batch)
        integration.on_step_end(ended)

    def never_ended() -> None:
        host.run_schedule(ended, model, ended.planner.plan([9] * 4), [batch[0][:10]] * 4)

    return {
        "wrong row": error_of(wrong_row),
        "other format": error_of(
            lambda: integration.attach(ended, planned, 0, PackedSeqParams(qkv_format="sbhd"))
        ),
        "no such micro-batch": error_of(lambda: integration.attach(ended, planned, 99)),
        "one rank only": error_of(half_a_step),
        "other plans": error_of(other_plans),
        "step never ended": error_of(never_ended),
        "step log": error_of(lambda: run(host, 1, Losses(), (), log_dir="here")),
    }


def main(host_path: str, output: str) -> None:
    host = load_trainer(Path(host_path))
    dist.init_process_group("gloo")
    result: dict[str, Any] = {}
    if dist.get_world_size() == 2:
        result = {f"pp{stages}": train(host, stages) for stages in (1, 2)}
    elif dist.get_world_size() == 4:
        result = train_shared(host)
    else:
        with pipeline(1):
            alone = Losses()
            run(host, 1, alone, batches(), base_budget=DENSE, tuning="off")
            result["dense"] = alone.values
    result["loaded"] = sorted(name for name in sys.modules if name.startswith("megatron.training"))
    Path(output, f"world{dist.get_world_size()}-rank{dist.get_rank()}.json").write_text(
        json.dumps(result)
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
