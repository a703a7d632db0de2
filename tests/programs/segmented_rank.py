# SPDX-License-Identifier: Apache-2.0
"""One pipeline stage trains a step in segments and a step in one piece, in float64, and compares.

    segmented_rank.py DIRECTORY [STEPS]

leaves ``rank0.json`` and so on: greatest differences and what Megatron's hooks were told. Tokens of
a segment depend on the segments before it, as in attention, through a sum that is kept on the stage
and whose gradient is collected there. With STEPS it trains as many, in segments drawn by lot, and
leaves the number of reports.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from sparsebalance_megatron.megatron import cpu
from sparsebalance_megatron.megatron.planned_schedule import StepShape, as_planned
from sparsebalance_megatron.plan.pipeline.orders import SegmentedSchedule

RANK, STAGES = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HIDDEN = 3
STEPS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((4, 4, 2), (5,), (3, 1)),
    ((2, 2, 2, 2, 1),),
    ((1,), (1, 6), (2,), (2, 2, 3, 1), (7,)),
    ((3,), (1,)),
)
"""For each step and micro-batch, the tokens of its segments; other ranks may have several."""


class Earlier:
    """The sum of a micro-batch's earlier tokens on this stage, and the gradient of that sum."""

    def __init__(self) -> None:
        self.total_1H = torch.zeros(1, HIDDEN)
        self.gradient_1H = torch.zeros(1, HIDDEN)


class AddEarlier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, earlier: Earlier) -> Tensor:
        ctx.earlier = earlier
        out_TH = x_TH + earlier.total_1H
        earlier.total_1H = earlier.total_1H + x_TH.sum(0, keepdim=True)
        return out_TH

    @staticmethod
    def backward(ctx: Any, gradient_TH: Tensor) -> tuple[Tensor, None]:
        from_later_1H = ctx.earlier.gradient_1H
        ctx.earlier.gradient_1H = from_later_1H + gradient_TH.sum(0, keepdim=True)
        return gradient_TH + from_later_1H, None


class Stage(torch.nn.Module):
    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__()
        torch.manual_seed(RANK)
        self.config = config
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.input: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        (self.input,) = tensors

    def forward(self, tokens_T1H: Tensor, pieces: Sequence[int], earlier: Earlier) -> Tensor:
        x_T1H = tokens_T1H if self.input is None else self.input
        x_TH = torch.tanh(self.linear(x_T1H[:, 0]))
        if len(pieces) == 1:
            return AddEarlier.apply(x_TH, earlier)[:, None].clone()
        parts = x_TH.split(list(pieces))
        totals_1H = torch.stack([part_TH.sum(0, keepdim=True) for part_TH in parts]).cumsum(0)
        parts = [parts[0], *map(torch.add, parts[1:], totals_1H[:-1])]
        return torch.cat(parts)[:, None].clone()


class Segments:
    """Yields (tokens, pieces, state) of each segment; ``whole`` yields micro-batches."""

    def __init__(self, step: Sequence[Sequence[int]], *, whole: bool) -> None:
        self._cuts = [[pieces] if whole else [[tokens] for tokens in pieces] for pieces in step]
        self._whole = whole
        self._rest = self._all()

    def next_step(self) -> StepShape:
        number = len(self._cuts)
        if self._whole:
            return StepShape(number)
        order = SegmentedSchedule(tuple(map(len, self._cuts)))(STAGES, number, 1)
        return StepShape(number, order, [list(map(sum, pieces)) for pieces in self._cuts])

    def _all(self) -> Iterator[tuple[Tensor, Sequence[int], Earlier]]:
        generator = torch.Generator().manual_seed(7)
        for cuts in self._cuts:
            earlier, sizes = Earlier(), list(map(sum, cuts))
            tokens_T1H = torch.randn(sum(sizes), 1, HIDDEN, generator=generator)
            for segment_T1H, pieces in zip(tokens_T1H.split(sizes), cuts, strict=True):
                yield segment_T1H, pieces, earlier

    def __iter__(self) -> "Segments":
        return self

    def __next__(self) -> tuple[Tensor, Sequence[int], Earlier]:
        return next(self._rest)


def forward_step(data_iterator: Iterator[Any], model: Stage) -> Any:
    output = model(*next(data_iterator))

    def loss(output_T1H: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = output_T1H.square().sum()
        return total, torch.tensor(len(output_T1H)), {"loss": total.detach()}

    return output, loss


def train(
    step: Sequence[Sequence[int]], *, whole: bool, deallocate: bool, sync: bool
) -> dict[str, Any]:
    told: list[str] = []

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        told.append("off")
        yield
        told.append("on")

    def finalize(models: Any, tokens: Tensor, **unused: Any) -> None:
        told.append(f"finalize {int(tokens)}")

    config = ModelParallelConfig(
        pipeline_model_parallel_size=STAGES,
        pipeline_dtype=torch.float64,
        variable_seq_lengths=True,
        deallocate_pipeline_outputs=deallocate,
        no_sync_func=no_sync,
        grad_sync_func=(lambda parameters: told.append("sync")) if sync else None,
        finalize_model_grads_func=finalize,
    )
    config.hidden_size, config.calculate_per_token_loss = HIDDEN, True
    config.defer_embedding_wgrad_compute = False
    model = Stage(config)
    model.linear.weight.register_hook(lambda _: told.append("backward"))
    reports = as_planned(get_forward_backward_func(), segments=True)(
        forward_step_func=forward_step,
        data_iterator=Segments(step, whole=whole),
        model=[model],
        num_microbatches=len(step),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    return {
        "loss": sum(float(report["loss"]) for report in reports),
        "gradients": [p.grad.flatten().tolist() for p in model.parameters()],
        "told": told,
    }


def drawn_steps() -> Iterator[list[list[int]]]:
    generator = np.random.default_rng(5)
    for _ in range(int(sys.argv[2])):
        counts = generator.integers(1, 7, generator.integers(1, 6))
        yield [generator.integers(1, 9, count).tolist() for count in counts]


def main() -> None:
    cpu.install()
    torch.set_default_dtype(torch.float64)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
    if len(sys.argv) > 2:
        runs = [train(step, whole=False, deallocate=True, sync=True) for step in drawn_steps()]
        Path(sys.argv[1], f"rank{RANK}.json").write_text(json.dumps(len(runs)))
        torch.distributed.destroy_process_group()
        return
    runs = [
        {
            "segments": sum(map(len, step)),
            "tokens": sum(map(sum, step)),
            "sync": sync,
            "cut": train(step, whole=False, deallocate=deallocate, sync=sync),
            "whole": train(step, whole=True, deallocate=deallocate, sync=sync),
        }
        for step in STEPS
        for deallocate in (False, True)
        for sync in (False, True)
    ]
    Path(sys.argv[1], f"rank{RANK}.json").write_text(json.dumps(runs))
    torch.distributed.destroy_process_group()


main()
