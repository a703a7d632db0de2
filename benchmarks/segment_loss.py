# SPDX-License-Identifier: Apache-2.0
"""What it costs to run one sample in segments: time of the pieces together over time in one piece.

    python benchmarks/segment_loss.py --json benchmarks/results/segment_loss.json
    python benchmarks/segment_loss.py --quick    # seconds; its times say little

A sample passes in 1, 2, 4, 8 segments of whole blocks: forward in order, backward in reverse order,
each over the keys of all before it. Three things are timed, as training runs them: attention by
given lists, selection of the lists (router, coverage, guard), and one layer of Megatron with both.
Outputs and gradients must agree with those of one piece before anything is timed.

Every round runs each number of segments once, so that what disturbs the machine disturbs all. Time
is the process's processor time on the CPU, wall time of a finished device on CUDA. Reported: median
ms, and the median over rounds of the ratio to one piece, with the ratios' 95 % bootstrap interval.
Above 1, segments cost time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from end_to_end.command import cpu_name
from torch import Tensor

from sparsebalance_megatron.config import DEFAULT_SELECTION
from sparsebalance_megatron.megatron import cpu

RESAMPLES = 10_000
type Times = dict[str, float]
"""Seconds by direction."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One sample, and the layer that it passes."""

    device: torch.device
    dtype: torch.dtype
    tokens: int
    block_size: int
    budget: int
    query_heads: int
    kv_heads: int
    head_dim: int

    def first_blocks(self, segments: int) -> tuple[int, ...]:
        blocks = -(-self.tokens // self.block_size)
        return tuple(blocks * segment // segments for segment in range(segments))

    def seconds(self) -> float:
        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(1)
    device = torch.device(options.device)
    if device.type == "cpu":
        cpu.install()
    from sparsebalance_megatron.megatron.single_process import start_single_process

    start_single_process(1234, device)
    workload = Workload(
        device=device,
        dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
        tokens=options.tokens,
        block_size=options.block_size,
        budget=options.budget,
        query_heads=options.query_heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
    )
    result = {
        "machine": {
            "processor": cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "threads": 1,
            "load_at_start": os.getloadavg()[0],
        },
        "date": datetime.now(UTC).date().isoformat(),
        "workload": {name: _plain(value) for name, value in vars(workload).items()},
        "selection": DEFAULT_SELECTION,
        "rounds": options.rounds,
        "time_over_one_segment": _compare(workload, options.segments, options.rounds),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write as well")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after an untimed one")
    parser.add_argument("--segments", type=int, nargs="+", default=[2, 4, 8])
    for name, default in (
        *(("tokens", 16384), ("block-size", 256), ("budget", 8)),
        *(("query-heads", 4), ("kv-heads", 2), ("head-dim", 64)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quick", action="store_true", help="1,024 tokens, two rounds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.block_size, options.rounds = 1024, 64, 2
    return options


def _compare(
    workload: Workload, segment_counts: list[int], rounds: int
) -> dict[str, dict[str, Any]]:
    counts = [1, *segment_counts]
    layer = Layer(workload)
    runs: dict[str, dict[int, Callable[[], Times]]] = {
        "attention": {n: Attention(workload, n).times for n in counts},
        "layer": {n: lambda n=n: layer.times(n) for n in counts},
    }
    layer.check(counts)
    compared = {}
    for name, by_count in runs.items():
        seconds = {n: [] for n in counts}
        for timed in [False] + [True] * rounds:
            for n, run in by_count.items():
                times = run()
                if timed:
                    seconds[n].append(times)
        compared |= _over_one(name, seconds, workload.tokens)
    return compared


def _over_one(name: str, seconds: dict[int, list[Times]], tokens: int) -> dict[str, dict[str, Any]]:
    compared: dict[str, dict[str, Any]] = {}
    for direction in seconds[1][0]:
        one = np.array([times[direction] for times in seconds[1]])
        entry = compared[f"{name} {direction}"] = {"one_segment_ms": float(np.median(one)) * 1e3}
        for count, rounds in seconds.items():
            if count > 1:
                ratios = np.array([times[direction] for times in rounds]) / one
                entry[f"{count} segments of {tokens // count} tokens"] = _interval(ratios)
    return compared


def _interval(ratios: np.ndarray) -> dict[str, float]:
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(ratios, (RESAMPLES, len(ratios))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return {"median": statistics.median(ratios), "low": float(low), "high": float(high)}


class Attention:
    """Attention and selection of one sample in so many segments."""

    def __init__(self, workload: Workload, segments: int) -> None:
        from sparsebalance_megatron.attention.sequence.earlier_segments import segment_slice

        self._workload = workload
        generator = torch.Generator(device=workload.device).manual_seed(0)
        heads = (workload.query_heads, workload.kv_heads, workload.kv_heads, workload.query_heads)
        *inputs, self._dout_THD = (
            torch.randn(
                *(workload.tokens, count, workload.head_dim),
                generator=generator,
                dtype=workload.dtype,
                device=workload.device,
            )
            for count in heads
        )
        self._slices = [
            segment_slice(
                (0, workload.tokens),
                workload.first_blocks(segments),
                segment,
                block_size=workload.block_size,
                device=workload.device,
            )
            for segment in range(segments)
        ]
        self._pieces = [slice(held.tokens_T[0], held.tokens_T[-1] + 1) for held in self._slices]
        self._inputs = [
            [x[piece].clone().requires_grad_() for x in inputs] for piece in self._pieces
        ]

    def times(self) -> Times:
        from sparsebalance_megatron.attention.sequence.earlier_segments import EarlierSegments
        from sparsebalance_megatron.attention.sequence.exchange import sequence_attention

        workload, scale = self._workload, self._workload.head_dim**-0.5
        seconds, kept = workload.seconds, EarlierSegments()
        # One segment is what training runs without segments: no exchange.
        exchange = kept if len(self._slices) > 1 else None
        selections, outputs, marks = [], [], [seconds()]
        for held, (q, k, _) in zip(self._slices, self._inputs, strict=True):
            selections.append(self._select(q, k, held, exchange))
        marks.append(seconds())
        for held, selection, inputs in zip(self._slices, selections, self._inputs, strict=True):
            out_THD, _ = sequence_attention(
                *(*inputs, selection, held), exchange=exchange, softmax_scale=scale
            )
            outputs.append(out_THD)
        marks.append(seconds())
        for piece, out_THD, inputs in reversed(
            list(zip(self._pieces, outputs, self._inputs, strict=True))
        ):
            torch.autograd.grad(out_THD, inputs, self._dout_THD[piece])
        marks.append(seconds())
        return dict(zip(("selection", "forward", "backward"), np.diff(marks), strict=True)) | {
            "forward and backward": marks[3] - marks[1]
        }

    @torch.no_grad()
    def _select(self, q: Tensor, k: Tensor, held: Any, exchange: Any) -> Any:
        from sparsebalance_megatron.attention.coverage import guard_budgets
        from sparsebalance_megatron.attention.select import selector_named
        from sparsebalance_megatron.attention.sequence.ranking import rank_slice

        selector, budget = selector_named(DEFAULT_SELECTION), self._workload.budget
        ranking = rank_slice(
            *(selector, q, k, held),
            exchange=exchange,
            softmax_scale=self._workload.head_dim**-0.5,
            max_budget=budget,
            observe=True,
        )
        budget_S = torch.full((1,), budget, dtype=torch.int32, device=q.device)
        guarded_S, _ = guard_budgets(
            selector.coverage(ranking), budget_S, base_budget=budget, threshold=0.1
        )
        return selector.select(ranking, guarded_S)


class Layer:
    """One layer of a Megatron GPT, as a pipeline stage between two others runs it."""

    def __init__(self, workload: Workload) -> None:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        from sparsebalance_megatron.attention.select import selector_named
        from sparsebalance_megatron.megatron.compat import (
            default_layer_spec,
            enable_variable_lengths,
        )
        from sparsebalance_megatron.megatron.core_attention import (
            AttentionOptions,
            replace_core_attention,
        )
        from sparsebalance_megatron.megatron.hooks import use_true_positions

        self._workload = workload
        hidden = workload.query_heads * workload.head_dim
        config = TransformerConfig(
            num_layers=1,
            hidden_size=hidden,
            ffn_hidden_size=3 * hidden,
            num_attention_heads=workload.query_heads,
            num_query_groups=workload.kv_heads,
            kv_channels=workload.head_dim,
            normalization="RMSNorm",
            activation_func=torch.nn.functional.silu,
            gated_linear_unit=True,
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            transformer_impl="local",
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            params_dtype=workload.dtype,
            bf16=workload.dtype is torch.bfloat16,
            pipeline_dtype=workload.dtype,
        )
        enable_variable_lengths(config)
        options = AttentionOptions(
            block_size=workload.block_size,
            base_budget=workload.budget,
            selector=selector_named(DEFAULT_SELECTION),
            coverage_threshold=0.1,
            implementation="auto",
            grid=(1, 2, 4, 8, 16, 32, 64),
        )
        self._model = GPTModel(
            config=config,
            transformer_layer_spec=replace_core_attention(
                default_layer_spec(config, None), options
            ),
            vocab_size=256,
            max_sequence_length=workload.tokens,
            pre_process=False,
            post_process=False,
            position_embedding_type="rope",
        ).to(device=workload.device, dtype=workload.dtype)
        use_true_positions(self._model)
        generator = torch.Generator(device=workload.device).manual_seed(3)
        self._hidden_T1h, self._gradient_T1h = (
            torch.randn(
                *(workload.tokens, 1, hidden),
                generator=generator,
                dtype=workload.dtype,
                device=workload.device,
            )
            for _ in range(2)
        )

    def check(self, counts: list[int]) -> None:
        """Raise SystemExit unless all counts give the outputs and gradients of one segment."""
        whole = None
        for count in counts:
            self.times(count)
            found = [self._output_T1h, *(weight.grad for weight in self._model.parameters())]
            whole = whole or found
            for one, other in zip(whole, found, strict=True):
                error = (one.float() - other.float()).norm() / one.float().norm()
                if error > (1e-5 if self._workload.dtype is torch.float32 else 0.02):
                    raise SystemExit(f"{count} segments differ by {error:.2g}: nothing was timed")

    def times(self, segments: int) -> Times:
        from sparsebalance_megatron.attention.sequence.earlier_segments import segment_slice
        from sparsebalance_megatron.megatron.packed_seq_params import local_micro_batches
        from sparsebalance_megatron.plan.step_plan import MicroBatchPlan

        workload, first_blocks = self._workload, self._workload.first_blocks(segments)
        plan = MicroBatchPlan(
            samples=(0,),
            lengths_tokens=(workload.tokens,),
            budgets_LS=np.full((1, 1), workload.budget, dtype=np.int32),
            rank=0,
            position=0,
            first_blocks=first_blocks,
        )
        cu_seqlens, block_size = (0, workload.tokens), workload.block_size
        slices = [
            segment_slice(cu_seqlens, first_blocks, segment, block_size=block_size)
            if segments > 1
            else None
            for segment in range(segments)
        ]
        self._model.zero_grad(set_to_none=True)
        operations = []
        for micro_batch in local_micro_batches(
            *(plan, cu_seqlens, slices),
            block_size=block_size,
            observe=True,
            device=workload.device,
        ):
            held = micro_batch.sequence
            params = micro_batch.params(workload.tokens)
            tokens_T = slice(held.tokens_T[0], held.tokens_T[-1] + 1) if held else slice(None)
            hidden_T1h = self._hidden_T1h[tokens_T].clone().requires_grad_()
            operations.append((params, tokens_T, hidden_T1h))
        seconds, outputs = workload.seconds, []
        marks = [seconds()]
        for params, _, hidden_T1h in operations:
            self._model.set_input_tensor(hidden_T1h)
            outputs.append(self._model(None, None, None, packed_seq_params=params))
        marks.append(seconds())
        for output, (_, tokens_T, _) in reversed(list(zip(outputs, operations, strict=True))):
            output.backward(self._gradient_T1h[tokens_T])
        marks.append(seconds())
        self._output_T1h = torch.cat([output.detach() for output in outputs])
        return dict(zip(("forward", "backward"), np.diff(marks), strict=True)) | {
            "forward and backward": marks[2] - marks[0]
        }


def _plain(value: Any) -> Any:
    return value if isinstance(value, int) else str(value).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
