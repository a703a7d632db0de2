# SPDX-License-Identifier: Apache-2.0
"""How well the pipeline simulator predicts Megatron's own 1F1B schedule.

Trains a small GPT with PP ranks over gloo on documents of very unequal length, one per micro-batch.
For every step the schedule's measured time (from the step's start to the last backward) is held
against two simulations: from the same measured micro-batch times, and from the cost model.

    python benchmarks/pipeline_reality.py --json benchmarks/results/pipeline_reality.json

--quick shows in seconds that it runs; its figures say nothing. Else it needs as many idle cores as
ranks; prints medians and spread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from forked_ranks import cpu_environment, free_port, run_alone, run_ranks

from sparsebalance_megatron.plan.context_groups import unshared
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms

WARM_UP_STEPS = 5
LONGEST_TOKENS, QUICK_LONGEST_TOKENS = 4096, 256
_LIMIT_S = 3600.0
MODEL_FLAGS = (
    *("--num-layers", "4", "--hidden-size", "128", "--ffn-hidden-size", "384"),
    *("--num-attention-heads", "4", "--group-query-attention", "--num-query-groups", "2"),
    *("--kv-channels", "32"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "2047"),
)
BALANCE_FLAGS = (
    *("--sparse-balance", "--sparse-balance-block-size", "128"),
    *("--sparse-balance-base-budget", "8", "--sparse-balance-batching", "arrival"),
    *("--sparse-balance-tuning", "off"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages, one rank each")
    parser.add_argument("--micro-batches", type=int, default=8, help="per step")
    parser.add_argument("--steps", type=int, default=30, help="measured steps, after warm-up")
    parser.add_argument("--quick", action="store_true", help="two steps of short documents")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.micro_batches = 2, arguments.stages
    with tempfile.TemporaryDirectory() as directory:
        steps = measured_steps(Path(directory), arguments)
    result = {
        "machine": machine(),
        "stages": arguments.stages,
        "micro_batches": arguments.micro_batches,
        "steps": len(steps),
        "from_measured_times": errors([compare(step, from_model=False) for step in steps]),
        "from_cost_model": errors([compare(step, from_model=True) for step in steps]),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n", encoding="utf-8")


def measured_steps(directory: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train, and return the step records after warm-up."""
    prefix, table = directory / "documents", directory / "costs.json"
    longest = QUICK_LONGEST_TOKENS if arguments.quick else LONGEST_TOKENS
    warm_up = 1 if arguments.quick else WARM_UP_STEPS
    write_documents(prefix, count=400, longest=longest)
    flags = (
        *MODEL_FLAGS,
        *("--seq-length", str(longest), "--max-position-embeddings", str(longest)),
        *BALANCE_FLAGS,
        *("--micro-batch-size", "1", "--global-batch-size", str(arguments.micro_batches)),
        *("--train-iters", str(arguments.steps + warm_up), "--lr", "1e-4"),
        *("--lr-decay-style", "constant", "--log-interval", "1"),
        *("--eval-iters", "0", "--eval-interval", "10000", "--split", "100,0,0"),
        *("--data-path", str(prefix)),
    )
    profile(table, flags, quick=arguments.quick)
    train(
        arguments.stages,
        *("-m", "sparsebalance_megatron.pretrain_gpt"),
        *(*flags, "--pipeline-model-parallel-size", str(arguments.stages)),
        *("--sparse-balance-cost-table", str(table), "--sparse-balance-log-dir", str(directory)),
    )
    lines = (directory / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [record for record in records if record["type"] == "step"][warm_up:]


def write_documents(prefix: Path, count: int, longest: int) -> None:
    """Lengths from 64 tokens to the longest, most of them short."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in np.exp(generator.uniform(np.log(65), np.log(longest + 1), count)).astype(int):
        builder.add_document(generator.integers(0, 2047, length, dtype=np.uint16), [length])
    builder.finalize(f"{prefix}.idx")


def profile(table: Path, flags: Sequence[str], *, quick: bool) -> None:
    """Measure the cost table."""
    effort = ["--quick"] if quick else []
    tool("profile", "-o", str(table), *effort, "--", *flags, folder=table.parent)


def tool(*arguments: str, folder: Path) -> None:
    """The ``sparse-balance`` command in a folder; its output only if it fails."""
    done = run_alone(
        ("-m", "sparsebalance_megatron.cli", *arguments),
        environment=cpu_environment(),
        folder=folder,
        timeout_s=_LIMIT_S,
    )
    if done.returncode:
        sys.exit(
            f"sparse-balance {arguments[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )


def train(ranks: int, *program: str) -> None:
    """Run a program as all ranks; its output only if it fails."""
    with tempfile.NamedTemporaryFile() as output:
        code = run_ranks(
            ranks,
            program,
            environment=cpu_environment(),
            master_port=free_port(),
            output=Path(output.name),
            timeout_s=_LIMIT_S,
        )
        if code != 0:
            printed = Path(output.name).read_text(encoding="utf-8", errors="replace")
            sys.exit(f"training failed, exit code {code}:\n{printed[-6000:]}")


def compare(step: dict[str, Any], *, from_model: bool) -> float:
    """Simulated over measured schedule time of one step, minus 1."""
    measured_ms = max(step["measured"]["schedule_ms"][0])
    if from_model:
        return step["predicted"]["makespan_ms"] / measured_ms - 1.0
    times_21PVM = np.array([step["measured"][name][:1] for name in ("forward_ms", "backward_ms")])
    alone = unshared(1, times_21PVM.shape[-1])
    times = OperationTimes.of_micro_batches(times_21PVM, alone)
    return float(makespans_ms(times)[0]) / measured_ms - 1.0


def errors(relative: list[float]) -> dict[str, float]:
    """Median and spread of the absolute relative errors, and their median sign."""
    absolute = np.abs(relative)
    return {
        "median_absolute_error": float(np.median(absolute)),
        "p95_absolute_error": float(np.quantile(absolute, 0.95)),
        "median_signed_error": float(np.median(relative)),
    }


def machine() -> dict[str, Any]:
    import torch

    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_at_end": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
