# SPDX-License-Identifier: Apache-2.0
"""Full activation recomputation with attention kept, against attention computed again.

    python benchmarks/recompute.py --json benchmarks/results/recompute.json
    python benchmarks/recompute.py --quick    # its times say little

One Megatron model, one row of 8,192 tokens, forward and backward on one CPU thread. Both contenders
run the same weights in turn, and the first of a pair changes from pair to pair, so that what
disturbs the machine disturbs both; time is this process's processor time. Gradients must be equal
bit by bit before anything is timed. Reported: median of each, the median of the ratios of pairs
(above 1, keeping is faster) with its quartiles, and what is kept per token and layer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsebalance_megatron.config import DEFAULT_SELECTION
from sparsebalance_megatron.megatron import cpu

LAYERS, HIDDEN, HEADS, GROUPS, HEAD_DIM, VOCABULARY = 2, 64, 4, 2, 32, 256
BLOCK_SIZE, BASE_BUDGET = 128, 8
HOW = ("keep", "again")


def main(arguments: list[str] | None = None) -> int:
    """Measure in a world of one rank, on the CPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of the row, one document")
    parser.add_argument(
        "--pairs", type=int, default=15, help="measured pairs, after one that warms"
    )
    parser.add_argument("--quick", action="store_true", help="1,024 tokens, two pairs")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.pairs = 1024, 2
    torch.set_num_threads(1)
    cpu.install()
    from sparsebalance_megatron.megatron.single_process import start_single_process

    start_single_process(1234, torch.device("cpu"))
    result = {"machine": machine(), **compare(options.tokens, options.pairs)}
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


def compare(tokens: int, pairs: int) -> dict[str, Any]:
    """Medians in ms of processor time, and the ratio of pairs."""
    step = Step(tokens)
    first, second = (step.gradients(how) for how in HOW)
    if not all(map(torch.equal, first, second)):
        raise SystemExit("gradients differ: nothing was timed")
    ms: dict[str, list[float]] = {how: [] for how in HOW}
    for pair in range(pairs):
        for how in HOW if pair % 2 else reversed(HOW):
            began_s = time.process_time()
            step.gradients(how)
            ms[how].append((time.process_time() - began_s) * 1e3)
    ratios = [again / keep for keep, again in zip(ms["keep"], ms["again"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "tokens": tokens,
        "layers": LAYERS,
        "block_size": BLOCK_SIZE,
        "base_budget": BASE_BUDGET,
        "pairs": pairs,
        "median_ms": {how: statistics.median(values) for how, values in ms.items()},
        "again_over_keep": {"median": statistics.median(ratios), "p25": low, "p75": high},
        "kept_bytes_per_token_and_layer": step.kept_bytes / (tokens * LAYERS),
        "gradients_equal": True,
    }


class Step:
    """Forward and backward of a small GPT under full recomputation."""

    def __init__(self, tokens: int) -> None:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        from sparsebalance_megatron.attention.select import selector_named
        from sparsebalance_megatron.megatron.compat import default_layer_spec
        from sparsebalance_megatron.megatron.core_attention import (
            AttentionOptions,
            replace_core_attention,
        )

        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            ffn_hidden_size=3 * HIDDEN,
            num_attention_heads=HEADS,
            num_query_groups=GROUPS,
            kv_channels=HEAD_DIM,
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
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        )
        self._options = AttentionOptions(
            block_size=BLOCK_SIZE,
            base_budget=BASE_BUDGET,
            selector=selector_named(DEFAULT_SELECTION),
            coverage_threshold=0.1,
            implementation="auto",
            grid=(1, 2, 4, 8, 16, 32, 64),
        )
        spec = replace_core_attention(default_layer_spec(config, None), self._options)
        self._model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=tokens,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        generator = torch.Generator().manual_seed(3)
        self._tokens_1T = torch.randint(VOCABULARY, (1, tokens), generator=generator)
        self.kept_bytes = 0

    def gradients(self, how: str) -> list[torch.Tensor]:
        """Gradients of all weights, after one forward and backward."""
        from sparsebalance_megatron.megatron.packed_seq_params import (
            local_micro_batches,
        )
        from sparsebalance_megatron.plan.step_plan import MicroBatchPlan

        tokens = self._tokens_1T.shape[1]
        for layer in self._model.decoder.layers:
            attention = layer.self_attention.core_attention
            attention._options = replace(self._options, keep=how == "keep")
        plan = MicroBatchPlan(
            samples=(0,),
            lengths_tokens=(tokens,),
            budgets_LS=np.full((LAYERS, 1), BASE_BUDGET, dtype=np.int32),
            rank=0,
            position=0,
        )
        (micro_batch,) = local_micro_batches(
            *(plan, (0, tokens), [None]),
            block_size=BLOCK_SIZE,
            observe=True,
            device=torch.device("cpu"),
        )
        params = micro_batch.params(tokens)
        self._model.zero_grad(set_to_none=True)
        losses_1T = self._model(
            self._tokens_1T,
            torch.arange(tokens)[None],
            None,
            labels=self._tokens_1T.roll(-1, 1),
            packed_seq_params=params,
        )
        self.kept_bytes = max(self.kept_bytes, kept_bytes(params.kept))
        losses_1T.mean().backward()
        return [weight.grad for weight in self._model.parameters()]


def kept_bytes(kept: Any) -> int:
    """Bytes of all layers' results, without what serves to compare inputs."""
    results = [result for result in kept._by_layer.values() if result is not None]
    return sum(
        x.nbytes
        for result in results
        for x in (
            *(result.out_THF, result.lse_TH),
            *(result.selection.indices_QCK, result.selection.counts_QC),
        )
    )


def machine() -> dict[str, Any]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_at_start": os.getloadavg()[0],
    }


if __name__ == "__main__":
    sys.exit(main())
